// The table of runs. gr.Dataframe pages in the browser; a log of 100,000 runs is paged by the
// database, so the server sends the HTML of one page at a time.
//
// What the server sends is the component's value. This module adds `ticked`, the ids of ticked runs on
// all pages, `event_data`, the data of the event that it triggers, and `turns`, by which it knows a late
// answer.
import { parameter, show } from "../address.js";
import { actionButton, h, onShown, onValue, part, showAlert } from "../kit.js";

class RunTable {
  constructor(component) {
    this.component = component;
    this.frame = h("div", { class: "pg-table" });
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.count = h("span", { class: "count" });
    const pager = (text, by) =>
      actionButton(text, () => this.turn({ page: this.value.pages[0] + by }));
    this.previous = pager("\u2039 previous", -1);
    this.next = pager("next \u203a", 1);
    this.ticked = new Set();
    this.lastTicked = null;
    this.shownHtml = "";
    this.turns = 0;
    this.lastValue = {};
    part(component.element, ".runs").append(this.fault, this.frame,
      h("div", { class: "pager" }, this.count, this.previous, this.next));
    this.frame.addEventListener("click", (event) => this.click(event));
    this.frame.addEventListener("keydown", (event) => this.moveFocus(event));
  }

  get value() { return this.component.props.value ?? {}; }

  // Other parts of the page open runs, too, and one answer of the server may overtake another.
  get openRun() { return parameter("runs", "run"); }

  /** The rows of single runs. */
  get lines() {
    return [.../** @type {NodeListOf<HTMLElement>} */ (this.frame.querySelectorAll("tr[data-id]"))];
  }

  get ids() { return this.lines.map((line) => line.dataset.id ?? ""); }

  draw() {
    const { turns = this.turns } = this.value;
    if (turns < this.turns) {
      this.component.props.value = this.lastValue;
      return;
    }
    const { html = this.shownHtml, pages = [0, 1], fault = "", count = "" } = this.value;
    showAlert(this.fault, fault);
    if (!html) return;
    if ("opened" in this.value) show("runs", { run: this.value.opened });
    if (this.value.untick) this.ticked.clear();
    // A click is lost where the element under it is replaced between press and release.
    if (html !== this.shownHtml) this.drawRows(html);
    this.count.textContent = count;
    this.previous.disabled = pages[0] === 0;
    this.next.disabled = pages[0] + 1 >= pages[1];
    this.updateMarks();
    this.rememberLink();
  }

  drawRows(html) {
    const focused = this.frame.querySelector("th:focus-within")?.getAttribute("data-column");
    this.frame.innerHTML = this.shownHtml = html;
    /** @type {HTMLElement | null} */ (this.frame.querySelector(`[data-column="${focused}"] button`))?.focus();
  }

  /** Ticks, sorts, opens a run, or shows the runs of a group; a link of the row works as usual. */
  click({ target, shiftKey }) {
    const { id, group } = target.closest("tr")?.dataset ?? {}, sort = target.closest("[data-sort]");
    if (target.matches("input")) this.tick(id ? this.rangeTo(id, shiftKey) : this.ids, target.checked);
    else if (sort) this.turn({ sort: sort.dataset.sort });
    else if (target.closest("a")) return;
    else if (id) this.open(id);
    else if (group !== undefined) this.send("narrow", { value: group });
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
    const { ids } = this;
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
    const { lines } = this, isTicked = (line) => this.ticked.has(line.dataset.id);
    for (const line of lines) {
      line.classList.toggle("open", line.dataset.id === this.openRun);
      /** @type {HTMLInputElement} */ (part(line, "input")).checked = isTicked(line);
    }
    const num = lines.filter(isTicked).length, all = this.frame.querySelector("thead input");
    if (all instanceof HTMLInputElement) {
      all.checked = num > 0 && num === lines.length;
      all.indeterminate = num > 0 && num < lines.length;
    }
    this.keep({ ticked: [...this.ticked], untick: false });
  }

  keep(changes) {
    const { opened, html, ...value } = this.value;  // what has been drawn is not sent back
    this.lastValue = { ...value, turns: this.turns, ...changes };
    this.component.props.value = this.lastValue;
  }

  // The URL names what is shown.
  rememberLink() {
    if (!this.component.element.offsetParent) return;
    const { query } = this.value;
    show("runs", { run: this.openRun, runs: query && JSON.stringify(query) }, true);
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

export function mount(component) {
  const table = new RunTable(component);
  onValue(component, () => table.draw());
  onShown(component.element, () => component.trigger("refresh"));
}
