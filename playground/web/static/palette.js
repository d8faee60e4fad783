// Ctrl+K: pages, methods, recent runs and actions in one list, filtered by words.
import { select, show } from "./address.js";
import { h, press } from "./kit.js";

/** @typedef {{ title: string, kind: string, act: () => void }} Entry */

/** @type {[title: string, tab: string, button: string][]} */
const BUTTONS = [
  ["Generate", "generate", "pg-generate"],
  ["Stop", "generate", "pg-stop"],
  ["Run again", "generate", "pg-again"],
  ["New chat", "generate", "pg-new"],
  ["Find the fastest method", "generate", "pg-fastest-start"],
  ["Load the target now", "generate", "pg-load"],
  ["Run the comparison", "compare", "pg-cmp-run"],
];
const MOST_SHOWN = 60, TRIES = 40, EVERY_MS = 50;

/** The buttons of a tab appear some time after it is first selected. */
function pressOn(tab, id, tries = TRIES) {
  select(tab);
  if (!press([id]) && tries) setTimeout(() => pressOn(tab, id, tries - 1), EVERY_MS);
}

/** Whether every word occurs. */
const fits = (words) => (/** @type {Entry} */ { title, kind }) => {
  const text = `${title} ${kind}`.toLowerCase();
  return words.every((/** @type {string} */ word) => text.includes(word));
};

class Palette {
  constructor(component) {
    this.component = component;
    /** @type {HTMLDialogElement | null} */
    this.dialog = null;
    this.list = h("ul", { id: "pg-palette-list", role: "listbox", "aria-label": "results" });
    this.input = h("input", { type: "text", role: "combobox", "aria-expanded": "true",
      "aria-controls": this.list.id, "aria-label": "page, method, run or action", "aria-autocomplete": "list",
      placeholder: "A page, method, run or action", autocomplete: "off", spellcheck: "false",
      oninput: () => this.fill() });
    /** @type {Entry[]} */
    this.matches = [];
    this.at = 0;
  }

  open() {
    if (this.dialog) return;
    this.input.value = "";
    this.dialog = h("dialog", { id: "pg-palette", "aria-label": "Go to",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event), onclose: () => this.removeDialog(),
      onclick: (/** @type {MouseEvent} */ event) => { if (event.target === this.dialog) this.dialog?.close(); },
    }, this.input, this.list);
    document.body.append(this.dialog);
    this.dialog.showModal();
    this.component.trigger("opened");
    this.fill();
  }

  /** The browser returns the focus by itself. */
  removeDialog() {
    this.dialog?.remove();
    this.dialog = null;
  }

  /** @returns {Entry[]} */
  entries() {
    const tabs = [...document.querySelectorAll("[role=tablist] [data-tab-id], .overflow-dropdown button")];
    const pages = [...new Set(tabs.map((tab) => tab.textContent?.trim() ?? ""))].filter(Boolean);
    const { methods = [], runs = [] } = this.component.props.value ?? {};
    const send = (event, id) => () => {
      this.component.props.value = { ...this.component.props.value, picked: id };
      this.component.trigger(event);
    };
    const dark = document.body.classList.contains("dark");
    return [
      ...pages.map((title) => ({ title, kind: "page", act: () => select(title.toLowerCase()) })),
      ...BUTTONS.map(([title, tab, id]) => ({ title, kind: "action", act: () => pressOn(tab, id) })),
      { title: dark ? "Light colours" : "Dark colours", kind: "action",
        act: () => document.body.classList.toggle("dark") },
      ...methods.map(([title, key]) => ({ title, kind: "method", act: send("method", key) })),
      ...runs.map(([title, id]) => ({ title, kind: "run", act: () => {
        show("runs", { run: id }, true);
        send("run", id)();
      } })),
    ];
  }

  fill() {
    if (!this.dialog) return;
    const query = this.input.value.trim().toLowerCase(), words = query.split(/\s+/);
    const starts = ({ title }) => Number(query !== "" && title.toLowerCase().startsWith(query));
    this.matches = this.entries().filter(fits(words)).sort((a, b) => starts(b) - starts(a))
      .slice(0, MOST_SHOWN);
    this.list.replaceChildren(...this.matches.map(({ title, kind }, i) => h("li", {
      role: "option", id: `pg-palette-${i}`, onclick: () => this.take(i),
      onpointermove: () => this.mark(i) }, h("span", {}, title), h("small", {}, kind))));
    if (!this.matches.length) this.list.append(h("li", { role: "option", "aria-disabled": "true" }, "Nothing matches."));
    this.mark(0);
  }

  mark(at) {
    this.at = at;
    [...this.list.children].forEach((item, i) => {
      item.setAttribute("aria-selected", String(i === at && this.matches.length > 0));
    });
    this.list.children[at]?.scrollIntoView({ block: "nearest" });
    if (this.matches.length) this.input.setAttribute("aria-activedescendant", `pg-palette-${at}`);
    else this.input.removeAttribute("aria-activedescendant");
  }

  take(at) {
    const entry = this.matches[at];
    if (!entry) return;
    this.dialog?.close();
    entry.act();
  }

  key(event) {
    event.stopPropagation();
    if (event.isComposing) return;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const last = this.matches.length - 1;
    if (event.key === "Enter") this.take(this.at);
    else if (by && last >= 0) {
      const to = this.at + by;
      this.mark(Math.abs(by) > 1 ? Math.max(0, Math.min(last, to)) : (to + last + 1) % (last + 1));
    } else if (event.key !== "Tab") return;  // the box is all that takes the focus
    event.preventDefault();
  }
}

export function mount(component) {
  const palette = new Palette(component);
  component.watch("value", () => palette.fill());
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.isComposing
      || event.altKey || event.shiftKey) return;
    event.preventDefault();
    palette.open();
  }, true);
}
