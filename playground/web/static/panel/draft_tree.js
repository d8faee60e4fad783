// The draft tree of a step as SVG, depth on x, leaves on y; zoom, and a threshold for its nodes.
import { clip, h, neighbourOf, placeInSlots, plural, probability, s, visible } from "../kit.js";
import { MaskView } from "../mask.js";

const ROOMY = { row: 40, pill: 20, gap: 30, probs: true };
const COMPACT = { row: 22, pill: 18, gap: 22, probs: false };
const ROOMY_LEAVES = 9;
const CHAR_PX = 7.3;
const PROBS_PX = 66;
const ZOOM = 1.25, LEAST_ZOOM = 0.2, MOST_ZOOM = 3;
const THRESHOLDS = [0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3];

/** @typedef {typeof ROOMY} Style */

/**
 * A step as the server tells it; node 0 is the root, parents come first.
 * @typedef {object} Step
 * @property {string[]} token_texts
 * @property {number[]} parents
 * @property {number[]} accepted
 * @property {(number | null)[]} draft_probs
 * @property {(number | null)[]} target_probs
 * @property {number[]} tokens
 * @property {(number | null)[]} ranks
 * @property {number} bonus the token that the target added
 * @property {string} bonus_text
 * @property {boolean} recovered whether it follows a rejection
 * @property {import("../mask.js").Buffers} [buffers]
 * @property {number} [num_extra_rows]
 */

/**
 * @typedef {object} TreeNode
 * @property {string} label
 * @property {number} node
 * @property {number} parent
 * @property {"root" | "draft" | "bonus" | "recovered"} kind
 * @property {boolean} accepted
 * @property {number | null} draft probability that the drafter gave it
 * @property {number | null} target probability that the target gave it
 * @property {number} id of the token
 * @property {number | null} rank
 */

/** @typedef {TreeNode & { depth: number, text: string, width: number, slot: number, x: number,
 *   y: number, above: Placed | null, below: Placed[] }} Placed */

/**
 * The nodes of a draft tree, and one more: the token that the target added after the accepted path.
 * @param {Step} tree
 */
export function withBonus(tree) {
  const accepted = new Set([0, ...tree.accepted]);
  /** @type {TreeNode[]} */
  const nodes = tree.token_texts.map((label, node) => ({
    label, node, parent: tree.parents[node], kind: node ? "draft" : "root",
    accepted: accepted.has(node), draft: tree.draft_probs[node], target: tree.target_probs[node],
    id: tree.tokens[node], rank: tree.ranks[node],
  }));
  nodes.push({
    label: tree.bonus_text, node: nodes.length, parent: tree.accepted.at(-1) ?? 0, id: tree.bonus,
    kind: tree.recovered ? "recovered" : "bonus", accepted: true, draft: null, target: null,
    rank: null,
  });
  return nodes;
}

/**
 * Nodes without the improbable ones and all below them; what was accepted stays.
 * @param {TreeNode[]} nodes parents come first
 * @param {number} least probability, the drafter's where it told one
 */
export function probable(nodes, least) {
  /** @type {Map<number, number>} */
  const places = new Map([[-1, -1]]);
  /** @type {TreeNode[]} */
  const kept = [];
  for (const item of nodes) {
    const parent = places.get(item.parent);
    if (parent === undefined) continue;
    if (!item.accepted && (item.draft ?? item.target ?? 1) < least) continue;
    places.set(item.node, kept.length);
    kept.push({ ...item, node: kept.length, parent });
  }
  return kept;
}

/**
 * Where nodes go: depth on x, leaves on y.
 * @param {TreeNode[]} nodes
 */
