// The table itself: runs, or groups of runs, one page at a time. Needs dom.js, runs_columns.js.
const GROUP_FIGURES = [["tok_s", "tok/s", (v) => number(v, 1)], ["mat", "MAT", (v) => number(v, 2)],
  ["draft_acceptance", "acceptance", percent], ["ttft_s", "TTFT ms", (v) => milliseconds(1000 * v)]];

class RunsTable {
  // onOpen(row), onTick(), onSort(key), onGroup(group)
  constructor(calls) {
    this.calls = calls;
    this.head = h("tr");
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, this.head), this.body);
    this.host = h("div", { class: "frame", tabindex: "-1" }, this.table);
    this.ticked = new Map();
    this.rows = [];
    this.groupOrder = { key: "num_runs", descending: true };
    this.body.addEventListener("keydown", (event) => this.key(event));
  }

  showRuns(rows, columns, query) {
    this.rows = rows;
    this.all = h("input", { type: "checkbox", "aria-label": "tick this page",
      onchange: (event) => this.tickAll(event.target.checked) });
    this.head.replaceChildren(h("th", { class: "tick" }, this.all),
      ...columns.map((column) => this.headCell(column, query)));
    this.body.replaceChildren(...rows.map((row) => this.row(row, columns)));
    this.markAll();
  }

  headCell(column, query) {
    const key = column.sort ?? column.key;
    const sorted = query.sort === key && !column.fixed;
    const mark = sorted ? (query.descending ? " \u2193" : " \u2191") : "";
    const help = this.calls.formula(column);
    const inside = column.fixed ? column.title : h("button", { type: "button", title: help,
      onclick: () => this.calls.onSort(key) }, column.title + mark);
    return h("th", { class: this.classOf(column), title: help, "aria-sort": sorted
      ? (query.descending ? "descending" : "ascending") : null }, inside);
  }

  classOf(column) {
    return [column.name, column.number && "num", WIDE_ONLY.has(column.key) && "wide-only"]
      .filter(Boolean).join(" ");
  }

  row(row, columns) {
    const tick = h("input", { type: "checkbox", "aria-label": "tick this run",
      checked: this.ticked.has(row.id), onclick: (event) => this.tick(row, event) });
    const cells = columns.map((column, i) => {
      const shown = column.number ? column.number(row) : column.text(row);
      const content = shown instanceof Node ? shown : String(shown);
      const inside = i === 0 ? h("button", { type: "button", class: "open",
        onclick: () => this.open(row) }, content) : content;
      const cell = h("td", { class: this.classOf(column) }, inside);
      if (["words", "prompt"].includes(column.name)) cell.title = cell.textContent;
      if (column.key === "status") cell.dataset.state = row.status;
      if (column.key === "method_title") this.dressMethod(cell, row);
      return cell;
    });
    const line = h("tr", { "data-id": row.id }, h("td", { class: "tick" }, tick), ...cells);
    line.classList.toggle("open", row.id === this.opened);
    line.classList.toggle("deleted", row.deleted);
    line.addEventListener("click", (event) => {
      if (!event.target.closest("button, input")) this.open(row);
    });
    return line;
  }

  dressMethod(cell, row) {
    if (!row.lossless) cell.append(h("span", { class: "lossy" }, "lossy"));
    if (this.calls.isBaseline(row)) cell.prepend(h("span", { class: "star", title: "baseline" }, "\u2605 "));
  }

  open(row) {
    this.markOpened(row.id);
    this.calls.onOpen(row);
  }

  markOpened(id) {
    this.opened = id;
    for (const line of this.body.children) line.classList.toggle("open", line.dataset.id === id);
  }

  // Shift takes all rows between this one and the last.
  tick(row, event) {
    const at = this.rows.indexOf(row);
    const from = event.shiftKey && this.last !== undefined ? this.last : at;
    const on = event.target.checked;
    for (const other of this.rows.slice(Math.min(from, at), Math.max(from, at) + 1)) this.set(other, on);
    this.last = at;
    this.drawTicks();
  }

  set(row, on) { if (on) this.ticked.set(row.id, row); else this.ticked.delete(row.id); }

  tickAll(on) {
    for (const row of this.rows) this.set(row, on);
    this.drawTicks();
  }

  untick() {
    this.ticked.clear();
    this.drawTicks();
  }

  drawTicks() {
    for (const line of this.body.children) {
      const box = line.querySelector(".tick input");
      if (box) box.checked = this.ticked.has(line.dataset.id);
    }
    this.markAll();
    this.calls.onTick();
  }

  markAll() {
    const here = this.rows.filter((row) => this.ticked.has(row.id)).length;
    this.all.checked = here > 0 && here === this.rows.length;
    this.all.indeterminate = here > 0 && here < this.rows.length;
  }

  showEmpty(words) {
    this.body.replaceChildren(h("tr", { class: "empty" },
      h("td", { colspan: this.head.children.length }, words)));
  }

  // Up and down walk the rows with whatever has the focus in them.
  key(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const line = event.target.closest("tr");
    if (!by || !line) return;
    const name = event.target.matches("input") ? ".tick input" : "button";
    const next = by < 0 ? line.previousElementSibling : line.nextElementSibling;
    next?.querySelector(name)?.focus();
    event.preventDefault();
  }

  showGroups(groups, by) {
    this.rows = [];
    this.groups = groups;
    this.by = by;
    this.drawGroups();
  }

  drawGroups() {
    const { key, descending } = this.groupOrder;
    const value = (group) => (key === "num_runs" ? group.num_runs : key === "newest_at"
      ? group.newest_at : group.figures[key]?.mean ?? null);
    const sorted = [...this.groups].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (descending ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
    });
    const title = (name, words, help = null) => {
      const on = key === name;
      const mark = on ? (descending ? " \u2193" : " \u2191") : "";
      return h("th", { class: "num", title: help, "aria-sort": on
        ? (descending ? "descending" : "ascending") : null }, h("button", { type: "button",
        onclick: () => this.orderGroups(name) }, words + mark));
    };
    this.head.replaceChildren(h("th", {}, "group"), title("num_runs", "runs"),
      ...GROUP_FIGURES.map(([name, words]) => title(name, words,
        `${this.calls.formula({ key: name })}; mean \u00b1 standard deviation over the group's runs`)),
      title("newest_at", "newest"));
    this.body.replaceChildren(...sorted.map((group) => this.groupRow(group)));
  }

  orderGroups(key) {
    const { groupOrder } = this;
    this.groupOrder = { key, descending: groupOrder.key === key ? !groupOrder.descending : true };
    this.drawGroups();
  }

  groupRow(group) {
    const [title, remark] = groupWords(group, this.by);
    const open = () => this.calls.onGroup(group, title);
    const name = group.value === null ? h("span", { class: "none" }, title)
      : h("button", { type: "button", class: "open", onclick: open }, title);
    const cells = GROUP_FIGURES.map(([key, , show]) => h("td", { class: "num" },
      spreadWords(group.figures[key], show)));
    const line = h("tr", { class: "group" }, h("td", { class: "words" }, name,
      remark ? h("span", { class: "remark" }, ` ${remark}`) : null),
    h("td", { class: "num" }, group.num_runs), ...cells,
    h("td", { class: "num" }, when(group.newest_at)));
    if (group.value !== null) line.addEventListener("click", (event) => {
      if (!event.target.closest("button")) open();
    });
    return line;
  }
}

function groupWords(group, by) {
  const { example, value } = group;
  if (value === null) return ["none", ""];
  if (by === "setup_id") return [example.method_title,
    [example.settings, example.target, example.dtype].filter(Boolean).join(" \u00b7 ")];
  if (by === "prompt_id") return [clip(example.prompt.replace(/\s+/g, " "), 110) || "token ids", ""];
  return [by === "benchmark_id" ? benchmarkName(value) : value, ""];
}

// 31.2 ± 0.4
function spreadWords(spread, show) {
  if (!spread) return DASH;
  return spread.std === null ? show(spread.mean) : `${show(spread.mean)} \u00b1 ${show(spread.std)}`;
}
