// The columns of the table of runs: what each shows, and which are on. Needs dom.js.
const ms = (seconds) => milliseconds(seconds === null ? NaN : 1000 * seconds);
const COLUMNS = [
  { key: "created_at", title: "when", text: (row) => when(row.created_at), kept: true },
  { key: "method_title", title: "method", text: (row) => row.method_title, name: "method" },
  { key: "settings", title: "settings", text: (row) => row.settings || DASH, name: "words",
    help: "settings that are not at their default", fixed: true },
  { key: "target", title: "target", text: (row) => row.target, off: true },
  { key: "prompt", title: "prompt", text: promptCell, name: "prompt", sort: "name",
    help: "the run's name, if it has one, and its prompt; sorts by name" },
  { key: "tags", title: "tags", text: (row) => tagCell(row.tags), name: "tags", fixed: true },
  { key: "note", title: "note", text: (row) => row.note, name: "words", fixed: true, off: true },
  { key: "labels", title: "labels", name: "words", fixed: true, off: true,
    text: (row) => Object.entries(row.labels).map(([k, v]) => `${k} ${v}`).join(" \u00b7 "),
    help: "what a benchmark groups by" },
  { key: "benchmark_id", title: "benchmark", name: "words", fixed: true, off: true,
    text: (row) => benchmarkName(row.benchmark_id) },
  { key: "num_prompt_tokens", title: "prompt tokens", number: (row) => row.num_prompt_tokens,
    off: true },
  { key: "num_new_tokens", title: "tokens", number: (row) => row.num_new_tokens ?? DASH,
    help: "new tokens" },
  { key: "num_steps", title: "steps", number: (row) => row.num_steps, off: true },
  { key: "tok_s", title: "tok/s", number: (row) => number(row.tok_s, 1) },
  { key: "speedup", title: "speedup", sort: "tok_s",
    number: (row) => (row.speedup === null ? DASH : `${number(row.speedup, 2)}\u00d7`) },
  { key: "mat", title: "MAT", number: (row) => number(row.mat, 2) },
  { key: "draft_acceptance", title: "acceptance", number: (row) => percent(row.draft_acceptance),
    off: true },
  { key: "ttft_s", title: "TTFT ms", number: (row) => ms(row.ttft_s), off: true },
  { key: "itl_ms", title: "ITL ms", number: (row) => milliseconds(row.itl_ms ?? NaN), off: true },
  { key: "step_p50_ms", title: "step p50 ms", off: true,
    number: (row) => milliseconds(row.step_p50_ms ?? NaN) },
  { key: "step_p95_ms", title: "step p95 ms", off: true,
    number: (row) => milliseconds(row.step_p95_ms ?? NaN) },
  ...["draft", "verify", "accept", "other"].map((part) => ({ key: `${part}_s`,
    title: `${part} ms`, number: (row) => ms(row[`${part}_s`]), off: true, formula: "time_split" })),
  { key: "temperature", title: "temperature", number: (row) => row.temperature ?? DASH,
    fixed: true, off: true },
  { key: "seed", title: "seed", number: (row) => row.seed ?? DASH, fixed: true, off: true },
  { key: "dtype", title: "dtype", text: (row) => row.dtype, off: true },
  { key: "device", title: "device", text: (row) => row.device, off: true },
  { key: "status", title: "status", text: (row) => row.status, name: "status" },
  { key: "finish_reason", title: "ended by", text: (row) => row.finish_reason ?? DASH, off: true },
];
const WIDE_ONLY = new Set(["settings", "prompt", "tags", "num_new_tokens", "speedup"]);

function when(iso) {
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return iso ?? "";
  const today = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return today ? time : `${date.toLocaleDateString()} ${time}`;
}

function promptCell(row) {
  const prompt = clip(row.prompt.replace(/\s+/g, " "), 90);
  return row.name ? h("span", {}, h("b", {}, row.name), ` ${prompt}`) : prompt;
}

function tagCell(tags) {
  return h("span", {}, ...tags.map((tag) => h("span", { class: "tag" }, tag)));
}

function benchmarkName(id) {
  return id === null ? DASH : facets?.benchmarks?.[id] ?? id;
}

// What stays in this browser; an unreadable or forbidden store is as good as an empty one.
const memory = {
  read(name) {
    try { return JSON.parse(localStorage.getItem(`pg-runs-${name}`)); } catch { return null; }
  },
  write(name, value) {
    try { localStorage.setItem(`pg-runs-${name}`, JSON.stringify(value)); } catch { return; }
  },
};

// Which columns are on: remembered, and changed in a small menu of ticks.
class ColumnPicker {
  constructor(onChange) {
    const kept = memory.read("columns");
    const usual = COLUMNS.filter((column) => !column.off).map((column) => column.key);
    this.on = new Set(Array.isArray(kept) ? kept : usual);
    this.usual = usual;
    this.onChange = onChange;
    this.list = h("div", { class: "menu columns", role: "group", "aria-label": "columns" });
    this.host = popover("columns", this.list);
    this.draw();
  }

  get columns() {
    return COLUMNS.filter((column) => column.kept || this.on.has(column.key));
  }

  draw() {
    const rows = COLUMNS.filter((column) => !column.kept).map((column) => {
      const box = h("input", { type: "checkbox", checked: this.on.has(column.key),
        onchange: (event) => this.set(column.key, event.target.checked) });
      return h("label", { "data-column": column.key }, box, column.title);
    });
    const reset = h("button", { type: "button", onclick: () => this.reset() }, "as at first");
    this.list.replaceChildren(...rows, reset);
  }

  set(key, on) {
    if (on) this.on.add(key); else this.on.delete(key);
    memory.write("columns", [...this.on]);
    this.onChange();
  }

  reset() {
    this.on = new Set(this.usual);
    memory.write("columns", this.usual);
    this.draw();
    this.onChange();
  }
}

// A button that opens a small menu under it; Esc or a click elsewhere closes it.
function popover(title, content) {
  const button = h("summary", {}, title);
  const host = h("details", { class: "popover" }, button, content);
  host.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !host.open) return;
    event.stopPropagation();
    host.open = false;
    button.focus();
  });
  return host;
}

document.addEventListener("pointerdown", (event) => {
  for (const host of element.querySelectorAll(".popover[open]")) {
    if (!host.contains(event.target)) host.open = false;
  }
});