export function layoutTree(nodes) {
  /** @type {Placed[]} */
  const placed = nodes.map((item) => {
    const text = clip(visible(item.label), 14);
    const width = Math.max(26, Array.from(text).length * CHAR_PX + 14);
    return { ...item, text, width, above: null, below: [], depth: 0, slot: 0, x: 0, y: 0 };
  });
  for (const item of placed.slice(1)) {
    item.above = placed[item.parent];
    item.above.below.push(item);
  }
  const slots = placeInSlots(placed[0]), style = slots <= ROOMY_LEAVES ? ROOMY : COMPACT;
  /** @type {number[]} */
  const widths = [];
  for (const item of placed) {
    if (style.probs && item.kind === "draft") item.width = Math.max(item.width, PROBS_PX);
    widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
  }
  const left = [8];
  widths.forEach((width, depth) => left.push(left[depth] + width + style.gap));
  for (const item of placed) {
    item.x = left[item.depth];
    item.y = item.slot * style.row + style.row / 2;
  }
  const height = Math.max(1, slots) * style.row + 6;
  return { placed, style, width: left[left.length - 1], height };
}

function describeNode(item) {
  const what = {
    root: "root, committed before this step", bonus: "bonus token of the target",
    recovered: "recovered token, drawn by the target after the rejection",
    draft: item.accepted ? "accepted draft" : "rejected draft",
  }[item.kind];
  const parts = [`\u201c${visible(item.label)}\u201d`, what, `id ${item.id}`];
  if (item.kind === "draft") {
    parts.push(`depth ${item.depth}`, `rank ${item.rank}`);
    parts.push(`draft probability ${probability(item.draft)}`);
    parts.push(`target probability ${probability(item.target)}`);
  }
  return parts.join(" \u00b7 ");
}

function nodePill(item, style) {
  const group = s("g", {
    class: `node ${item.kind} ${item.accepted ? "on" : "off"}`, role: "treeitem",
    transform: `translate(${item.x},${item.y})`, tabindex: item.node === 0 ? "0" : "-1",
    "aria-level": item.depth + 1, "aria-label": describeNode(item), "data-node": item.node,
  });
  const top = -style.pill / 2 - (style.probs ? 5 : 0);
  group.append(s("rect", { x: 0, y: top, width: item.width, height: style.pill, rx: 4 }),
    s("text", { x: item.width / 2, y: top + style.pill / 2, dy: "0.34em" }, item.text));
  if (item.kind === "draft") appendProbs(group, item, style, top + style.pill);
  return group;
}

function appendProbs(group, item, style, y) {
  /** @type {[string, number | null, number][]} */
  const bars = [["p-draft", item.draft, y - 4.5], ["p-target", item.target, y - 2.5]];
  for (const [name, value, at] of bars) {
    if (value === null || value === undefined) continue;
    const width = Math.max(0.5, (item.width - 6) * Math.min(1, value));
    group.append(s("rect", { class: name, x: 3, y: at, width, height: 1.8 }));
  }
  if (!style.probs) return;
  const line = s("text", { class: "probs", x: item.width / 2, y: y + 10 });
  if (item.draft !== null && item.draft !== undefined) {
    line.append(s("tspan", { class: "t-draft" }, probability(item.draft)), " ");
  }
  line.append(s("tspan", { class: "t-target" }, probability(item.target)));
  group.append(line);
}

function connection(from, to, style) {
  const drop = style.probs ? 5 : 0;
  const x0 = from.x + from.width, x1 = to.x, bend = (x1 - x0) / 2;
  const y0 = from.y - drop, y1 = to.y - drop;
  const path = `M${x0},${y0} C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}`;
  return s("path", { class: `edge ${to.kind} ${to.accepted ? "on" : "off"}`, d: path });
}

/**
 * The picture of a tree.
 * @param {ReturnType<typeof layoutTree>} layout
 * @param {(text: string) => void} onNode is told of the node under the pointer or the focus, or ""
 */
function pictureOf({ placed, style, width, height }, onNode) {
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "draft tree" });
  const drawn = placed.slice(1).sort((a, b) => Number(a.accepted) - Number(b.accepted));
  const pills = placed.map((item) => nodePill(item, style));
  svg.append(...drawn.map((item) => connection(placed[item.parent], item, style)), ...pills);
  const nodeAt = ({ target }) =>
    placed[target.closest("[data-node]")?.getAttribute("data-node") ?? placed.length];
  const tell = (event) => {
    const item = nodeAt(event);
    onNode(item ? describeNode(item) : "");
  };
  svg.addEventListener("pointerover", tell);
  svg.addEventListener("focusin", tell);
  svg.addEventListener("pointerleave", () => onNode(""));
  svg.addEventListener("keydown", (event) => {
    const item = nodeAt(event), next = item && neighbourOf(placed, item, event.key);
    if (!item || !next) return;
    event.preventDefault();
    event.stopPropagation();
    pills[item.node].setAttribute("tabindex", "-1");
    pills[next.node].setAttribute("tabindex", "0");
    pills[next.node].focus();
  });
  return svg;
}

