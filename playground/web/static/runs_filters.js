// Which runs are shown: search, pickers, chips for the rest, and the link that restores it all.
// Needs dom.js, runs_columns.js.
const STATUSES = ["completed", "running", "cancelled", "failed", "interrupted"];
const DELETED = "deleted";
const GROUPS = [["", "no groups"], ["method_title", "by method"], ["setup_id", "by configuration"],
  ["prompt_id", "by prompt"], ["target", "by target"], ["status", "by status"],
  ["dtype", "by dtype"], ["device", "by device"], ["benchmark_id", "by benchmark"], ["tag", "by tag"]];
const RANGES = [["tok_s", "tok/s"], ["mat", "MAT"], ["draft_acceptance", "acceptance (0\u20131)"],
  ["ttft_s", "TTFT (s)"], ["itl_ms", "ITL (ms)"], ["num_new_tokens", "tokens"],
  ["num_steps", "steps"]];
const CHIPS = { setup_id: "configuration", prompt_id: "prompt", benchmark_id: "benchmark",
  dtype: "dtype", device: "device", decoding_type: "decoding type" };
const FIRST_ORDER = { sort: "created_at", descending: true };
let facets = null;

class Filters {
  constructor(onChange) {
    this.onChange = onChange;
    this.words = {};
    this.search = h("input", { type: "search", class: "line", "aria-label": "search runs",
      placeholder: "search prompt, name, note, method", oninput: () => this.later() });
    this.status = this.picker("status", "any status");
    this.target = this.picker("target", "any target");
    this.method = this.picker("method_title", "any method");
    this.tag = this.picker("tag", "any tag");
    this.label = h("select", { class: "line", "aria-label": "label", onchange: () => this.pickLabel() });
    this.group = h("select", { class: "line", "aria-label": "group by",
      onchange: () => { this.query.group = this.group.value || undefined; this.changed(); } });
    this.chips = h("span", { class: "chips" });
    this.hosts = [this.search, this.status, this.target, this.method, this.more(), this.group];
    this.restore({});
  }

  picker(key, all) {
    return h("select", { class: "line", "aria-label": all, "data-filter": key,
      onchange: (event) => this.pick(key, event.target.value) });
  }

  more() {
    const figure = h("select", { class: "line", "aria-label": "figure" },
      ...RANGES.map(([key, title]) => h("option", { value: key }, title)));
    const bound = (title) => h("input", { type: "number", step: "any", class: "line bound",
      placeholder: title, "aria-label": title });
    const least = bound("at least"), most = bound("at most");
    const value = (box) => (box.value === "" ? null : Number(box.value));
    const add = h("button", { type: "button", onclick: () => {
      if (value(least) === null && value(most) === null) return;
      this.query.ranges = { ...this.query.ranges, [figure.value]: [value(least), value(most)] };
      least.value = most.value = "";
      this.changed();
    } }, "filter");
    for (const box of [least, most]) {
      box.addEventListener("keydown", (event) => { if (event.key === "Enter") add.click(); });
    }
    return popover("more filters", h("div", { class: "menu more" },
      h("div", {}, this.tag, this.label), h("div", {}, figure, least, most, add)));
  }

  pick(key, value) {
    if (key === "status") {
      this.query.deleted = value === DELETED || undefined;
      value = value === DELETED ? "" : value;
    }
    this.query[key] = value || undefined;
    this.changed();
  }

  pickLabel() {
    const [key, value] = JSON.parse(this.label.value || "[]");
    if (key) this.query.labels = { ...this.query.labels, [key]: value };
    this.changed();
  }

  later() { clearTimeout(this.timer); this.timer = setTimeout(() => this.type(), 200); }

  type() {
    this.query.text = this.search.value || undefined;
    this.changed();
  }

  // Show only what has this value; `words` say it on the chip.
  narrow(key, value, words) {
    if (key.startsWith("label:")) {
      this.query.labels = { ...this.query.labels, [key.slice(6)]: value };
    } else {
      this.query[key] = value;
      this.words[value] = words;
    }
    this.query.group = undefined;
    this.changed();
  }

