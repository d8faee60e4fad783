// Trees in and out: presets, saving, import with the place of every fault, export, link.
// @ts-nocheck
import { download, h, plural } from "../kit.js";
import { Choices } from "./model.js";
import { fillMenu, tool } from "./parts.js";

const MAX_FILE_BYTES = 1_000_000;

export class TreeFiles {
  constructor(editor) {
    this.editor = editor;
    this.presets = h("select", { class: "line presets", "aria-label": "preset trees",
      onchange: () => this.openPreset() });
    const opener = (name, text, title) => {
      const button = tool(name, text, title, () => this.toggle(name));
      button.setAttribute("aria-expanded", "false");
      return button;
    };
    this.buttons = h("span", { class: "files" }, this.presets,
      opener("save", "Save \u2026", "keep this tree under a name"),
      opener("import", "Import \u2026", "read a tree from text or a file"),
      opener("export", "Export \u2026", "write the tree in another format"),
      tool("link", "Link", "copy a link that carries the tree", () => this.copyLink()));
    this.sheets = { save: this.saveSheet(), import: this.importSheet(), export: this.exportSheet() };
    this.host = h("div", { class: "sheets", hidden: true }, ...Object.values(this.sheets));
    this.host.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle(this.open);
    });
  }

  fill({ formats, trees }) {
    fillMenu(this.format, formats.map(({ name, title }) => [name, title]));
    this.fillPresets(trees);
  }

  enable(on) {
    for (const control of this.buttons.children) control.disabled = !on;
  }

  fillPresets(trees) {
    this.trees = trees;
    fillMenu(this.presets, [["", "Preset trees \u2026"], ...trees.map(({ title, paths, group }, i) =>
      [i, `${title} (${paths.length})`, group])]);
  }

  openPreset() {
    const preset = this.presets.value && this.trees[Number(this.presets.value)];
    if (!preset) return;
    this.presets.value = "";
    const { editor } = this;
    editor.open(Choices.closed(preset.paths), `Opened \u201c${preset.title}\u201d`);
    editor.hint.textContent = [preset.note, editor.hint.textContent].filter(Boolean).join(" ");
  }

  // Opens one sheet, or closes it if it is open.
  toggle(name) {
    const before = this.open;
    this.open = before === name ? null : name;
    this.host.hidden = this.open === null;
    const button = (key) => this.buttons.querySelector(`[data-tool=${key}]`);
    for (const [key, sheet] of Object.entries(this.sheets)) {
      sheet.hidden = key !== this.open;
      button(key).setAttribute("aria-expanded", String(!sheet.hidden));
    }
    if (this.open === "export") this.write();
    if (this.open) this.sheets[this.open].querySelector("input, textarea, select").focus();
    else button(before).focus();
  }

  sheet(title, ...children) {
    return h("section", { class: "sheet", hidden: true, "aria-label": title },
      h("header", {}, h("h4", {}, title), h("button", { type: "button", class: "quiet",
        onclick: () => this.toggle(this.open) }, "close")), ...children);
  }

  // ---- save

  saveSheet() {
    this.name = h("input", { type: "text", class: "line", maxlength: 80,
      "aria-label": "name of the tree", placeholder: "a name for this tree" });
    this.saveState = h("div", { class: "sheet-state", role: "status" });
    const keep = (event) => {
      event.preventDefault();
      this.keep("save");
    };
    return this.sheet("Save this tree", h("form", { class: "row", onsubmit: keep }, this.name,
      h("button", { type: "submit", class: "tool" }, "Save as preset"),
      h("button", { type: "button", class: "tool", onclick: () => this.keep("forget") },
        "Delete the one of this name")), this.saveState);
  }

  async keep(question) {
    const answer = await this.editor.ask(question,
      { name: this.name.value, tree: this.editor.tree.paths });
    told(this.saveState, answer, answer.words);
    if (answer.trees) this.fillPresets(answer.trees);
  }

  // ---- import

  importSheet() {
    this.text = h("textarea", { class: "line code", rows: 5, spellcheck: "false",
      "aria-label": "tree as text", placeholder: "[[0], [0, 0], [0, 1], [1]]",
      "aria-describedby": "pg-tree-fault" });
    this.importFault = h("div", { class: "sheet-state faulty", role: "alert", id: "pg-tree-fault" });
    this.file = h("input", { type: "file", class: "file", "aria-label": "tree file",
      onchange: () => this.readFile() });
    return this.sheet("Import a tree", h("p", { class: "note" }, "Lists or tuples of ranks (all "
      + "candidates, or only the leaves), TensorRT-LLM YAML, Triton braces {0}, {0, 0}, level widths "
      + "[1, 7, 6], or a Sequoia growmap (JSON, or a .pt file). The format is recognised."), this.text,
    h("div", { class: "row" }, h("button", { type: "button", class: "tool",
      onclick: () => this.read() }, "Open this tree"), this.file), this.importFault);
  }

  async readFile() {
    const [file] = this.file.files;
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) {
      this.importFault.textContent = `${file.name} has ${file.size} bytes; a tree has at most `
        + `${MAX_FILE_BYTES}.`;
      return;
    }
    this.file.value = "";
    if (/\.pth?$/i.test(file.name)) {
      const bytes = new Uint8Array(await file.arrayBuffer());
      this.read({ file: btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")) });
    } else {
      this.text.value = await file.text();
      this.read();
    }
  }

  async read(asked = { text: this.text.value }) {
    const answer = await this.editor.ask("read", asked);
    told(this.importFault, answer, "");
    this.text.setAttribute("aria-invalid", String(Boolean(answer.error)));
    if (answer.error) { this.point(answer.error); return; }
    const tree = Choices.closed(answer.tree);
    this.toggle("import");
    this.editor.open(tree, `Imported ${plural(tree.size, "node")} from ${answer.format}`);
  }

  // Selects what stands at the place that a fault names.
  point(sentence) {
    this.text.focus();
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
    this.out = h("textarea", { class: "line code", rows: 5, readonly: true,
      "aria-label": "exported tree" });
    this.exportState = h("div", { class: "sheet-state", role: "status" });
    const button = (text, onclick) => h("button", { type: "button", class: "tool", onclick }, text);
    return this.sheet("Export this tree", h("div", { class: "row" }, this.format,
      button("Copy", () => this.copy()),
      button("Download", () => download(`choice-tree.${this.suffix}`, this.out.value))),
    this.out, this.exportState);
  }

  async write() {
    const answer = await this.editor.ask("write",
      { tree: this.editor.tree.paths, format: this.format.value });
    this.suffix = answer.suffix ?? "txt";
    this.out.value = answer.text ?? "";
    told(this.exportState, answer, answer.note);
  }

  async copy() {
    const copied = await toClipboard(this.out.value);
    if (!copied) this.out.select();
    this.exportState.textContent = copied ? "Copied."
      : "The browser does not let a page copy here. Select the text and copy it.";
  }

  async copyLink() {
    const copied = await toClipboard(this.editor.writeLink());
    this.editor.say(copied ? "Link copied; it carries the tree."
      : "The address bar holds a link that carries the tree.");
  }
}

function told(line, { error }, words) {
  line.classList.toggle("faulty", Boolean(error));
  line.textContent = error ?? words;
}

const toClipboard = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
};