/** The tree of a step, with its tools. */
export class StepTree {
  constructor() {
    /** @type {Step | null} */
    this.step = null;
    this.rest = "";
    /** @type {number | null} null fits the tree into the space there is, never larger than life */
    this.scale = 1;
    /** Height of the tallest tree so far: with it nothing below moves from step to step. */
    this.tallest = 0;
    this.view = h("div", { class: "tree-view" });
    this.info = h("div", { class: "tree-info" });
    this.hidden = h("span", { class: "tree-hidden" });
    this.least = h("input", { type: "range", min: 0, max: THRESHOLDS.length - 1, value: 0,
      "aria-label": "minimum probability of the nodes shown", oninput: () => this.draw() });
    /** @type {(text: string, name: string, work: () => void) => HTMLElement} */
    const button = (text, name, work) => h("button", { type: "button", class: "quiet", title: name,
      "aria-label": name, onclick: work }, text);
    this.mask = new MaskView();
    this.mask.show(null);
    this.host = h("div", { class: "tree" }, h("div", { class: "tree-tools" },
      button("fit", "fit the tree into its space", () => this.zoom(null)),
      button("\u2212", "smaller", () => this.zoom(1 / ZOOM)), button("+", "larger", () => this.zoom(ZOOM)),
      h("label", {}, "hide below ", this.least), this.hidden), this.view, this.info,
    this.mask.host);
    this.view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM);
    }, { passive: false });
  }

  hint(text) {
    this.step = null;
    this.tallest = 0;
    this.view.replaceChildren(h("div", { class: "tree-hint" }, text));
    this.info.textContent = this.hidden.textContent = "";
    this.mask.show(null);
  }

  /**
   * @param {Step} step
   * @param {string} rest what is said while no node is pointed at
   */
  show(step, rest) {
    this.step = step;
    this.rest = rest;
    this.draw();
    this.info.textContent = rest;
    const extra = step.num_extra_rows;
    this.mask.show(step.buffers ?? null, step.token_texts, [0, ...step.accepted],
      extra ? `Not shown: the ${plural(extra, "row")} that the method verified beside its tree.` : "");
  }

  /** @param {number | null} factor null to fit */
  zoom(factor) {
    const now = this.view.querySelector("svg")?.clientWidth ?? 0, own = this.width ?? 1;
    this.scale = factor === null ? null
      : Math.min(MOST_ZOOM, Math.max(LEAST_ZOOM, factor * now / own));
    this.draw();
  }

  draw() {
    if (!this.step) return;
    const all = withBonus(this.step), least = THRESHOLDS[Number(this.least.value)];
    const nodes = probable(all, least), layout = layoutTree(nodes), { view } = this;
    this.hidden.textContent = least ? `${least} \u00b7 ${plural(all.length - nodes.length, "node")} hidden` : "";
    const svg = pictureOf(layout, (words) => { this.info.textContent = words || this.rest; });
    this.tallest = Math.max(this.tallest, layout.height + 14);
    view.style.height = `${this.tallest}px`;
    const room = { width: view.clientWidth - 16, height: view.clientHeight - 12 };
    const fit = Math.min(1, room.width / layout.width, room.height / layout.height);
    const scale = this.scale ?? Math.max(LEAST_ZOOM, fit);
    this.width = layout.width;
    svg.setAttribute("width", String(layout.width * scale));
    svg.setAttribute("height", String(layout.height * scale));
    view.replaceChildren(svg);
    const last = layout.placed[layout.placed.length - 1];
    view.scrollTop = Math.max(0, scale * last.y - view.clientHeight / 2);
  }
}
