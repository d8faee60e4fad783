// Shared by every component: elements created without innerHTML, figures as text, calls of the
// server, plotly in the page's colours.

/**
 * Gradio's arguments to a component.
 * @typedef {object} Component
 * @property {HTMLElement} element
 * @property {Record<string, any>} props
 * @property {Record<string, (question: object) => Promise<any>>} server
 * @property {(event: string, data?: object) => void} trigger
 * @property {(name: string, changed: () => void) => void} watch
 */

/** @typedef {Node | string | null | undefined} Child */
/** @typedef {Record<string, any>} Attributes */

/** @param {Attributes} attributes `onclick: work` listens; null and false leave an attribute out. */
function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
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
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/**
 * An SVG element.
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {(Node | string)[]} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** The part of a component's template with this class. */
export function part(element, selector) {
  const child = element.querySelector(selector);
  if (!(child instanceof HTMLElement)) throw new Error(`the template has no ${selector}`);
  return child;
}

// ---- trees on the screen

/**
 * Sets `depth` and `slot` of a tree's items: leaves take a slot each, a parent stands between its
 * first and its last child. An item has its children in `below`.
 * @returns {number} slots taken
 */
export function placeInSlots(root) {
  let slots = 0;
  const place = (item, depth) => {
    item.depth = depth;
    const { below } = item;
    for (const child of below) place(child, depth + 1);
    item.slot = below.length ? (below[0].slot + below[below.length - 1].slot) / 2 : slots++;
  };
  place(root, 0);
  return slots;
}

/** The item that an arrow key leads to from another one, the root on the left. */
export function neighbourOf(items, item, arrow) {
  const level = items.filter(({ depth }) => depth === item.depth).sort((a, b) => a.slot - b.slot);
  const at = level.indexOf(item);
  return { ArrowLeft: item.above, ArrowRight: item.below[0], ArrowUp: level[at - 1],
    ArrowDown: level[at + 1] }[arrow];
}

// ---- controls

/** What this browser keeps under a name; null where it keeps nothing. */
export function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

export function remember(name, value) {
  try { localStorage.setItem(name, value); } catch { /* private windows keep nothing */ }
}

/** A button that looks like text, with its name as its title. */
export function quietButton(text, name, work, more = {}) {
  return h("button", { type: "button", class: "quiet", title: name, "aria-label": name, onclick: work, ...more }, text);
}

/** A figure of a strip, with its formula as `about.js` shows it. */
export function figure(formula, ...inside) {
  return h("div", { class: "figure", tabindex: "0", "data-about": formula }, ...inside);
}

/** Presses the first of these buttons that is visible; returns whether one is. */
export function press(ids) {
  for (const id of ids) {
    const holder = document.getElementById(id);
    const button = holder?.matches("button") ? holder : holder?.querySelector("button");
    if (!(button instanceof HTMLButtonElement) || button.disabled || !button.offsetParent) continue;
    button.click();
    return true;
  }
  return false;
}

/** Sets a `.progress` to a share; null = unknown. */
export function showProgress(host, share) {
  host.classList.toggle("unknown", share === null);
  host.firstElementChild.style.width = share === null ? "" : `${100 * share}%`;
  if (share === null) host.removeAttribute("aria-valuenow");
  else host.setAttribute("aria-valuenow", Math.round(100 * share));
}

/** Lets a browser save a text as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Copies a text; returns whether the browser allowed it. */
export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/**
 * The server's answer to a question, or an error: Gradio answers nothing when a call fails.
 * @returns {Promise<any>} with `error`, a sentence, for a fault; with `gone` too if the server does
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

/** @typedef {number | null | undefined} Figure */

export function number(value, digits) {
  return Number.isFinite(value) ? Number(value).toFixed(digits) : DASH;
}

export function speedup(value) { return Number.isFinite(value) ? `${number(value, 2)}\u00d7` : DASH; }

/** Without their unit: 3.1, 72, 1302. */
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

// ---- plotly, from this server, loaded when the first chart is drawn

/** @type {Promise<any> | null} */
let plotly = null;

export function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = h("script", { src: new URL("plotly.min.js", import.meta.url).href });
    script.addEventListener("load", () => resolve(Reflect.get(window, "Plotly")));
    script.addEventListener("error", () => {
      plotly = null;
      script.remove();
      reject(new Error("plotly did not load"));
    });
    document.head.append(script);
  });
  return plotly;
}

/** Calls back whenever the page turns dark or light. */
export function followTheme(changed) {
  new MutationObserver(changed)
    .observe(document.body, { attributes: true, attributeFilter: ["class"] });
}
