// What to measure: target, suites, configurations, how often. Needs dom.js.
const NO_ANSWER = "The server did not answer. Reload the page.";

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

function tickBox(name, checked, onchange) {
  const tick = h("input", { type: "checkbox", "aria-label": name, onchange });
  tick.checked = checked;
  return tick;
}

// One setting of a settings class; `changed` is undefined while it is as it came.
class SettingRow {
  constructor(field, onchange, start) {
    this.field = field;
    this.control = this.make(onchange);
    if (start !== undefined) this.put(start);
    const wide = field.kind === "text" || field.kind === "lines";
    this.host = h("label", { class: `setting${wide ? " wide" : ""}`, title: field.help,
      "data-field": field.name }, h("span", {}, field.label), this.control);
  }

  make(onchange) {
    const { field } = this;
    const common = { "aria-label": field.name, class: "box" };
    if (field.kind === "flag") return tickBox(field.name, field.value, onchange);
    if (field.kind === "choice") {
      const select = h("select", { ...common, class: "line", onchange });
      field.choices.forEach((choice, i) => select.append(
        h("option", { value: i, selected: choice === field.value }, String(choice ?? "none"))));
      return select;
    }
    const tag = field.kind === "lines" ? "textarea" : "input";
    const box = h(tag, { ...common, spellcheck: "false", autocomplete: "off", oninput: onchange,
      type: tag === "input" ? "text" : null, rows: tag === "input" ? null : 2,
      placeholder: field.placeholder || (field.optional ? "none" : "") });
    box.value = field.value ?? "";
    return box;
  }

  put(value) {
    if (this.field.kind === "flag") this.control.checked = Boolean(value);
    else if (this.field.kind === "choice") this.control.value = this.field.choices.indexOf(value);
    else this.control.value = value ?? "";
  }

  get raw() {
    if (this.field.kind === "flag") return this.control.checked;
    if (this.field.kind === "choice") return this.field.choices[Number(this.control.value)];
    return this.control.value;
  }

  get changed() {
    const same = String(this.raw ?? "") === String(this.field.value ?? "");
    return same ? undefined : this.raw;
  }
}

function changedValues(rows) {
  const pairs = rows.map((row) => [row.field.name, row.changed]);
  return Object.fromEntries(pairs.filter(([, value]) => value !== undefined));
}

// One method with settings and a name of its own.
class ConfigurationCard {
  constructor(key, method, name, { changed, removed }) {
    this.key = key;
    this.rows = method.fields.map((field) => new SettingRow(field, changed));
    this.name = h("input", { type: "text", class: "box name", value: name, spellcheck: "false",
      "aria-label": "name of the configuration", autocomplete: "off", oninput: changed });
    const badge = method.lossless ? "lossless" : "lossy";
    const remove = h("button", { type: "button", class: "quiet", title: "leave it out",
      "aria-label": `leave out ${name}`, onclick: () => removed(this) }, "\u2715");
    const settings = h("details", {}, h("summary", {}, "settings"),
      h("p", { class: "note" }, method.summary), ...this.rows.map((row) => row.host));
    if (!this.rows.length) settings.append(h("p", { class: "note" }, "Nothing to set."));
    this.host = h("div", { class: "configuration", "data-method": key },
      h("div", { class: "top" }, this.name, h("span", { class: `badge ${badge}` }, badge), remove),
      settings);
    this.title = method.title;
    this.name.title = method.title;
  }

  get value() {
    return { method: this.key, name: this.name.value, settings: changedValues(this.rows) };
  }
}

class BenchForm {
  // onStart(form) is told what to measure.
  constructor(onStart) {
    this.cards = [];
    this.suites = [];
    this.ticket = 0;
    const changed = () => this.later();
    this.target = chooser("target", () => this.pickTarget());
    this.dtype = chooser("dtype", changed);
    this.suiteList = h("div", { class: "ticks" });
    this.kinds = h("div", { class: "chips", role: "group", "aria-label": "kinds of task" });
    this.file = h("input", { type: "file", hidden: true, multiple: true,
      accept: ".jsonl,.json,.yaml,.yml,.txt", "aria-label": "file of prompts",
      onchange: () => this.readFiles() });
    this.fileFault = h("p", { class: "note file-fault", role: "alert", hidden: true });
    this.cardList = h("div", { class: "cards" });
    this.adder = chooser("method", () => {});
    this.extent = h("div", { class: "settings" });
    this.sampling = h("details", {}, h("summary", {}, "Sampling: greedy unless changed"));
    this.outlook = h("p", { class: "note outlook", role: "status" });
    this.starter = h("button", { type: "button", class: "primary", disabled: true,
      onclick: () => onStart(this.form) }, "Start benchmark");
    this.host = h("section", { class: "setup", "aria-label": "What to measure" }, ...this.parts());
  }

  parts() {
    const add = h("button", { type: "button", class: "tool", "data-do": "add",
      onclick: () => this.add(this.adder.value) }, "Add");
    const addFile = h("button", { type: "button", class: "quiet", "data-do": "file",
      title: "Question files of Spec-Bench, EAGLE and HumanEval, input files of genai-perf, or a "
        + "suite in YAML; read in this browser and sent to this server only",
      onclick: () => this.file.click() }, "Add a file of prompts \u2026");
    return [
      h("div", { class: "card pair" }, labelled("Target", this.target),
        labelled("dtype", this.dtype)),
      h("div", { class: "card" }, h("h4", {}, "Suites"), this.suiteList, addFile, this.file,
        this.fileFault, this.kinds),
      h("div", { class: "card" }, h("h4", {}, "Configurations beside plain decoding"),
        this.cardList, h("div", { class: "adder" }, this.adder, add)),
      h("div", { class: "card" }, this.extent, this.sampling, this.outlook, this.starter),
    ];
  }

