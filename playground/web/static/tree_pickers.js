// Which target, method and rank table the tree is replayed on. Needs dom.js, tree_model.js.
class TreePickers {
  constructor(editor) {
    this.editor = editor;
    this.menus = { targets: [], methods: {} };
    this.target = null;
    const picker = (name, title, work) => {
      const box = h("select", { class: "line", "data-picker": name, "aria-label": title,
        onchange: work });
      return { box, field: h("label", { class: "picker" }, h("span", {}, title), box) };
    };
    this.targetPicker = picker("target", "Target", () => this.pickTarget(this.targetPicker.box.value));
    this.methodPicker = picker("method", "Method", () => this.pickMethod(this.methodPicker.box.value));
    this.sourcePicker = picker("source", "Ranks measured over", () => this.pickSource());
    this.categoryPicker = picker("category", "Category", () => this.pickCategory());
    this.categoryPicker.field.hidden = true;
    this.state = h("div", { class: "state", role: "status" });
    this.waits = 0;
    this.measure = new TreeJob("Measure ranks", () => this.askMeasure(), (end) => this.measured(end));
    const use = (where, title) => h("button", { type: "button", class: "use", "data-use": where,
      onclick: () => this.use(where) }, title);
    this.uses = h("div", { class: "uses" }, use("generate", "Use in Generate"),
      use("compare", "Use in Compare"));
    this.host = h("div", { class: "bar" }, this.targetPicker.field, this.methodPicker.field,
      this.sourcePicker.field, this.categoryPicker.field, this.measure.host,
      h("span", { class: "spring" }), this.uses, this.state);
  }

  // menus: { targets: [{ key, title }], methods: { target: [{ key, title, kind, … }] } }
  fill(menus, link) {
    this.menus = menus;
    options(this.targetPicker.box, menus.targets.map(({ key, title }) => [key, title]));
    const known = menus.targets.some(({ key }) => key === link?.target);
    return this.pickTarget(known ? link.target : menus.targets[0]?.key, link?.method || undefined,
      sourceOf(link));
  }

