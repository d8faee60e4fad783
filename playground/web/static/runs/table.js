// The table of runs. gr.Dataframe pages in the browser; a log of 100,000 runs is paged by the
// database, so the server sends one page of cells at a time.
//
// What the server sends is the component's value. This module adds `ticked`, the ids of ticked runs on
// all pages, `event_data`, the data of the event that it triggers, and `turns`, by which it knows a late
// answer.
import { parameter, show } from "../address.js";
import { actionButton, h, onShown, onValue, part, showAlert } from "../kit.js";

/**
 * Of the component's value:
 * @typedef {{ key: string, title: string, kind: string, sort: string | null, help: string,
 *   sorted: "ascending" | "descending" | null }} Head
 * @typedef {{ id: string | null, deleted: boolean, cells: any[], experiment?: string }} Row
 * `experiment`: the row stands for the requests of an experiment; the URL of its report, if it has one.
 */

class RunTable {
  constructor(component) {
    this.component = component;
    this.head = h("tr");
    this.body = h("tbody");
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.count = h("span", { class: "count" });
    const pager = (text, by) =>
      actionButton(text, () => this.turn({ page: this.value.pages[0] + by }));
    this.previous = pager("\u2039 previous", -1);
    this.next = pager("next \u203a", 1);
    this.all = h("input", { type: "checkbox", "aria-label": "select the runs of this page",
      onchange: () => this.tick(this.runs.map((row) => row.id), this.all.checked) });
    this.ticked = new Set();
    this.lastTicked = null;
    this.drawn = "";
    this.turns = 0;
    this.kept = {};
    part(component.element, ".runs").append(this.fault,
      h("div", { class: "frame" }, h("table", {}, h("thead", {}, this.head), this.body)),
      h("div", { class: "pager" }, this.count, this.previous, this.next));
    this.body.addEventListener("keydown", (event) => this.moveFocus(event));
  }

  get value() { return this.component.props.value ?? {}; }

  // Other parts of the page open runs, too, and one answer of the server may overtake another.
  get opened() { return parameter("runs", "run"); }

  get rows() { return this.value.rows ?? []; }

  get runs() { return this.rows.filter((row) => row.experiment === undefined); }

  draw() {
    const { turns = this.turns } = this.value;
    if (turns < this.turns) {
      this.component.props.value = this.kept;
      return;
    }
    const { heads, pages = [0, 1], grouped = false, fault = "", count = "", nothing = "" } = this.value;
    showAlert(this.fault, fault);
    if (!heads) return;
    if ("opened" in this.value) show("runs", { run: this.value.opened });
    if (this.value.untick) this.ticked.clear();
    const cells = JSON.stringify([heads, this.rows, grouped, nothing]);
    // A click is lost where the element under it is replaced between press and release.
    if (cells !== this.drawn) this.drawCells(heads, grouped, nothing);
    this.drawn = cells;
    this.count.textContent = count;
    this.previous.disabled = pages[0] === 0;
    this.next.disabled = pages[0] + 1 >= pages[1];
    this.updateMarks();
    this.rememberLink();
  }

  drawCells(heads, grouped, nothing) {
    const focused = this.head.querySelector(":focus")?.closest("th")?.dataset.column;
    this.head.replaceChildren(...(grouped ? [] : [h("td", { class: "tick" }, this.all)]),
      ...heads.map((head) => this.headCell(head)));
    /** @type {HTMLElement | null} */ (this.head.querySelector(`[data-column="${focused}"] button`))?.focus();
    this.body.replaceChildren(...this.rows.map((row) => grouped
      || row.experiment !== undefined ? this.groupRow(row, heads, grouped) : this.runRow(row, heads)));
    if (!this.rows.length) {
      this.body.append(h("tr", { class: "empty" }, h("td", { colspan: heads.length + 1 }, nothing)));
    }
  }

  headCell({ key, title, kind, sort, sorted, help }) {
    const sign = sorted ? { descending: " \u2193", ascending: " \u2191" }[sorted] : "";
    const about = { "data-about": help || null, class: help ? "pg-term" : null };
    const inside = sort !== null ? h("button", { type: "button", ...about,
      onclick: () => this.turn({ sort }) }, title + sign)
      : help ? h("span", { tabindex: "0", ...about }, title) : title;
    return h("th", { class: kind, "data-column": key, "aria-sort": sorted }, inside);
  }

