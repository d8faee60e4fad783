// The bar over the table: what can be done with the ticked runs, its progress, and its undoing.
// Needs dom.js, runs_columns.js.
const KINDS = [["json", "JSON, whole runs"], ["csv", "CSV, a line per run"],
  ["steps", "CSV, a line per step"]];
const TYPES = { json: "application/json", csv: "text/csv", steps: "text/csv" };
const PART_IDS = 200;
const PART_CHARS = 2_000_000;

class Actions {
  // calls: ask(name, asked), say(sentence), reload(), compare(ids), query(), total()
  constructor(table, calls) {
    this.table = table;
    this.calls = calls;
    this.words = h("span", { class: "said", role: "status" });
    this.buttons = h("span", { class: "buttons" });
    this.bar = h("progress", { hidden: true, max: 1 });
    this.stop = h("button", { type: "button", hidden: true, onclick: () => { this.stopped = true; } },
      "Stop");
    this.file = h("input", { type: "file", accept: ".json,.gz,application/json", hidden: true,
      "aria-label": "file to import", onchange: () => this.importFile() });
    this.host = h("div", { class: "actions" }, this.buttons, this.words, this.bar, this.stop,
      this.file);
    this.draw();
  }

  get ids() { return [...this.table.ticked.keys()]; }

  button(title, act, more = {}) {
    return h("button", { type: "button", onclick: act, ...more }, title);
  }

  exportMenu(title, query) {
    const menu = popover(title, h("div", { class: "menu" }, ...KINDS.map(([kind, words]) =>
      this.button(words, () => { menu.open = false; this.export(kind, query()); },
        { "data-kind": kind }))));
    return menu;
  }

  draw() {
    const { size } = this.table.ticked;
    if (!size) {
      this.buttons.replaceChildren(
        this.exportMenu(`export all ${this.calls.total() ?? ""}`, () => this.calls.query()),
        this.button("import\u2026", () => this.file.click()),
        h("span", { class: "hint" }, "tick runs to compare, tag or delete them"));
      return;
    }
    const deleted = [...this.table.ticked.values()].every((row) => row.deleted);
    this.buttons.replaceChildren(h("b", {}, `${size} ticked`),
      this.button("compare", () => this.calls.compare(this.ids), { class: "main", disabled: size < 2 }),
      this.tagMenu(),
      this.exportMenu("export", () => ({ ids: this.ids })),
      deleted ? this.button("restore", () => this.restore(this.ids))
        : this.button("delete", () => this.delete(this.ids)),
      this.button("untick", () => this.table.untick()));
  }

  tagMenu() {
    const box = h("input", { type: "text", class: "line", placeholder: "tags, with commas",
      "aria-label": "tags" });
    const act = async (key) => {
      const tags = readTags(box.value);
      if (!tags.length) return;
      menu.open = false;
      const done = await this.calls.ask("edit", { do: "retag", ids: this.ids, [key]: tags });
      if (!done) return;
      this.say(`${key === "add" ? "Tagged" : "Untagged"} ${plural(this.ids.length, "run")}.`);
      this.calls.reload();
    };
    box.addEventListener("keydown", (event) => { if (event.key === "Enter") act("add"); });
    const menu = popover("tag", h("div", { class: "menu row" }, box,
      this.button("add", () => act("add")), this.button("remove", () => act("remove"))));
    return menu;
  }

  say(sentence, ...more) { this.words.replaceChildren(sentence, ...more); }

  async delete(ids) {
    if (!await this.calls.ask("edit", { do: "delete", ids })) return;
    this.table.untick();
    this.say(`Deleted ${plural(ids.length, "run")}. `, this.button("undo", () => this.restore(ids),
      { class: "undo" }));
    this.calls.reload();
  }

  async restore(ids) {
    if (!await this.calls.ask("edit", { do: "restore", ids })) return;
    this.table.untick();
    this.say(`Restored ${plural(ids.length, "run")}.`);
    this.calls.reload();
  }

