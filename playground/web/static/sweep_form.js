// What to sweep: target, method, which settings vary and how far, what is measured. Needs dom.js.
function labelled(title, control, hint = "") {
  return h("label", { class: "picker", title: hint }, h("span", {}, title), control);
}

function chooser(name, onchange) {
  return h("select", { class: "line", "aria-label": name, onchange });
}

// pairs: [[title, value]]; keeps what is picked if it is still there.
function fillChooser(select, pairs, value = select.value) {
  select.replaceChildren(...pairs.map(([title, key]) => h("option", { value: key }, title)));
  select.value = pairs.some(([, key]) => key === value) ? value : pairs[0]?.[1] ?? "";
}

function textBox(name, value, changed, placeholder = "") {
  return h("input", { type: "text", class: "box", "aria-label": name, value: value ?? "",
    placeholder, spellcheck: "false", autocomplete: "off", oninput: changed });
}

function written(value) { return value === null ? "none" : String(value); }

// How a number runs: from, to, by a step or doubling.
class RangeEditor {
  constructor(field, changed) {
    const [low, high] = field.suggested ?? [field.low, field.high];
    const whole = field.kind === "int";
    this.from = textBox(`${field.field} from`, low, changed);
    this.to = textBox(`${field.field} to`, high, changed);
    this.step = textBox(`${field.field} step`, "", changed, whole ? "1" : "any");
    this.double = h("button", { type: "button", class: "pill", "aria-pressed": "false",
      title: "walk the range by doubling: 1, 2, 4, 8", onclick: () => { this.toggle(); changed(); } },
    "\u00d72");
    this.host = h("span", { class: "range" }, this.from, h("i", {}, "to"), this.to,
      h("i", {}, "step"), this.step, this.double);
  }

  get doubling() { return this.double.getAttribute("aria-pressed") === "true"; }

  toggle() {
    this.double.setAttribute("aria-pressed", String(!this.doubling));
    this.step.disabled = this.doubling;
  }

  get text() {
    const step = this.step.value.trim();
    const tail = this.doubling ? ":log" : step ? `:${step}` : "";
    return `${this.from.value.trim()}:${this.to.value.trim()}${tail}`;
  }
}

// Which of a few values are tried.
class ChoiceEditor {
  constructor(field, changed) {
    this.ticks = field.choices.map((choice) => {
      const tick = h("input", { type: "checkbox", onchange: changed, value: written(choice),
        "aria-label": `${field.field} ${written(choice)}` });
      tick.checked = true;
      return tick;
    });
    this.host = h("span", { class: "choices" }, ...this.ticks.map((tick) =>
      h("label", {}, tick, tick.value)));
  }

  get text() {
    return this.ticks.filter((tick) => tick.checked).map((tick) => tick.value).join(",");
  }
}

class ListEditor {
  constructor(field, changed) {
    this.box = textBox(`${field.field} values`, "", changed, "one, another");
    this.box.classList.add("wide");
    this.host = h("span", { class: "range" }, this.box);
  }

  get text() { return this.box.value.split(",").map((part) => part.trim()).join(","); }
}

// One setting: a tick to vary it, and its value or its range.
class FieldRow {
  constructor(field, changed) {
    this.field = field;
    this.tick = h("input", { type: "checkbox", "aria-label": `vary ${field.field}`,
      onchange: () => { this.show(); changed(); } });
    const Editor = field.choices.length ? ChoiceEditor
      : field.kind === "text" || field.low === null ? ListEditor : RangeEditor;
    this.editor = new Editor(field, changed);
    this.value = this.valueControl(changed);
    this.slot = h("span", { class: "slot" });
    this.host = h("div", { class: "setting", "data-field": field.field },
      h("label", { class: "name", title: field.help }, this.tick, h("span", {}, field.field)),
      this.slot);
    this.show();
  }

  valueControl(changed) {
    const { field } = this;
    if (!field.choices.length) {
      const box = textBox(field.field, field.value ?? "", changed, field.optional ? "none" : "");
      box.classList.toggle("wide", field.kind === "text");
      return box;
    }
    const select = chooser(field.field, changed);
    const choices = field.optional ? [null, ...field.choices] : field.choices;
    fillChooser(select, choices.map((choice) => [written(choice), written(choice)]),
      written(field.value));
    return select;
  }

  get varies() { return this.tick.checked; }
  get range() { return `${this.field.field}=${this.editor.text}`; }

  // The fixed value if it was changed, as the server reads form values; undefined if it was not.
  get fixed() {
    const { field, value } = this;
    const raw = value.value;
    if (raw === written(field.value) || (raw === "" && field.value === null)) return undefined;
    if (field.kind === "flag") return raw === "true";
    return raw === "none" && field.optional ? null : raw;
  }

  show() {
    this.host.classList.toggle("varied", this.varies);
    this.slot.replaceChildren(this.varies ? this.editor.host : this.value);
  }
}

