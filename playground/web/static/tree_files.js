// Trees in and out: presets, saving, import with the place of every fault, export, link.
// Needs dom.js, tree_model.js.
const SAMPLE = "[[0], [0, 0], [0, 1], [1]]";

class TreeFiles {
  constructor(editor) {
    this.editor = editor;
    const tool = (name, text, title, work) => h("button", { type: "button", class: "tool",
      "data-tool": name, title, "aria-expanded": "false", onclick: work }, text);
    this.presets = h("select", { class: "line presets", "aria-label": "preset trees",
      onchange: () => this.openPreset() });
    this.buttons = h("span", { class: "files" }, this.presets,
      tool("save", "Save \u2026", "keep this tree under a name", () => this.toggle("save")),
      tool("import", "Import \u2026", "read a tree from text or a file", () => this.toggle("import")),
      tool("export", "Export \u2026", "write the tree in another format", () => this.toggle("export")),
      tool("link", "Link", "copy a link that carries the tree", () => this.copyLink()));
    this.sheets = { save: this.saveSheet(), import: this.importSheet(), export: this.exportSheet() };
    this.host = h("div", { class: "sheets", hidden: true }, ...Object.values(this.sheets));
    this.host.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle(this.shown);
    });
  }

  fill({ formats, trees }) {
    options(this.format, formats.map(({ name, title }) => [name, title]));
    this.fillPresets(trees);
  }

  enable(on) {
    for (const control of this.buttons.children) control.disabled = !on;
  }

  fillPresets(trees) {
    this.trees = trees;
    const groups = [...new Set(trees.map((tree) => tree.group))];
    this.presets.replaceChildren(h("option", { value: "" }, "Preset trees \u2026"),
      ...groups.map((group) => h("optgroup", { label: group }, ...trees.map((tree, i) => [tree, i])
        .filter(([tree]) => tree.group === group)
        .map(([tree, i]) => h("option", { value: i }, `${tree.title} (${tree.paths.length})`)))));
  }

  openPreset() {
    const preset = this.trees[Number(this.presets.value)];
    if (this.presets.value === "" || !preset) return;
    this.presets.value = "";
    this.editor.open(Choices.closed(preset.paths), `Opened \u201c${preset.title}\u201d`);
    this.editor.hint.textContent = [preset.note, this.editor.hint.textContent].filter(Boolean).join(" ");
  }

  toggle(name) {
    const before = this.shown;
    this.shown = before === name ? null : name;
    this.host.hidden = this.shown === null;
    for (const [key, sheet] of Object.entries(this.sheets)) {
      sheet.hidden = key !== this.shown;
      this.buttons.querySelector(`[data-tool=${key}]`)
        .setAttribute("aria-expanded", String(key === this.shown));
    }
    if (this.shown === "export") this.write();
    if (this.shown) this.sheets[this.shown].querySelector("input, textarea, select").focus();
    else this.buttons.querySelector(`[data-tool=${before}]`)?.focus();
  }

  sheet(title, ...children) {
    return h("section", { class: "sheet", hidden: true, "aria-label": title },
      h("header", {}, h("h4", {}, title), h("button", { type: "button", class: "quiet",
        onclick: () => this.toggle(this.shown) }, "close")), ...children);
  }

  // ---- save

  saveSheet() {
    this.name = h("input", { type: "text", class: "line", maxlength: 80, "aria-label": "name of the tree",
      placeholder: "a name for this tree" });
    this.saveState = h("div", { class: "sheet-state", role: "status" });
    const form = h("form", { class: "row", onsubmit: (event) => {
      event.preventDefault();
      this.save();
    } }, this.name, h("button", { type: "submit", class: "tool" }, "Save as preset"),
    h("button", { type: "button", class: "tool", onclick: () => this.forget() },
      "Delete the one of this name"));
    return this.sheet("Save this tree", form, this.saveState);
  }

  async save() {
    const { editor } = this;
    this.answered(await server.save({ ...this.asking(), name: this.name.value,
      tree: editor.tree.paths }));
  }

  async forget() {
    this.answered(await server.forget({ name: this.name.value }));
  }

  answered(answer) {
    this.saveState.classList.toggle("faulty", !answer || Boolean(answer.error));
    this.saveState.textContent = answer?.error ?? answer?.words ?? "The server did not answer.";
    if (answer?.trees) this.fillPresets(answer.trees);
  }

  // ---- import

  importSheet() {
    this.text = h("textarea", { class: "line code", rows: 5, spellcheck: "false",
      "aria-label": "tree as text", placeholder: SAMPLE, "aria-describedby": "pg-tree-fault" });
    this.importFault = h("div", { class: "sheet-state faulty", role: "alert", id: "pg-tree-fault" });
    this.file = h("input", { type: "file", class: "file", "aria-label": "tree file",
      onchange: () => this.readFile() });
    const note = h("p", { class: "note" }, "Lists or tuples of ranks (all candidates, or only the "
      + "leaves), TensorRT-LLM YAML, Triton braces {0}, {0, 0}, level widths [1, 7, 6], or a Sequoia "
      + "growmap (JSON, or a .pt file). The format is recognised.");
    return this.sheet("Import a tree", note, this.text, h("div", { class: "row" },
      h("button", { type: "button", class: "tool", onclick: () => this.read() }, "Open this tree"),
      this.file), this.importFault);
  }

  readFile() {
    const [file] = this.file.files;
    if (!file) return;
    if (file.size > 1_000_000) {
      this.importFault.textContent = `${file.name} has ${file.size} bytes; a tree has at most 1000000.`;
      return;
    }
    this.file.value = "";
    if (/\.pth?$/i.test(file.name)) {
      file.arrayBuffer().then((buffer) => {
        const letters = Array.from(new Uint8Array(buffer), (byte) => String.fromCharCode(byte));
        this.read({ file: btoa(letters.join("")) });
      });
      return;
    }
    file.text().then((text) => {
      this.text.value = text;
      this.read();
    });
  }

  // Of the method the tree is for: what its drafter can take, and what its setting is called.
  asking() {
    const { pickers, method } = this.editor;
    return { target: pickers.target, method: method?.key ?? null };
  }

  async read(asked = { text: this.text.value }) {
    const answer = await server.read({ ...asked, ...this.asking() });
    this.importFault.textContent = answer?.error ?? (answer ? "" : "The server did not answer.");
    this.text.setAttribute("aria-invalid", String(!answer || Boolean(answer.error)));
    if (!answer || answer.error) {
      this.text.focus();
      this.point(answer?.error ?? "");
      return;
    }
    const tree = Choices.closed(answer.tree);
    this.toggle("import");
    this.editor.open(tree, `Imported ${plural(tree.size, "node")} from ${answer.format}`);
  }

  // Selects what stands at the place that a fault names.
  point(sentence) {
    const found = /line (\d+), column (\d+)/.exec(sentence);
    if (!found) return;
    const lines = this.text.value.split("\n").slice(0, Number(found[1]) - 1);
    const start = lines.reduce((sum, line) => sum + line.length + 1, 0) + Number(found[2]) - 1;
    const end = start + Math.max(1, this.text.value.slice(start).search(/[\s,\])}]|$/));
    this.text.setSelectionRange(start, end);
  }

  // ---- export

  exportSheet() {
    this.format = h("select", { class: "line", "aria-label": "format", onchange: () => this.write() });
    this.out = h("textarea", { class: "line code", rows: 5, readonly: true, "aria-label": "exported tree" });
    this.exportState = h("div", { class: "sheet-state", role: "status" });
    return this.sheet("Export this tree", h("div", { class: "row" }, this.format,
      h("button", { type: "button", class: "tool", onclick: () => this.copy(this.out.value,
        this.exportState) }, "Copy"),
      h("button", { type: "button", class: "tool", onclick: () => this.download() }, "Download")),
    this.out, this.exportState);
  }

  async write() {
    const answer = await server.write({ ...this.asking(), tree: this.editor.tree.paths,
      format: this.format.value });
    this.suffix = answer?.suffix ?? "txt";
    this.out.value = answer?.text ?? "";
    this.exportState.textContent = answer?.error ?? answer?.note
      ?? (answer ? "" : "The server did not answer.");
    this.exportState.classList.toggle("faulty", !answer || Boolean(answer.error));
  }

  async copy(text, where) {
    try {
      await navigator.clipboard.writeText(text);
      where.textContent = "Copied.";
    } catch {
      where.textContent = "The browser does not let a page copy here. Select the text and copy it.";
      this.out.select();
    }
  }

  download() {
    const url = URL.createObjectURL(new Blob([this.out.value], { type: "text/plain" }));
    h("a", { href: url, download: `choice-tree.${this.suffix}` }).click();
    URL.revokeObjectURL(url);
  }

  async copyLink() {
    const link = this.editor.writeLink();
    try {
      await navigator.clipboard.writeText(link);
      this.editor.say("Link copied; it carries the tree.");
    } catch {
      this.editor.say("The address bar holds a link that carries the tree.");
    }
  }
}
