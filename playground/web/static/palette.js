// The command palette (Ctrl+K): pages, methods, recent runs and actions, filtered by words.
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
  ["Run the comparison", "compare", "pg-cmp-run"],
];
const MAX_SHOWN = 60, TRIES = 40, EVERY_MS = 50;

/** Selects a tab and presses its button, which appears some time after the first selection. */
function pressOn(tab, id, tries = TRIES) {
  select(tab);
  if (!press([id]) && tries) setTimeout(() => pressOn(tab, id, tries - 1), EVERY_MS);
}

/** Whether every word occurs in the entry. */
const fits = (words) => (/** @type {Entry} */ { title, kind }) =>
  words.every((word) => `${title} ${kind}`.toLowerCase().includes(word));

class Palette {
  constructor(component) {
    this.component = component;
    this.list = h("ul", { id: "pg-palette-list", role: "listbox", "aria-label": "results" });
    this.input = h("input", { type: "text", role: "combobox", "aria-expanded": "true",
      "aria-controls": this.list.id, "aria-label": "page, method, run or action", "aria-autocomplete": "list",
      placeholder: "A page, method, run or action", autocomplete: "off", spellcheck: "false",
      oninput: () => this.fill() });
    this.dialog = h("dialog", { id: "pg-palette", "aria-label": "Go to",
      onkeydown: (event) => this.key(event),
      onclick: ({ target }) => { if (target === this.dialog) this.dialog.close(); },
      onclose: () => { if (!this.dialog.open) this.dialog.remove(); } }, this.input, this.list);
    this.matches = [];
    this.at = 0;
  }

  open() {
    if (this.dialog.open) return;
    this.input.value = "";
    document.body.append(this.dialog);
    this.dialog.showModal();
    this.component.trigger("opened");
    this.fill();
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
    if (!this.dialog.open) return;
    const query = this.input.value.trim().toLowerCase(), words = query.split(/\s+/);
    const starts = ({ title }) => Number(query !== "" && title.toLowerCase().startsWith(query));
    this.matches = this.entries().filter(fits(words)).sort((a, b) => starts(b) - starts(a))
      .slice(0, MAX_SHOWN);
    this.list.replaceChildren(...this.matches.map(({ title, kind }, i) => h("li", {
      role: "option", id: `pg-palette-${i}`, onclick: () => this.take(i),
      onpointermove: () => this.mark(i) }, h("span", {}, title), h("small", {}, kind))));
    if (!this.matches.length) this.list.append(h("li", { role: "option", "aria-disabled": "true" }, "Nothing matches."));
    this.mark(0);
  }

  mark(at) {
    this.at = at;
    const items = [...this.list.children], item = items[at];
    for (const one of items) one.setAttribute("aria-selected", String(one === item && Boolean(item.id)));
    item.scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", item.id);
  }

  take(at) {
    const entry = this.matches[at];
    if (!entry) return;
    this.dialog.close();
    entry.act();
  }

  key(event) {
    event.stopPropagation();
    if (event.isComposing) return;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (event.key === "Enter") this.take(this.at);
    else if (by) this.mark(Math.max(0, Math.min(this.matches.length - 1, this.at + by)));
    else if (event.key !== "Tab") return;  // only the input takes the focus
    event.preventDefault();
  }
}

export function mount(component) {
  const palette = new Palette(component);
  component.watch("value", () => palette.fill());
  document.addEventListener("keydown", (event) => {
    const { key, ctrlKey, metaKey, altKey, shiftKey, isComposing } = event;
    if (key.toLowerCase() !== "k" || !(ctrlKey || metaKey) || isComposing || altKey || shiftKey) return;
    event.preventDefault();
    palette.open();
  }, true);
}
