// Presets, saving, import and export of trees.
import { download, plural, toClipboard } from "../kit.js";
import { Choices } from "./model.js";
import { elementsBy, fillMenu } from "./parts.js";

const MAX_FILE_BYTES = 1_000_000;

export class TreeFiles {
  /** @type {string | null} */ opened = null;
  trees = [];
  suffix = "txt";

  constructor(editor) {
    this.editor = editor;
    this.sheets = elementsBy(editor.host, "sheet");
    const { save, file } = editor.parts;
    save.addEventListener("submit", (event) => {
      event.preventDefault();
      this.store("save");
    });
    file.addEventListener("change", () => this.readFile(file.files[0]));
    for (const sheet of Object.values(this.sheets)) {
      sheet.addEventListener("keydown", (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        this.toggle(this.opened);
      });
    }
  }

  fill({ formats, trees }) {
    fillMenu(this.editor.menus.format, formats);
    this.fillPresets(trees);
  }

  fillPresets(trees) {
    this.trees = trees;
    fillMenu(this.editor.menus.preset, [["", "Preset trees \u2026"],
      ...trees.map(({ title, paths, group }, i) => [i, `${title} (${paths.length})`, group])]);
  }

  openPreset(place) {
    const { editor } = this, { paths, title, note } = this.trees[place];
    editor.menus.preset.value = "";
    editor.open(Choices.closed(paths), `Opened \u201c${title}\u201d`);
    const { hint } = editor.parts;
    hint.textContent = [note, hint.textContent].filter(Boolean).join(" ");
  }

  // Opens one sheet, or closes it if it is open.
  toggle(name) {
    this.opened = this.opened === name ? null : name;
    const { tools } = this.editor;
    for (const [key, sheet] of Object.entries(this.sheets)) {
      sheet.hidden = key !== this.opened;
      tools[key].setAttribute("aria-expanded", String(!sheet.hidden));
    }
    if (this.opened === "export") this.write();
    (this.opened ? this.sheets[name].querySelector(".first") : tools[name]).focus();
  }

  // Shows the outcome of a question in its sheet.
  showState(name, /** @type {{ error?: string }} */ { error }, text = "") {
    const state = this.sheets[name].querySelector(".sheet-state");
    state.classList.toggle("faulty", Boolean(error));
    state.textContent = error ?? text;
  }

  async store(question) {
    const { editor } = this;
    const answer = await editor.ask(question,
      { name: editor.parts.name.value, tree: editor.tree.paths });
    this.showState("save", answer, answer.text);
    if (answer.trees) this.fillPresets(answer.trees);
  }

  async readFile(file) {
    const { parts } = this.editor;
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) {
      this.showState("import", { error: `${file.name} has ${file.size} bytes; a tree has at most `
        + `${MAX_FILE_BYTES}.` });
      return;
    }
    parts.file.value = "";
    if (/\.pth?$/i.test(file.name)) {
      const bytes = new Uint8Array(await file.arrayBuffer());
      this.read({ file: btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")) });
    } else {
      parts.text.value = await file.text();
      this.readText();
    }
  }

  readText() { return this.read({ text: this.editor.parts.text.value }); }

  async read(question) {
    const { editor, editor: { parts: { text } } } = this, answer = await editor.ask("read", question);
    this.showState("import", answer);
    text.setAttribute("aria-invalid", String(Boolean(answer.error)));
    if (answer.error) { text.focus(); return; }
    const tree = Choices.closed(answer.tree);
    this.toggle("import");
    editor.open(tree, `Imported ${plural(tree.size, "node")}`);
  }

  async write() {
    const { editor } = this;
    const answer = await editor.ask("write",
      { tree: editor.tree.paths, format: editor.menus.format.value });
    this.suffix = answer.suffix ?? "txt";
    editor.parts.out.value = answer.text ?? "";
    this.showState("export", answer, answer.note);
  }

  download() { download(`choice-tree.${this.suffix}`, this.editor.parts.out.value); }

  async copy() {
    const { out } = this.editor.parts, copied = await toClipboard(out.value);
    if (!copied) out.select();
    this.showState("export", {}, copied ? "Copied."
      : "The browser does not allow copying here. Select the text and copy it.");
  }
}
