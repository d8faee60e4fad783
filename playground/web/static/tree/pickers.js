// Which target, method and rank table the tree is replayed on.
// @ts-nocheck
import { h, labelled } from "../kit.js";
import { Job, fillMenu, newest } from "./parts.js";
import { unpackTable } from "./replay.js";

const KINDS = { tree: "Choice trees", dynamic: "Dynamic trees", chain: "Chains" };

export class TreePickers {
  constructor(editor) {
    this.editor = editor;
    // menus: { targets: [{ key, title }], methods: { target: [{ key, title, kind, … }] } }
    this.menus = { targets: [], methods: {} };
    this.target = null;
    this.sources = [];
    this.newestSources = newest();
    this.newestTable = newest();
    this.waits = 0;
    const picker = (name, title, work) => {
      const box = h("select", { class: "line", "data-picker": name, "aria-label": title,
        onchange: () => work(box.value) });
      return { box, field: labelled(title, box) };
    };
    this.targets = picker("target", "Target", (target) => this.pickTarget(target));
    this.methods = picker("method", "Method", (key) => this.pickMethod(key));
    this.tables = picker("source", "Ranks measured over", (id) => this.pickSource(id));
    this.categories = picker("category", "Category", (name) => {
      editor.category = name || null;
      editor.changedTable();
    });
    this.categories.field.hidden = true;
    this.state = h("div", { class: "state", role: "status" });
    this.measure = new Job(editor, "Measure ranks", () => {
      this.measuring = editor.method?.key;
      return { kind: "ranks" };
    }, (end) => this.findSources(this.measuring === editor.method?.key ? end.source
      : this.tables.box.value));
    const use = (where, title) => h("button", { type: "button", class: "use", "data-use": where,
      onclick: () => this.use(where) }, title);
    this.host = h("div", { class: "bar" }, this.targets.field, this.methods.field, this.tables.field,
      this.categories.field, this.measure.host, h("span", { class: "spring" }),
      h("div", { class: "uses" }, use("generate", "Use in Generate"), use("compare", "Use in Compare")),
      this.state);
  }

  fill(menus, link) {
    this.menus = menus;
    fillMenu(this.targets.box, menus.targets.map(({ key, title }) => [key, title]));
    const known = menus.targets.some(({ key }) => key === link?.target);
    return this.pickTarget(known ? link.target : menus.targets[0]?.key, link);
  }

  // Marks the bar as busy until the work is done.
  async during(work) {
    this.waits += 1;
    this.host.setAttribute("aria-busy", "true");
    try {
      return await work();
    } finally {
      this.waits -= 1;
      this.host.setAttribute("aria-busy", String(this.waits > 0));
    }
  }

  // link: what to pick if it is offered, a method and a benchmark, whose texts to replay on.
  pickTarget(target, link = null) {
    this.target = target ?? null;
    this.targets.box.value = target ?? "";
    const methods = this.menus.methods[target] ?? [];
    fillMenu(this.methods.box, Object.keys(KINDS).flatMap((kind) => methods
      .filter((one) => one.kind === kind).map((one) => [one.key, one.title, KINDS[kind]])));
    const found = methods.find((one) => one.key === (link?.method || this.editor.method?.key));
    const first = methods.find((one) => one.kind === "tree") ?? methods[0];
    return this.pickMethod((found ?? first)?.key,
      link?.benchmark ? `benchmark:${link.benchmark}` : null);
  }

  pickMethod(key, wanted = null) {
    const method = (this.menus.methods[this.target] ?? []).find((one) => one.key === key) ?? null;
    this.methods.box.value = key ?? "";
    this.editor.adoptMethod(method);
    this.tell("looking for rank tables \u2026");
    return this.findSources(wanted);
  }

  findSources(wanted = null) {
    return this.during(async () => {
      const { editor, editor: { method } } = this;
      const answer = await this.newestSources(
        method ? editor.ask("sources", { target: this.target, wanted }) : { sources: [] });
      if (!answer) return;
      editor.complain(answer.error ?? null);
      this.sources = answer.sources ?? [];
      this.remark = answer.remark ?? "";
      this.weights = answer.weights ?? null;
      if (method) method.limits = answer.limits ?? method.limits;
      fillMenu(this.tables.box, this.sources.length
        ? this.sources.map((one) => [one.id, one.title, one.group]) : [["", "nothing yet"]]);
      const pick = this.sources.find((one) => one.id === (answer.pick ?? wanted))
        ?? this.sources.find((one) => one.ready) ?? this.sources[0];
      this.tables.box.value = pick?.id ?? "";
      await this.pickSource(pick?.id);
    });
  }

  pickSource(id) {
    return this.during(async () => {
      const { editor } = this, source = this.sources.find((one) => one.id === id) ?? null;
      const dynamic = editor.method?.kind === "dynamic";
      this.measure.host.hidden = !this.measure.running && (!source || source.ready || dynamic);
      this.measure.clear();
      if (dynamic || !source?.ready) {
        this.newestTable(null);
        editor.adoptTable(source, null, null);
        this.tell(!source ? this.remark : dynamic ? "" : "Its ranks are not measured yet: "
          + `\u201cMeasure ranks\u201d runs the drafter along ${source.what}.`);
      } else {
        this.tell("reading the rank table \u2026");
      }
      if (!source || !(dynamic || source.ready)) return;
      // Of a dynamic tree there is no table, but the trees that its runs drafted.
      const answer = await this.newestTable(
        editor.ask(dynamic ? "drafted" : "table", { source: id }));
      if (!answer) return;
      this.tell(answer.error ?? answer.words);
      if (answer.error) return;
      editor.adoptTable(source, dynamic ? null : unpackTable(answer.table), answer.speed);
      if (dynamic) editor.cards.dynamic.take(answer.drafted);
    });
  }

  tell(words) { this.state.textContent = words ?? ""; }

  showCategories(table) {
    const names = [...new Set(table?.categories ?? [])].filter(Boolean).sort();
    this.categories.field.hidden = names.length < 2;
    fillMenu(this.categories.box, [["", "all"], ...names.map((name) => [name, name])]);
  }

  use(where) {
    const { editor } = this;
    if (!editor.method) return;
    editor.writeLink();
    editor.trigger("use", { where, target: this.target, method: editor.method.key,
      tree: editor.tree.paths, settings: editor.cards.dynamic.settings(), weights: this.weights });
    editor.say(`Taken to ${where === "generate" ? "Generate" : "Compare, as its first configuration"}.`);
  }
}