  changed() {
    this.query.page = 0;
    this.draw();
    this.onChange();
  }

  // A query from a link or another page.
  restore(query) {
    this.query = { ...FIRST_ORDER, page: 0, ...query };
    this.search.value = this.query.text ?? "";
    this.draw();
  }

  clear() {
    const { sort, descending } = this.query;
    this.restore({ sort, descending });
    this.onChange();
  }

  get isFiltered() {
    return Object.keys(this.link).some((key) => !["sort", "descending", "page", "group"].includes(key));
  }

  // What is not as at first: short enough for an address.
  get link() {
    const usual = { ...FIRST_ORDER, page: 0 };
    return Object.fromEntries(Object.entries(this.query).filter(([key, value]) =>
      value !== undefined && value !== usual[key] && !isEmpty(value)));
  }

  draw() {
    const { query } = this;
    const known = facets ?? { targets: [], methods: [], tags: [], labels: {} };
    const fill = (select, all, names, value) => {
      const listed = value && !names.includes(value) ? [...names, value] : names;
      select.replaceChildren(h("option", { value: "" }, all),
        ...listed.map((name) => h("option", { value: name }, clip(name, 40))));
      select.value = value ?? "";
      select.classList.toggle("set", Boolean(value));
    };
    fill(this.status, "any status", [...STATUSES, DELETED], query.deleted ? DELETED : query.status);
    fill(this.target, "any target", known.targets, query.target);
    fill(this.method, "any method", known.methods, query.method_title);
    fill(this.tag, "any tag", known.tags, query.tag);
    const pairs = Object.entries(known.labels).flatMap(([key, values]) =>
      values.map((value) => [key, value]));
    this.label.replaceChildren(h("option", { value: "" }, "any label"), ...pairs.map((pair) =>
      h("option", { value: JSON.stringify(pair) }, clip(pair.join(" = "), 50))));
    const groups = [...GROUPS, ...Object.keys(known.labels).map((key) => [`label:${key}`, `by ${key}`])];
    this.group.replaceChildren(...groups.map(([key, title]) => h("option", { value: key }, title)));
    this.group.value = query.group ?? "";
    this.group.classList.toggle("set", Boolean(query.group));
    this.drawChips();
  }

  drawChips() {
    const { query } = this;
    const chips = [];
    const chip = (words, drop) => chips.push(h("button", { type: "button", class: "chip",
      title: "remove this filter", onclick: () => { drop(); this.changed(); } }, words, " \u00d7"));
    if (query.tag) chip(`tag ${query.tag}`, () => { query.tag = undefined; });
    for (const [key, title] of Object.entries(CHIPS)) {
      const value = query[key];
      if (!value) continue;
      const words = key === "benchmark_id" ? benchmarkName(value) : this.words[value] ?? value.slice(0, 8);
      chip(`${title} ${clip(words, 40)}`, () => { query[key] = undefined; });
    }
    for (const [key, value] of Object.entries(query.labels ?? {})) {
      chip(`${key} = ${value}`, () => {
        const { [key]: gone, ...rest } = query.labels;
        query.labels = rest;
      });
    }
    for (const [key, [least, most]] of Object.entries(query.ranges ?? {})) {
      const title = RANGES.find(([name]) => name === key)?.[1] ?? key;
      const words = [least === null ? "" : `${least} \u2264 `, title, most === null ? "" : ` \u2264 ${most}`];
      chip(words.join(""), () => {
        const { [key]: gone, ...rest } = query.ranges;
        query.ranges = rest;
      });
    }
    if (query.ids) chip(`${query.ids.length} picked runs`, () => { query.ids = undefined; });
    this.chips.replaceChildren(...chips);
  }
}

function isEmpty(value) {
  return typeof value === "object" && value !== null && !Object.keys(value).length;
}
