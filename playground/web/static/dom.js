// Building blocks shared by every component: elements made without innerHTML, and number formats.
const SVG_NS = "http://www.w3.org/2000/svg";

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

// h("p", { class: "x" }, "text", child): model text only ever enters through text nodes.
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NS, tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

const DASH = "\u2013";

function number(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return value.toFixed(digits);
}

// Milliseconds without their unit: 3.1, 72, 1302.
function milliseconds(value) { return number(value, value < 20 ? 1 : 0); }

function duration(ms) {
  if (!Number.isFinite(ms)) return DASH;
  return ms < 1000 ? `${milliseconds(ms)} ms` : `${number(ms / 1000, 2)} s`;
}

// Two durations in the unit of the longer one.
function durations(first, second) {
  if (!Number.isFinite(second)) return DASH;
  return second < 1000 ? `${milliseconds(first)} / ${milliseconds(second)} ms`
    : `${number(first / 1000, 2)} / ${number(second / 1000, 2)} s`;
}

// Seconds of a step by what they went into.
function splitWords(split) {
  return ["draft", "verify", "accept", "other"]
    .map((part) => `${part} ${milliseconds(1000 * split[`${part}_s`])}`).join(" \u00b7 ") + " ms";
}

function percent(value) {
  return value === null || value === undefined ? DASH : `${(100 * value).toFixed(0)} %`;
}

function probability(value) {
  if (value === null || value === undefined) return DASH;
  if (value > 0 && value < 0.001) return "<.001";
  return value >= 0.9995 ? "1.0" : value.toFixed(value < 0.1 ? 3 : 2).replace(/^0/, "");
}

// White space made visible, so that a token label never looks empty.
function visible(label) {
  return label.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7");
}

function clip(text, length) {
  const letters = Array.from(text);
  return letters.length <= length ? text : letters.slice(0, length - 1).join("") + "\u2026";
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