  // wanted: the source to pick if it is offered.
  pickTarget(target, method, wanted = null) {
    this.target = target ?? null;
    this.targetPicker.box.value = target ?? "";
    const methods = this.menus.methods[target] ?? [];
    const kinds = [["tree", "Choice trees"], ["dynamic", "Dynamic trees"], ["chain", "Chains"]];
    this.methodPicker.box.replaceChildren(...kinds.flatMap(([kind, title]) => {
      const some = methods.filter((one) => one.kind === kind);
      return some.length ? [h("optgroup", { label: title },
        ...some.map((one) => h("option", { value: one.key }, one.title)))] : [];
    }));
    const found = methods.find((one) => one.key === (method ?? this.editor.method?.key));
    const first = methods.find((one) => one.kind === "tree") ?? methods[0];
    return this.pickMethod((found ?? first)?.key, wanted);
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

  pickMethod(key, wanted = null) {
    const method = (this.menus.methods[this.target] ?? []).find((one) => one.key === key) ?? null;
    this.methodPicker.box.value = key ?? "";
    this.editor.adoptMethod(method);
    this.tell("looking for rank tables \u2026");
    return this.findSources(wanted);
  }

  findSources(wanted = null) { return this.during(() => this.readSources(wanted)); }

  async readSources(wanted) {
    const { editor } = this, { method } = editor;
    const ticket = this.asking = Symbol("asking");
    const answer = method
      ? await server.sources({ target: this.target, method: method.key, wanted }) : { sources: [] };
    if (ticket !== this.asking) return;
    editor.complain(answer?.error ?? (answer ? null : "The server did not answer."));
    this.sources = answer?.sources ?? [];
    this.remark = answer?.remark ?? "";
    this.weights = answer?.weights ?? null;
    if (method) method.limits = answer?.limits ?? method.limits;
    const groups = [...new Set(this.sources.map((one) => one.group))];
    this.sourcePicker.box.replaceChildren(
      ...(this.sources.length ? [] : [h("option", { value: "" }, "nothing yet")]),
      ...groups.map((group) => h("optgroup", { label: group },
        ...this.sources.filter((one) => one.group === group)
          .map((one) => h("option", { value: one.id }, one.title)))));
    const pick = this.sources.find((one) => one.id === (answer?.pick ?? wanted))
      ?? this.sources.find((one) => one.ready) ?? this.sources[0];
    this.sourcePicker.box.value = pick?.id ?? "";
    await this.pickSource();
  }

  pickSource() { return this.during(() => this.readSource()); }

  async readSource() {
    const source = (this.sources ?? []).find((one) => one.id === this.sourcePicker.box.value);
    const { editor } = this;
    const dynamic = editor.method?.kind === "dynamic";
    this.measure.host.hidden = !this.measure.running && (!source || source.ready || dynamic);
    this.measure.clear();
    if (dynamic && source) { await this.readDrafted(source); return; }
    if (!source?.ready) {
      this.asking = null;
      editor.adoptTable(source ?? null, null, null);
      this.tell(source ? `Its ranks are not measured yet: \u201cMeasure ranks\u201d runs the drafter `
        + `along ${source.what}.` : this.remark);
      return;
    }
    const ticket = this.asking = Symbol("asking");
    this.tell("reading the rank table \u2026");
    const answer = await server.table({ source: source.id, target: this.target,
      method: editor.method.key });
    if (ticket !== this.asking) return;
    if (!answer || answer.error) {
      this.tell(answer?.error ?? "The server did not answer. Try again.");
      return;
    }
    editor.adoptTable(source, unpackTable(answer.table), answer.speed);
    this.tell(answer.words);
  }

  // The trees that the runs of this method drafted, as they were recorded.
  async readDrafted(source) {
    const { editor } = this;
    const ticket = this.asking = Symbol("asking");
    editor.adoptTable(source, null, null);
    const answer = await server.drafted({ source: source.id, target: this.target,
      method: editor.method.key });
    if (ticket !== this.asking) return;
    this.tell(answer?.error ?? answer?.words ?? "The server did not answer. Try again.");
    if (!answer || answer.error) return;
    editor.adoptTable(source, null, answer.speed);
    editor.side.dynamic.take(answer.drafted);
  }

  tell(words) { this.state.textContent = words ?? ""; }

  showCategories(table) {
    const names = [...new Set(table?.categories ?? [])].filter(Boolean).sort();
    this.categoryPicker.field.hidden = names.length < 2;
    options(this.categoryPicker.box, [["", "all"], ...names.map((name) => [name, name])]);
  }

  pickCategory() {
    this.editor.category = this.categoryPicker.box.value || null;
    this.editor.changedTable();
  }

  askMeasure() {
    const { editor } = this;
    this.measuring = editor.method?.key;
    return server.measure({ kind: "ranks", target: this.target, method: editor.method?.key,
      source: this.sourcePicker.box.value || null, tab: TAB });
  }

  measured(end) {
    const same = this.measuring === this.editor.method?.key;
    this.findSources(same ? end.source : this.sourcePicker.box.value);
  }

  use(where) {
    const { editor } = this;
    if (!editor.method) return;
    editor.writeLink();
    trigger("use", { where, target: this.target, method: editor.method.key,
      tree: editor.tree.paths, settings: editor.side.settings(), weights: this.weights });
    editor.say(`Taken to ${where === "generate" ? "Generate" : "Compare, as its first configuration"}.`);
  }
}

// A link may name a benchmark: its texts are what to replay on.
const sourceOf = (link) => link?.benchmark ? `benchmark:${link.benchmark}` : null;

// Whose jobs are whose: a new one of the same tab replaces the one before.
const TAB = `tree-${Math.random().toString(36).slice(2, 12)}`;

function options(box, rows) {
  box.replaceChildren(...rows.map(([value, title]) => h("option", { value }, title)));
}