  runRow(row, heads) {
    const box = h("input", { type: "checkbox", "aria-label": "select this run",
      onclick: ({ shiftKey }) => this.tick(this.rangeTo(row.id, shiftKey), box.checked) });
    const open = () => this.open(row.id);
    return h("tr", { "data-id": row.id, class: row.deleted ? "deleted" : null, onclick: outsideControls(open) },
      h("td", { class: "tick" }, box), ...cells(row, heads, open));
  }

  groupRow(row, heads, grouped) {
    const narrow = () => { if (row.id !== null) this.send("narrow", { value: row.id }); };
    const line = h("tr", { class: "group", onclick: outsideControls(narrow) },
      grouped ? null : h("td", { class: "tick" }), ...cells(row, heads, narrow));
    if (row.experiment) {
      line.querySelector("td.prompt")?.append(" ", h("a", { href: row.experiment }, "report"));
    }
    return line;
  }

  /** Asks for another page or order. An answer to an earlier event may come later; `draw` drops it. */
  turn(event_data) {
    this.turns += 1;
    this.send("turn", event_data);
  }

  send(event, event_data) {
    this.keep({ event_data });
    this.component.trigger(event);
  }

  open(id) {
    show("runs", { run: id });
    this.updateMarks();
    this.send("open", { id });
  }

  /** With Shift, the ids from the last ticked row to this one. */
  rangeTo(id, isRange) {
    const ids = this.runs.map((row) => row.id);
    const at = ids.indexOf(id), from = isRange ? ids.indexOf(this.lastTicked) : -1;
    this.lastTicked = id;
    return from < 0 ? [id] : ids.slice(Math.min(at, from), Math.max(at, from) + 1);
  }

  tick(ids, on) {
    for (const id of ids) if (on) this.ticked.add(id); else this.ticked.delete(id);
    this.updateMarks();
    this.component.trigger("tick");
  }

  updateMarks() {
    let here = 0;
    for (const line of this.body.querySelectorAll("tr")) {
      const box = line.querySelector("input"), id = line.dataset.id ?? "";
      line.classList.toggle("open", Boolean(box) && id === this.opened);
      if (!box) continue;
      box.checked = this.ticked.has(id);
      here += Number(box.checked);
    }
    this.all.checked = here > 0 && here === this.runs.length;
    this.all.indeterminate = here > 0 && here < this.runs.length;
    this.keep({ ticked: [...this.ticked], untick: false });
  }

  keep(changes) {
    const { opened, ...value } = this.value;  // said once
    this.kept = { ...value, turns: this.turns, ...changes };
    this.component.props.value = this.kept;
  }

  // The URL names what is shown.
  rememberLink() {
    if (!this.component.element.offsetParent) return;
    const { query } = this.value;
    show("runs", { run: this.opened, runs: query && JSON.stringify(query) }, true);
  }

  /** Up and Down move the focus to the same control of the next row. */
  moveFocus(event) {
    if (!(event.target instanceof HTMLElement)) return;
    const line = event.target.closest("tr");
    const other = event.key === "ArrowUp" ? line?.previousElementSibling
      : event.key === "ArrowDown" ? line?.nextElementSibling : null;
    const same = other?.querySelector(event.target.matches("input") ? ".tick input" : "button");
    if (!(same instanceof HTMLElement)) return;
    same.focus();
    event.preventDefault();
  }
}

/** Acts on clicks outside controls. */
const outsideControls = (act) => ({ target }) => { if (!target.closest("a, button, input")) act(); };

/** The first cell is a button, for the keyboard. */
function cells(row, heads, act) {
  return heads.map(({ key, kind }, i) => {
    const inside = content(kind, row.cells[i]);
    const cell = h("td", { class: kind, "data-column": key },
      h(i === 0 ? "button" : "span", i === 0 ? { type: "button", onclick: act } : {}, ...inside));
    if (kind === "text" || kind === "prompt") cell.title = cell.textContent ?? "";
    if (kind === "status") cell.dataset.state = row.cells[i];
    return cell;
  });
}

function content(kind, value) {
  if (kind === "when") return [when(value)];
  if (kind === "tags") return value.map((tag) => h("span", { class: "tag" }, tag));
  if (kind === "prompt") return [value[0] ? h("b", {}, value[0]) : null, ` ${value[1]}`];
  if (kind !== "method") return [value];
  return [value[0], value[1] === false ? h("span", { class: "lossy" }, "lossy") : null];
}

function when(iso) {
  const date = new Date(iso);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const today = date.toDateString() === new Date().toDateString();
  return today ? time : `${date.toLocaleDateString()} ${time}`;
}

export function mount(component) {
  const table = new RunTable(component);
  onValue(component, () => table.draw());
  onShown(component.element, () => component.trigger("refresh"));
}
