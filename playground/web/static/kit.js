// Shared by all components: elements created without innerHTML, figures as text, calls of the server.

/**
 * Gradio's arguments to a component.
 * @typedef {{ element: HTMLElement, props: Record<string, any>,
 *   server: Record<string, (question: object) => Promise<any>>,
 *   trigger: (event: string, data?: object) => void,
 *   watch: (name: string, changed: () => void) => void }} Component
 */

/** @typedef {Node | string | null | undefined} Child */
/** @typedef {Record<string, any>} Attributes */

/** @param {Attributes} attributes `onclick: work` listens; null and false leave an attribute out. */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/**
 * An HTML element. Model text only ever enters through its text nodes.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {Child[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. @returns {SVGElement} */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Calls `receive` with the component's value, now and whenever it changes. */
export function onValue(component, receive) {
  component.watch("value", () => receive(component.props.value));
  receive(component.props.value);
}

/** Calls back whenever the element's page is shown: at first, and on every switch to its tab. */
export function onShown(element, act) {
  let was = false;
  new ResizeObserver(() => {
    const is = element.offsetParent !== null;
    if (is && !was) act();
    was = is;
  }).observe(element);
}

/** The element of a component's template that matches a selector. */
export function part(element, selector) {
  const child = element.querySelector(selector);
  if (!(child instanceof HTMLElement)) throw new Error(`the template has no ${selector}`);
  return child;
}

/** Work that is done in the next frame, once however often it was asked for. */
export function perFrame(work) {
  let isDue = false;
  return () => {
    if (!isDue) requestAnimationFrame(() => { isDue = false; work(); });
    isDue = true;
  };
}

// ---- controls

const COPIED_MS = 2000;

/** The value that this browser stores under a name; null if there is none. */
export function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

export function remember(name, value, store = "localStorage") {
  try { window[store].setItem(name, value); } catch { /* private windows store nothing */ }
}

/** Shows a sentence in an alert; without one, hides the alert. */
export function showAlert(alert, sentence) {
  alert.hidden = !sentence;
  alert.textContent = sentence ?? "";
}

/** A button that looks like text; if its text is a symbol, the title is its accessible name. */
export function textButton(text, title, work, more = {}) {
  return h("button", { type: "button", class: "quiet", title, onclick: work,
    "aria-label": /[a-z]/.test(text) ? null : title, ...more }, text);
}

/** A button with a frame. */
export function actionButton(text, work, more = {}) {
  return h("button", { type: "button", class: "action", onclick: work, ...more }, text);
}

/** A bar for `showProgress`. */
export function progressBar() { return h("progress", { hidden: true, "aria-label": "progress" }); }

/** Whether the user wants nothing to move by itself. */
export function wantsStill() { return matchMedia("(prefers-reduced-motion: reduce)").matches; }

/** A figure with its name, and its formula for `about.js`. */
export function figure(formula, value, name) {
  return h("div", { class: "figure", tabindex: "0", "data-about": formula }, value,
    name instanceof Node ? name : h("span", { class: "name" }, name));
}

/** An entry of a legend: its colours and words. */
export function swatch(words, ...kinds) {
  return h("span", { class: "swatch" }, ...kinds.map((kind) => h("i", { class: kind })), ` ${words}`);
}

/** @param {{ cells: (Node | string)[], on?: boolean, [attribute: string]: any }[]} rows */
export function table(titles, rows) {
  const heads = titles.map((title) => h("th", { scope: "col" }, title));
  const lines = rows.map(({ cells, on, ...more }) => h("tr", { class: on ? "on" : null, ...more },
    ...cells.map((cell) => h("td", {}, cell))));
  return h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...lines));
}

/** A menu of playback speeds. */
export function speedMenu(name, factors) {
  return h("select", { "aria-label": name }, ...factors.map((factor) => h("option",
    { value: factor, selected: factor === 1 }, `${factor < 1 ? `1/${1 / factor}` : factor}\u00d7`)));
}

/** Presses the first visible button of these; returns whether there is one. */
export function press(ids) {
  for (const id of ids) {
    const button = document.getElementById(id);
    if (!(button instanceof HTMLButtonElement) || button.disabled || !button.offsetParent) continue;
    button.click();
    return true;
  }
  return false;
}

/** Sets a `progressBar` to a share from 0 to 1; null = unknown. */
export function showProgress(bar, share) {
  if (share === null) bar.removeAttribute("value");
  else bar.value = share;
}

/** Lets a browser save a text as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A button that copies a text, and shows whether the browser allowed it. */
export function copyButton(name, textOf) {
  const button = textButton(name, null, async () => {
    button.textContent = await toClipboard(textOf()) ? "copied"
      : "not copied: the browser does not allow it here";
    setTimeout(() => { button.textContent = name; }, COPIED_MS);
  }, { "aria-live": "polite" });
  return button;
}

/** Copies a text; returns whether the browser allowed it. */
export function toClipboard(text) {
  return navigator.clipboard.writeText(text).then(() => true, () => false);
}

/**
 * The server's answer to a question; Gradio returns nothing if a call fails.
 * @returns {Promise<any>} has `error`, a sentence, in case of a fault; and `gone` if the server does
 *   not respond
 */
export async function ask(answer) {
  try {
    return (await answer) ?? GONE;
  } catch {
    return GONE;
  }
}

const GONE = { gone: true, error: "The server does not respond. The runs shown here are in its log: restart it, "
  + "then open the address that it prints." };

// ---- figures as text, in the notation of engine/formats.py

export const DASH = "\u2013";

export function number(value, digits) {
  return Number.isFinite(value) ? Number(value).toFixed(digits) : DASH;
}

export function speedup(value) { return Number.isFinite(value) ? `${number(value, 2)}\u00d7` : DASH; }

/** Milliseconds without the unit: 3.1, 72, 1302. */
export function milliseconds(value) { return number(value, Number(value) < 20 ? 1 : 0); }

export function duration(ms) {
  if (!Number.isFinite(ms)) return DASH;
  return Number(ms) < 1000 ? `${milliseconds(ms)} ms` : `${number(Number(ms) / 1000, 2)} s`;
}

export function percent(value) {
  return Number.isFinite(value) ? `${number(100 * Number(value), 0)}%` : DASH;
}

export function probability(value) {
  if (value === null || value === undefined) return DASH;
  if (value > 0 && value < 0.001) return "<.001";
  return value >= 0.9995 ? "1.0" : value.toFixed(value < 0.1 ? 3 : 2).replace(/^0/, "");
}

export const STEP_PARTS = ["draft", "verify", "accept", "other", "roll-back"];

export function plural(count, noun) { return `${count} ${noun}${count === 1 ? "" : "s"}`; }

/** White space made visible, so that a token label never looks empty. */
export function visible(label) {
  return label.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7");
}

export function clip(text, length) {
  const letters = Array.from(text);
  return letters.length <= length ? text : letters.slice(0, length - 1).join("") + "\u2026";
}
