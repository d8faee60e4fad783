// Which target, method and rank table the tree is replayed on.
import { Job, fillMenu, newest } from "./parts.js";
import { unpackTable } from "./replay.js";

export class TreePickers {
  // targets: [{ key, title }]; methods: { target: [{ key, title, group, kind, … }] }
  offered = { targets: [], methods: {} };
  target = null;
  sources = [];
  waits = 0;

  constructor(editor) {
    this.editor = editor;
    this.newestSources = newest();
    this.newestTable = newest();
    this.measure = new Job(editor, "ranks", () => {
      this.measuring = editor.method?.key;
      return { kind: "ranks" };
    }, (end) => this.findSources(this.measuring === editor.method?.key ? end.source
      : editor.menus.source.value));
  }

  fill(offered, link) {
    this.offered = offered;
    const { targets } = offered;
    fillMenu(this.editor.menus.target, targets.map(({ key, title }) => [key, title]));
    const known = targets.some(({ key }) => key === link?.target);
    return this.pickTarget(known ? link.target : targets[0]?.key, link);
  }

  // Marks the bar as busy until the work is done.
  async during(work) {
    const { bar } = this.editor.parts;
    this.waits += 1;
    bar.setAttribute("aria-busy", "true");
    try {
      return await work();
    } finally {
      this.waits -= 1;
      bar.setAttribute("aria-busy", String(this.waits > 0));
    }
  }

  // link: what to pick if it is offered, a method and a benchmark, whose texts to replay on.
  pickTarget(target, link = {}) {
    this.target = target ?? null;
    this.editor.menus.target.value = target ?? "";
    const methods = this.offered.methods[target] ?? [];
    fillMenu(this.editor.menus.method, methods.map((one) => [one.key, one.title, one.group]));
    const found = methods.find((one) => one.key === (link?.method || this.editor.method?.key))
      ?? methods.find((one) => one.kind === "tree") ?? methods[0];
    return this.pickMethod(found?.key, link?.benchmark ? `benchmark:${link.benchmark}` : null);
  }

  pickMethod(key, /** @type {string | null} */ wanted = null) {
    const methods = this.offered.methods[this.target ?? ""] ?? [];
    this.editor.menus.method.value = key ?? "";
    this.editor.adoptMethod(methods.find((one) => one.key === key) ?? null);
    this.tell("looking for rank tables \u2026");
    return this.findSources(wanted);
  }

  findSources(wanted) {
    return this.during(async () => {
      const { editor, editor: { method, menus } } = this;
      const answer = await this.newestSources(
        method ? editor.ask("sources", { target: this.target, wanted }) : { sources: [] });
      if (!answer) return;
      editor.complain(answer.error ?? null);
      this.sources = answer.sources ?? [];
      this.remark = answer.remark ?? "";
      this.weights = answer.weights ?? null;
      if (method) method.limits = answer.limits ?? method.limits;
      fillMenu(menus.source, this.sources.length
        ? this.sources.map((one) => [one.id, one.title, one.group]) : [["", "nothing yet"]]);
      const pick = this.sources.find((one) => one.id === (answer.pick ?? wanted))
        ?? this.sources.find((one) => one.ready) ?? this.sources[0];
      menus.source.value = pick?.id ?? "";
      await this.pickSource(pick?.id);
    });
  }

  pickSource(id) {
    return this.during(async () => {
      const { editor } = this, source = this.sources.find((one) => one.id === id) ?? null;
      const dynamic = editor.method?.kind === "dynamic", ready = source && (source.ready || dynamic);
      this.measure.host.hidden = !this.measure.running && (!source || ready);
      this.measure.clear();
      if (dynamic || !ready) {
        this.newestTable(null);
        editor.adoptTable(source, null, null);
      }
      this.tell(!source ? this.remark : !ready ? "Its ranks are not measured yet: \u201cMeasure "
        + `ranks\u201d runs the drafter along ${source.what}.` : dynamic ? ""
        : "reading the rank table \u2026");
      if (!ready) return;
      // Of a dynamic tree there is no table, but the trees that its runs drafted.
      const answer = await this.newestTable(
        editor.ask(dynamic ? "drafted" : "table", { source: id }));
      if (!answer) return;
      this.tell(answer.error ?? answer.text);
      if (answer.error) return;
      editor.adoptTable(source, dynamic ? null : unpackTable(answer.table), answer.speed);
      if (dynamic) editor.cards.dynamic.take(answer.drafted);
    });
  }

  tell(text) { this.editor.parts.state.textContent = text ?? ""; }

  showCategories(table) {
    const { parts, menus } = this.editor;
    const names = [...new Set(table?.categories ?? [])].filter(Boolean).sort();
    parts.categories.hidden = names.length < 2;
    fillMenu(menus.category, [["", "all"], ...names.map((name) => [name, name])]);
  }

  // Takes the tree to another page.
  use(where) {
    const { editor } = this;
    if (!editor.method) return;
    editor.writeLink();
    editor.trigger("use", { where, target: this.target, method: editor.method.key,
      tree: editor.tree.paths, settings: editor.cards.dynamic.settings(), weights: this.weights });
    editor.say(`Sent to ${where === "generate" ? "Generate" : "Compare, as its first configuration"}.`);
  }
}
