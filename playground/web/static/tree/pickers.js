// Pickers of target, method, and the rank table that the tree is replayed on.
import { Job, fillMenu, latest } from "./parts.js";
import { unpackTable } from "./replay.js";

export class TreePickers {
  // targets: [{ key, title }]; methods: { target: [{ key, title, group, kind, … }] }
  /** @type {any} */ choices = { targets: [], methods: {} };
  target = null;
  sources = [];
  numPending = 0;

  constructor(editor) {
    this.editor = editor;
    this.newestSources = latest();
    this.newestTable = latest();
    this.measure = new Job(editor, "ranks", () => {
      this.measuring = editor.method?.key;
      return { kind: "ranks" };
    }, (end) => this.fetchSources(this.measuring === editor.method?.key ? end.source
      : editor.menus.source.value));
  }

  get methods() { return this.choices.methods[this.target ?? ""] ?? []; }

  fill(choices) {
    this.choices = choices;
    fillMenu(this.editor.menus.target, choices.targets.map(({ key, title }) => [key, title]));
  }

  // Marks the bar as busy until the work has finished.
  async whileBusy(work) {
    const { bar } = this.editor.parts;
    this.numPending += 1;
    bar.setAttribute("aria-busy", "true");
    try {
      return await work();
    } finally {
      this.numPending -= 1;
      bar.setAttribute("aria-busy", String(this.numPending > 0));
    }
  }

  // link: a method to pick if it is available, and a benchmark whose texts to replay on.
  pickTarget(wanted, /** @type {Record<string, any> | null} */ link = null) {
    const { targets } = this.choices;
    this.target = (targets.find(({ key }) => key === wanted) ?? targets[0])?.key ?? null;
    this.editor.menus.target.value = this.target ?? "";
    const { methods } = this;
    fillMenu(this.editor.menus.method, methods.map((one) => [one.key, one.title, one.group]));
    const method = methods.find((one) => one.key === (link?.method || this.editor.method?.key))
      ?? methods.find((one) => one.kind === "tree") ?? methods[0];
    return this.pickMethod(method?.key, link?.benchmark ? `benchmark:${link.benchmark}` : null);
  }

  pickMethod(key, /** @type {string | null} */ sourceId = null) {
    this.editor.menus.method.value = key ?? "";
    this.editor.adoptMethod(this.methods.find((one) => one.key === key) ?? null);
    this.showState("looking for rank tables \u2026");
    return this.fetchSources(sourceId);
  }

  fetchSources(sourceId) {
    return this.whileBusy(async () => {
      const { editor, editor: { method, menus } } = this;
      const answer = await this.newestSources(
        method ? editor.ask("sources", { pick: sourceId }) : { sources: [] });
      if (!answer) return;
      editor.showAlert(answer.error ?? null);
      this.sources = answer.sources ?? [];
      this.remark = answer.remark ?? "";
      this.weights = answer.weights ?? null;
      if (method) method.limits = answer.limits ?? method.limits;
      fillMenu(menus.source, this.sources.length
        ? this.sources.map((one) => [one.id, one.title, one.group]) : [["", "nothing yet"]]);
      const source = this.sources.find((one) => one.id === (answer.pick ?? sourceId))
        ?? this.sources.find((one) => one.ready) ?? this.sources[0];
      menus.source.value = source?.id ?? "";
      await this.pickSource(source?.id);
    });
  }

  pickSource(id) {
    return this.whileBusy(async () => {
      const { editor } = this, source = this.sources.find((one) => one.id === id) ?? null;
      const dynamic = editor.method?.kind === "dynamic", ready = source && (source.ready || dynamic);
      this.measure.host.hidden = !this.measure.running && (!source || ready);
      this.measure.clear();
      if (dynamic || !ready) {
        this.newestTable(null);
        editor.adoptTable(source, null, null);
      }
      this.showState(!source ? this.remark : !ready ? "Its ranks are not measured yet: \u201cMeasure "
        + `ranks\u201d runs the drafter along ${source.what}.` : dynamic ? ""
        : "reading the rank table \u2026");
      if (!ready) return;
      // A dynamic tree has no table, but recorded trees of its runs.
      const answer = await this.newestTable(
        editor.ask(dynamic ? "drafted" : "table", { source: id }));
      if (!answer) return;
      this.showState(answer.error ?? answer.text);
      if (answer.error) return;
      editor.adoptTable(source, dynamic ? null : unpackTable(answer.table), answer.speed);
      if (dynamic) editor.cards.dynamic.take(answer.drafted);
    });
  }

  showState(text) { this.editor.parts.state.textContent = text ?? ""; }

  showCategories(table) {
    const { parts, menus } = this.editor;
    const names = [...new Set(table?.categories ?? [])].filter(Boolean).sort();
    parts.categories.hidden = names.length < 2;
    fillMenu(menus.category, [["", "all"], ...names.map((name) => [name, name])]);
  }

  // Opens another page with the tree.
  use(where) {
    const { editor } = this;
    if (!editor.method) return;
    editor.writeLink();
    editor.trigger("use", { where, target: this.target, method: editor.method.key,
      tree: editor.tree.paths, settings: editor.cards.dynamic.settings(), weights: this.weights });
    editor.announce(`Sent to ${where === "generate" ? "Generate" : "Compare, as its first configuration"}.`);
  }
}