  async fill() {
    const menus = await server.menus({});
    if (!menus || menus.error) { this.complain(menus?.error); return null; }
    fillChooser(this.target, menus.targets);
    fillChooser(this.dtype, menus.dtypes.map((name) => [name, name]));
    for (const suite of menus.suites) this.addSuite(suite, suite.key === menus.first_suite);
    const changed = () => this.later();
    const rows = (fields) => fields.map((field) => new SettingRow(field, changed));
    this.extentRows = rows(menus.extent);
    this.limitRows = rows(menus.limits);
    this.samplingRows = rows(menus.sampling);
    this.extent.append(...[...this.extentRows, ...this.limitRows].map((row) => row.host));
    this.sampling.append(...this.samplingRows.map((row) => row.host));
    this.showKinds();
    await this.pickTarget();
    for (const key of menus.first_methods) await this.add(key);
    if (!menus.first_methods.length && this.adder.value) await this.add(this.adder.value);
    return menus;
  }

  addSuite(suite, ticked) {
    const tick = tickBox(suite.title, ticked, () => { this.showKinds(); this.later(); });
    const row = h("label", { class: "suite", title: suite.description, "data-suite": suite.key },
      tick, h("span", { class: "title" }, suite.title),
      h("span", { class: "count" }, plural(suite.num_prompts, "prompt")));
    this.suites.push({ ...suite, tick });
    this.suiteList.append(row);
  }

  // What is wrong with a file stays on show until the next files are picked.
  async readFiles() {
    const faults = [];
    for (const file of this.file.files) {
      const suite = await server.add_file({ name: file.name, text: await file.text() });
      if (!suite || suite.error) { faults.push(suite?.error ?? NO_ANSWER); continue; }
      const known = this.suites.find(({ key }) => key === suite.key);
      if (known) known.tick.checked = true;
      else this.addSuite(suite, true);
      this.showKinds();
      this.later();
    }
    this.file.value = "";
    this.fileFault.textContent = faults.join(" ");
    this.fileFault.hidden = !faults.length;
  }

  get ticked() { return this.suites.filter(({ tick }) => tick.checked); }

  // A chip per kind of task of the ticked suites; a kind that was switched off stays off.
  showKinds() {
    const off = new Set([...this.kinds.querySelectorAll('[aria-pressed="false"]')]
      .map((chip) => chip.dataset.kind));
    const kinds = new Map(this.ticked.flatMap(({ groups }) => groups));
    this.kinds.replaceChildren(...[...kinds].map(([kind, title]) => {
      const chip = h("button", { type: "button", class: "chip", title, "data-kind": kind,
        "aria-pressed": String(!off.has(kind)), onclick: () => {
          chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") === "false"));
          this.later();
        } }, kind);
      return chip;
    }));
    this.kinds.hidden = kinds.size < 2;
  }

  get categories() {
    const chips = [...this.kinds.children];
    const on = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true");
    return on.length === chips.length ? [] : on.map((chip) => chip.dataset.kind);
  }

  async pickTarget() {
    const found = await server.methods({ target: this.target.value });
    if (!found || found.error) { this.complain(found?.error); return; }
    fillChooser(this.adder, found.methods);
    const keys = new Set(found.methods.map(([, key]) => key));
    for (const card of [...this.cards]) if (!keys.has(card.key)) this.remove(card);
    this.later();
  }

  async add(key) {
    const method = await server.fields({ method: key });
    if (!method || method.error) { this.complain(method?.error); return; }
    const card = new ConfigurationCard(key, method, this.freeName(key.replace(/^type:/, "")),
      { changed: () => this.later(), removed: (which) => { this.remove(which); this.later(); } });
    this.cards.push(card);
    this.cardList.append(card.host);
    this.later();
  }

  freeName(name) {
    const taken = new Set(this.cards.map((card) => card.name.value));
    let free = name;
    for (let n = 2; taken.has(free); n += 1) free = `${name}-${n}`;
    return free;
  }

  remove(card) {
    this.cards = this.cards.filter((other) => other !== card);
    card.host.remove();
  }

  get form() {
    return { target: this.target.value, dtype: this.dtype.value,
      suites: this.ticked.map(({ key }) => key), categories: this.categories,
      configurations: this.cards.map((card) => card.value),
      extent: changedValues(this.extentRows), limits: changedValues(this.limitRows),
      sampling: changedValues(this.samplingRows) };
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), 150);
  }

  // What would be run, or why it cannot.
  async look() {
    const ticket = ++this.ticket;
    const plan = await server.outlook(this.form);
    if (ticket !== this.ticket) return;
    if (!plan || plan.error) { this.complain(plan?.error); return; }
    this.say(`${plural(plan.num_prompts, "prompt")} \u00d7 ${plan.num_configurations} `
      + `configurations \u00d7 ${plural(plan.num_repeats, "repeat")}: `
      + `${plural(plan.num_requests, "request")}, one at a time (concurrency 1), in turn.`, false);
  }

  complain(sentence) { this.say(sentence ?? NO_ANSWER, true); }

  say(sentence, faulty) {
    this.outlook.textContent = sentence;
    this.outlook.classList.toggle("faulty", faulty);
    this.starter.disabled = faulty;
  }
}