  begin(words) {
    this.stopped = false;
    this.say(words);
    this.bar.hidden = this.stop.hidden = false;
    this.bar.removeAttribute("value");
  }

  end(...said) {
    this.bar.hidden = this.stop.hidden = true;
    this.say(...said);
  }

  async export(kind, query) {
    this.begin("Looking up the runs\u2026");
    const start = await this.calls.ask("export_start", { kind, query });
    if (!start) return this.end("");
    const texts = [];
    for (let at = 0; at < start.ids.length && !this.stopped;) {
      const ids = start.ids.slice(at, at + PART_IDS);
      const part = await this.calls.ask("export_part", { kind, ids });
      if (!part) return this.end("The export failed.");
      texts.push(...part.texts);
      at += part.num_runs;
      this.bar.value = at / start.ids.length;
      this.say(`Exported ${at} of ${plural(start.ids.length, "run")}`);
    }
    if (this.stopped) return this.end("Export stopped; nothing was saved.");
    if (!start.ids.length) return this.end("There is nothing to export.");
    const parts = [start.head];
    texts.forEach((text, i) => parts.push(i ? start.between + text : text));
    const name = `runs-${new Date().toISOString().slice(0, 19).replace(/[:T]/g, "-")}`;
    save(`${name}${kind === "steps" ? "-steps" : ""}.${kind === "json" ? "json" : "csv"}`,
      new Blob([...parts, start.tail], { type: TYPES[kind] }));
    this.end(`Exported ${plural(start.ids.length, "run")}.`);
  }

  async importFile() {
    const file = this.file.files[0];
    this.file.value = "";
    if (!file) return;
    this.begin(`Reading ${clip(file.name, 40)}\u2026`);
    let text;
    try {
      text = await readText(file);
    } catch {
      return this.end(`${file.name} cannot be read: it is no text and no gzip file.`);
    }
    const sum = { added: 0, known: 0, renamed: [] };
    for (const { share, part } of importParts(text)) {
      if (this.stopped) break;
      const got = await this.calls.ask("import_part", part);
      if (!got) {
        this.end(importWords(sum, "The rest was not imported."));
        return this.calls.reload();
      }
      sum.added += got.added;
      sum.known += got.known;
      sum.renamed.push(...got.renamed);
      this.bar.value = share;
      this.say(importWords(sum));
    }
    this.end(importWords(sum, this.stopped ? "Stopped; the rest was not imported." : ""));
    this.calls.reload();
  }
}

function importWords({ added, known, renamed }, more = "") {
  const words = [`Imported ${plural(added + renamed.length, "run")}`];
  if (known) words.push(`${known} were here already`);
  if (renamed.length) words.push(`${renamed.length} got a new id, as another run has theirs`);
  return `${words.join("; ")}. ${more}`;
}

async function readText(file) {
  const head = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  if (head[0] !== 0x1f || head[1] !== 0x8b) return file.text();
  return new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// An export has a run per line; anything else goes to the server as a whole.
function* importParts(text) {
  const lines = text.split("\n");
  if (!lines[0].trimEnd().endsWith('"runs": [') || lines.findLastIndex((line) => line.trim() === "]}") < 0) {
    yield { share: 1, part: { text } };
    return;
  }
  let part = [], size = 0, start = 1;
  for (let i = 1; i < lines.length; i++) {
    const line = lines[i].trim().replace(/,$/, "");
    if (!line || line === "]}") continue;
    part.push(line);
    size += line.length;
    if (size > PART_CHARS || part.length === PART_IDS) {
      yield { share: i / lines.length, part: { lines: part, start } };
      start += part.length;
      part = [];
      size = 0;
    }
  }
  if (part.length) yield { share: 1, part: { lines: part, start } };
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function readTags(text) {
  return [...new Set(text.split(",").map((tag) => tag.trim()).filter(Boolean))];
}