class SweepForm {
  // onStart(form) is told what to sweep.
  constructor(onStart) {
    this.rows = [];
    this.asked = 0;
    const changed = () => this.later();
    this.target = chooser("target", () => this.pickTarget());
    this.dtype = chooser("dtype", changed);
    this.method = chooser("method", () => this.pickMethod());
    this.summary = h("p", { class: "note" });
    this.settings = h("div", { class: "settings" });
    this.objective = chooser("objective", changed);
    this.suite = chooser("suite", changed);
    this.limit = textBox("prompts per kind of task", "", changed);
    this.tokens = textBox("tokens per answer", "", changed);
    this.mode = chooser("how", () => { this.showMode(); changed(); });
    this.trials = textBox("trials", "", changed);
    this.prune = h("input", { type: "checkbox", "aria-label": "prune", onchange: changed });
    this.outlook = h("p", { class: "note outlook", role: "status" });
    this.starter = h("button", { type: "button", class: "primary", disabled: true,
      onclick: () => onStart(this.form) }, "Start sweep");
    this.host = h("section", { class: "setup", "aria-label": "What to sweep" }, ...this.parts());
  }

  parts() {
    fillChooser(this.mode, [["search", "search"], ["grid", "grid"]]);
    this.mode.title = "search: Optuna chooses the combinations; grid: every one of them";
    this.trialsPicker = labelled("trials", this.trials, "combinations that the search measures");
    const prune = h("label", { class: "tick", title: "Break off a trial after two or more prompts "
      + "when it is below the median of the finished trials there." }, this.prune,
    "break off poor trials");
    return [
      h("div", { class: "card" }, labelled("Target", this.target),
        h("div", { class: "pair" }, labelled("Method", this.method), labelled("dtype", this.dtype)),
        this.summary),
      h("div", { class: "card" }, h("h4", {}, "Tick what varies"), this.settings),
      h("div", { class: "card" },
        h("div", { class: "pair" }, labelled("Maximise", this.objective),
          labelled("How", this.mode)),
        h("div", { class: "row" }, this.trialsPicker, prune),
        labelled("Prompts", this.suite),
        h("div", { class: "row" }, labelled("of each kind", this.limit,
          "prompts of each kind of task, the first ones of the suite"),
        labelled("tokens", this.tokens, "most tokens of an answer")),
        this.outlook, this.starter),
    ];
  }

  async fill() {
    const menus = await server.menus_of({});
    if (!menus || menus.error) return this.complain(menus?.error);
    const { defaults } = menus;
    fillChooser(this.target, menus.targets);
    fillChooser(this.dtype, menus.dtypes.map((name) => [name, name]));
    fillChooser(this.suite, menus.suites, defaults.suite);
    fillChooser(this.objective, menus.objectives.map(({ key, title }) => [title, key]));
    for (const { key, formula } of menus.objectives) {
      this.objective.querySelector(`[value="${key}"]`).title = formula;
    }
    this.limit.value = defaults.limit;
    this.tokens.value = defaults.max_new_tokens;
    this.trials.value = defaults.trials;
    await this.pickTarget("ngram");
  }

  async pickTarget(first = this.method.value) {
    const found = await server.methods_of({ target: this.target.value });
    if (!found || found.error) return this.complain(found?.error);
    fillChooser(this.method, found.methods, first);
    await this.pickMethod();
  }

  async pickMethod() {
    const ticket = ++this.asked;
    const method = await server.fields_of({ method: this.method.value });
    if (ticket !== this.asked) return;
    if (!method || method.error) return this.complain(method?.error);
    this.summary.textContent = method.summary;
    this.rows = method.fields.map((field) => new FieldRow(field, () => this.later()));
    this.settings.replaceChildren(...this.rows.map((row) => row.host));
    const first = this.rows.find((row) => row.field.suggested);
    if (first) { first.tick.checked = true; first.show(); }
    this.showMode();
    this.look();
  }

  showMode() { this.trialsPicker.hidden = this.mode.value === "grid"; }

  get form() {
    const settings = {};
    for (const row of this.rows) {
      if (!row.varies && row.fixed !== undefined) settings[row.field.field] = row.fixed;
    }
    return { target: this.target.value, dtype: this.dtype.value, method: this.method.value,
      settings, vary: this.rows.filter((row) => row.varies).map((row) => row.range),
      objective: this.objective.value, mode: this.mode.value, trials: this.trials.value,
      prune: this.prune.checked, suite: this.suite.value, limit: this.limit.value,
      max_new_tokens: this.tokens.value };
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), 200);
  }

  // What the sweep would run, or why it cannot.
  async look() {
    const ticket = ++this.asked;
    const plan = await server.outlook_of(this.form);
    if (ticket !== this.asked) return;
    if (!plan || plan.error) return this.complain(plan?.error);
    const points = plan.num_points === null ? "Any number of combinations"
      : `${plural(plan.num_points, "combination")}`;
    this.say(`${points}; ${plural(plan.num_trials, "trial")} of ${plural(plan.num_pairs, "answer")} `
      + "by the method and as many by plain decoding, in turn.", false);
  }

  complain(sentence) { this.say(sentence ?? "The server did not answer. Reload the page.", true); }

  say(sentence, faulty) {
    this.outlook.textContent = sentence;
    this.outlook.classList.toggle("faulty", faulty);
    this.starter.disabled = faulty;
  }
}
