// The draft tree of a step as SVG: nodes spread over the space there is, improbable siblings folded.
import {
  clip, h, neighbourOf, placeInSlots, plural, probability, quietButton, remember, remembered, s, visible,
} from "../kit.js";
import { MaskView } from "../mask.js";
import { Minimap } from "./minimap.js";
import { Walk } from "./walk.js";

const PILL = 22, ROOMY_ROW = 40, ROW = 26, LEVEL = 62, GAP = 22, MOST_GAP = 150, SIDE_GAP = 8;
const ROOMY_LEAVES = 9, LEAST_SLOTS = 6, MOST_LETTERS = 14;
const CHAR_PX = 7.3, PROBS_PX = 66;
const ZOOM = 1.25, LEAST_ZOOM = 0.2, MOST_ZOOM = 3;
const ROOT = "pg-tree-root";

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
 * @property {number} [num_committed] tokens of the path up to the end of the text; all without it
 * @property {import("../mask.js").Buffers} [buffers]
 * @property {number} [num_extra_rows]
 */

/**
 * @typedef {object} TreeNode
 * @property {string} label
 * @property {number} node its index in the step; of the bonus token, the number of nodes
 * @property {number} parent
 * @property {"root" | "draft" | "bonus" | "recovered" | "more"} kind
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
 * What was accepted beyond the end of the text counts as not accepted, and has no token after it.
 * @param {Step} tree
 */
export function withBonus(tree) {
  const { num_committed: committed = Infinity } = tree;
  const accepted = new Set([0, ...tree.accepted.slice(0, committed)]);
  /** @type {TreeNode[]} */
  const nodes = tree.token_texts.map((label, node) => ({
    label, node, parent: tree.parents[node], kind: node ? "draft" : "root",
    accepted: accepted.has(node), draft: tree.draft_probs[node], target: tree.target_probs[node],
    id: tree.tokens[node], rank: tree.ranks[node],
  }));
  if (committed > tree.accepted.length) nodes.push({
    label: tree.bonus_text, node: nodes.length, parent: tree.accepted.at(-1) ?? 0, id: tree.bonus,
    kind: tree.recovered ? "recovered" : "bonus", accepted: true, draft: null, target: null,
    rank: null,
  });
  return nodes;
}

/**
 * Nodes that fit into so many rows: of the siblings, the least probable are folded into one "+12".
 * What was accepted stays.
 * @param {TreeNode[]} nodes parents come first
 * @param {number} slots rows for leaves
 * @param {Set<number>} opened parents whose children are never folded
 * @returns {TreeNode[]}
 */
export function folded(nodes, slots, opened) {
  /** @type {Map<number, TreeNode[]>} */
  const below = new Map();
  for (const one of nodes) below.set(one.parent, [...below.get(one.parent) ?? [], one]);
  const chance = new Map([[0, 1]]);
  for (const one of nodes.slice(1)) {
    chance.set(one.node, (chance.get(one.parent) ?? 1) * (one.draft ?? one.target ?? 0.5));
  }
  /** @type {Set<number>} */
  const hidden = new Set();
  const rows = (node) => {
    const children = below.get(node) ?? [], shown = children.filter((one) => !hidden.has(one.node));
    const some = Number(shown.length < children.length);
    return shown.reduce((sum, one) => sum + rows(one.node), some) || 1;
  };
  // The draft that was rejected in the accepted path's place stays, too: it says where the draft went wrong.
  const last = nodes.findLast((one) => one.accepted && (one.kind === "draft" || one.kind === "root"));
  const wrong = (below.get(last?.node ?? 0) ?? []).filter((one) => one.kind === "draft")
    .sort((a, b) => (a.rank ?? 0) - (b.rank ?? 0))[0];
  const improbable = nodes.filter((one) => !one.accepted && one !== wrong && !opened.has(one.parent))
    .sort((a, b) => (chance.get(a.node) ?? 0) - (chance.get(b.node) ?? 0));
  for (const one of improbable) {
    if (rows(0) <= slots) break;
    hidden.add(one.node);
  }
  const size = (node) => (below.get(node) ?? []).reduce((sum, one) => sum + size(one.node), 1);
  /** @type {TreeNode[]} */
  const kept = [];
  const keep = (one) => {
    kept.push(one);
    const children = below.get(one.node) ?? [], away = children.filter((child) => hidden.has(child.node));
    children.filter((child) => !hidden.has(child.node)).forEach(keep);
    if (!away.length) return;
    const count = away.reduce((sum, child) => sum + size(child.node), 0);
    kept.push({ ...away[0], label: `+${count}`, kind: "more", node: -1, parent: one.node });
  };
  keep(nodes[0]);
  return kept;
}

/** A part of a character in a few letters: "2 of 4 bytes of X" is X 2/4. */
const short = (label) => label.replace(/(\d) of (\d) bytes of (.)/u, "$3 $1/$2");

/**
 * Where nodes go: depth along one axis, leaves along the other.
 * @param {TreeNode[]} nodes parents come first
 * @param {number} room pixels that depth may take (root on the left) or leaves (root on top)
 * @param {boolean} onTop whether the root is on top
 */
export function layoutTree(nodes, room = 0, onTop = false) {
  const at = new Map(nodes.map((item, i) => [item.node, i]));
  /** @type {Placed[]} */
  const placed = nodes.map((item) => {
    const text = item.kind === "more" ? item.label : clip(visible(short(item.label)), MOST_LETTERS);
    const width = Math.max(26, Array.from(text).length * CHAR_PX + 14);
    return { ...item, text, width, above: null, below: [], depth: 0, slot: 0, x: 0, y: 0 };
  });
  for (const item of placed.slice(1)) {
    item.above = placed[at.get(item.parent) ?? 0];
    item.above.below.push(item);
  }
  const slots = placeInSlots(placed[0]), probs = onTop || slots <= ROOMY_LEAVES;
  for (const item of placed) {
    if (probs && item.kind === "draft") item.width = Math.max(item.width, PROBS_PX);
  }
  const style = { probs, onTop };
  return onTop ? fromTop(placed, slots, room, style) : fromLeft(placed, slots, room, style);
}

function fromLeft(placed, slots, room, style) {
  /** @type {number[]} */
  const widths = [];
  for (const item of placed) widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
  const own = widths.reduce((sum, width) => sum + width, 16);
  const gap = Math.min(MOST_GAP, Math.max(GAP, (room - own) / Math.max(1, widths.length - 1)));
  const left = [8], row = style.probs ? ROOMY_ROW : ROW;
  widths.forEach((width, depth) => left.push(left[depth] + width + gap));
  for (const item of placed) {
    item.x = left[item.depth];
    item.y = item.slot * row + row / 2;
  }
  return { placed, style, width: left[left.length - 1] - gap + 8, height: slots * row + 6 };
}

function fromTop(placed, slots, room, style) {
  // What has several children has their room as well.
  const widest = placed.reduce((most, { below, width }) => below.length > 1 ? most : Math.max(most, width), 0);
  const pitch = Math.min(widest + MOST_GAP, Math.max(widest + SIDE_GAP, (room - 16) / slots));
  let depth = 0;
  for (const item of placed) {
    depth = Math.max(depth, item.depth);
    item.x = 8 + (item.slot + 0.5) * pitch - item.width / 2;
    item.y = item.depth * LEVEL + ROOMY_ROW / 2;
  }
  return { placed, style, width: slots * pitch + 16, height: depth * LEVEL + ROOMY_ROW + 6 };
}

export function describeNode(item) {
  if (item.kind === "more") return `${item.label} improbable drafts; a click shows them`;
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
  const top = -PILL / 2 - (style.probs ? 5 : 0);
  group.append(s("rect", { x: 0, y: top, width: item.width, height: PILL, rx: 4 }),
    s("text", { x: item.width / 2, y: top + PILL / 2, dy: "0.34em" }, item.text));
  if (item.kind === "draft") appendProbs(group, item, style, top + PILL);
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
  const line = s("text", { class: "probs", x: item.width / 2, y: y + 11 });
  if (item.draft !== null && item.draft !== undefined) {
    line.append(s("tspan", { class: "t-draft" }, probability(item.draft)), " ");
  }
  line.append(s("tspan", { class: "t-target" }, probability(item.target)));
  group.append(line);
}

function connection(to, at, { probs, onTop }) {
  const from = to.above;
  const drop = probs ? 5 : 0, foot = probs && from.kind === "draft" ? 13 : 0;
  const [x0, y0, x1, y1] = onTop
    ? [from.x + from.width / 2, from.y + PILL / 2 - drop + foot, to.x + to.width / 2,
      to.y - PILL / 2 - drop]
    : [from.x + from.width, from.y - drop, to.x, to.y - drop];
  const [bendX, bendY] = onTop ? [0, (y1 - y0) / 2] : [(x1 - x0) / 2, 0];
  const path = `M${x0},${y0} C${x0 + bendX},${y0 + bendY} ${x1 - bendX},${y1 - bendY} ${x1},${y1}`;
  return s("path", { class: `edge ${to.kind} ${to.accepted ? "on" : "off"}`, d: path,
    "data-at": at });
}

/** Arrow keys as if the root were on the left. */
const TURNED = { ArrowUp: "ArrowLeft", ArrowDown: "ArrowRight", ArrowLeft: "ArrowUp",
  ArrowRight: "ArrowDown" };

/**
 * The picture of a tree.
 * @param {ReturnType<typeof layoutTree>} layout
 * @param {{ point: (item: Placed | null) => void, open: (parent: number) => void }} on
 */
function pictureOf({ placed, style, width, height }, on) {
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "draft tree" });
  const drawn = placed.map((item, at) => ({ item, at })).slice(1)
    .sort((a, b) => Number(a.item.accepted) - Number(b.item.accepted));
  const pills = placed.map((item) => nodePill(item, style));
  svg.append(...drawn.map(({ item, at }) => connection(item, at, style)), ...pills);
  const itemAt = ({ target }) => placed[pills.indexOf(target.closest("[data-node]"))] ?? null;
  svg.addEventListener("pointerover", (event) => on.point(itemAt(event)));
  svg.addEventListener("focusin", (event) => on.point(itemAt(event)));
  svg.addEventListener("pointerleave", () => on.point(null));
  const open = (event) => {
    const item = itemAt(event);
    if (item?.kind === "more") on.open(item.parent);
    return item?.kind === "more";
  };
  svg.addEventListener("click", open);
  svg.addEventListener("keydown", (event) => {
    if ((event.key === "Enter" || event.key === " ") && open(event)) { event.preventDefault(); return; }
    const item = itemAt(event), key = style.onTop ? TURNED[event.key] : event.key;
    const next = item && neighbourOf(placed, item, key);
    if (!item || !next) return;
    event.preventDefault();
    event.stopPropagation();
    pills[placed.indexOf(item)].setAttribute("tabindex", "-1");
    pills[placed.indexOf(next)].setAttribute("tabindex", "0");
    pills[placed.indexOf(next)].focus();
  });
  return svg;
}

/** The tree of a step, with its tools. */
export class StepTree {
  /** @param {(node: number | null) => void} onPoint is told of the node under the pointer */
  constructor(onPoint = () => {}) {
    this.onPoint = onPoint;
    /** @type {Step | null} */
    this.step = null;
    this.rest = "";
    /** @type {number | null} null fits the tree into the space there is, never larger than life */
    this.scale = 1;
    /** @type {Set<number>} parents whose children are all shown */
    this.opened = new Set();
    this.onTop = remembered(ROOT) === "top";
    /** Height of the tallest tree so far: with it nothing below moves from step to step. */
    this.tallest = 0;
    this.view = h("div", { class: "tree-view" });
    this.info = h("div", { class: "tree-info" });
    this.mask = new MaskView(() => {}, (node) => this.pointAt(node));
    this.mask.show(null);
    this.map = new Minimap(this.view);
    this.turn = quietButton("", "draw the root on the other side", () => this.turned(!this.onTop));
    this.walk = new Walk(this);
    this.host = h("div", { class: "tree" }, h("div", { class: "tree-tools" }, this.walk.button,
      h("span", { class: "spring" }), this.turn,
      quietButton("fit", "fit the tree into its space", () => this.zoom(null)),
      quietButton("\u2212", "smaller (Ctrl+wheel)", () => this.zoom(1 / ZOOM)),
      quietButton("+", "larger (Ctrl+wheel)", () => this.zoom(ZOOM)),
      quietButton("full screen", "full screen (F)", () => this.toggleFullScreen(), { "data-key": "f" })),
    this.walk.host, h("div", { class: "tree-frame" }, this.view, this.map.host), this.info,
    this.mask.host);
    this.listen();
  }

  listen() {
    const { view } = this;
    view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !this.isFull) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, event);
    }, { passive: false });
    /** @type {{ x: number, y: number } | null} */
    let held = null;
    view.addEventListener("pointerdown", ({ target, clientX, clientY }) => {
      if (target instanceof Element && target.closest("[data-node]")) return;
      held = { x: clientX + view.scrollLeft, y: clientY + view.scrollTop };
    });
    view.addEventListener("pointermove", ({ clientX, clientY, buttons }) => {
      if (!held || !buttons) { held = null; return; }
      view.scrollTo(held.x - clientX, held.y - clientY);
    });
    document.addEventListener("fullscreenchange", () => { if (this.step) this.draw(); });
    let width = 0;
    new ResizeObserver(() => {
      if (view.clientWidth === width) return;
      width = view.clientWidth;
      if (this.step) this.draw();
    }).observe(view);
  }

  get isFull() { return document.fullscreenElement === this.host; }

  toggleFullScreen() {
    if (this.isFull) document.exitFullscreen();
    else this.host.requestFullscreen?.();
  }

  turned(onTop) {
    this.onTop = onTop;
    remember(ROOT, onTop ? "top" : "left");
    this.tallest = 0;
    this.draw();
  }

  hint(text) {
    this.step = null;
    this.tallest = 0;
    this.view.replaceChildren(h("div", { class: "tree-hint" }, text));
    this.info.textContent = "";
    this.walk.offer(null);
    this.mask.show(null);
    this.map.show(null);
  }

  /**
   * @param {Step} step
   * @param {string} rest what is said while no node is pointed at
   */
  show(step, rest) {
    if (step !== this.step) this.opened = new Set();
    this.step = step;
    this.rest = rest;
    this.walk.offer(step);
    this.draw();
    this.info.textContent = rest;
    const extra = step.num_extra_rows;
    this.mask.show(step.buffers ?? null, step.token_texts, [0, ...step.accepted],
      extra ? `Not shown: the ${plural(extra, "row")} that the method verified beside its tree.` : "");
  }

  /**
   * @param {number | null} factor null to fit
   * @param {{ clientX: number, clientY: number } | null} at what stays where it is
   */
  zoom(factor, at = null) {
    const { view } = this, box = view.getBoundingClientRect();
    const x = at ? at.clientX - box.left : view.clientWidth / 2;
    const y = at ? at.clientY - box.top : view.clientHeight / 2;
    const before = this.shownScale ?? 1;
    this.scale = factor === null ? null
      : Math.min(MOST_ZOOM, Math.max(LEAST_ZOOM, factor * before));
    const [left, top] = [view.scrollLeft + x, view.scrollTop + y];
    this.draw();
    const by = (this.shownScale ?? 1) / before;
    view.scrollTo(left * by - x, top * by - y);
  }

  get most() {
    return this.isFull ? this.view.clientHeight : parseFloat(getComputedStyle(this.view).maxHeight) || 236;
  }

  draw() {
    if (!this.step) return;
    const { view } = this, room = Math.max(200, view.clientWidth - 16), most = this.most;
    this.turn.textContent = this.onTop ? "root on the left" : "root on top";
    const perSlot = this.onTop ? PROBS_PX + SIDE_GAP : ROW;
    const slots = Math.max(LEAST_SLOTS, Math.floor((this.onTop ? room : most - 18) / perSlot));
    const nodes = folded(withBonus(this.step), slots, this.opened);
    const layout = layoutTree(nodes, room, this.onTop);
    this.picture = pictureOf(layout, { point: (item) => this.point(item),
      open: (parent) => { this.opened.add(parent); this.draw(); } });
    this.layout = layout;
    this.tallest = Math.max(this.tallest, layout.height + 14);
    view.style.height = this.isFull ? "" : `${this.tallest}px`;
    const fit = Math.min(1, room / layout.width, (view.clientHeight - 12) / layout.height);
    const scale = this.shownScale = this.scale ?? Math.max(LEAST_ZOOM, fit);
    this.picture.setAttribute("width", String(layout.width * scale));
    this.picture.setAttribute("height", String(layout.height * scale));
    view.replaceChildren(this.picture);
    const last = layout.placed.find((item) => item.kind === "bonus" || item.kind === "recovered");
    view.scrollTop = Math.max(0, scale * (last?.y ?? 0) - view.clientHeight / 2);
    this.map.show(layout);
    this.walk.drawn();
  }

  /** @param {Placed | null} item under the pointer or the focus */
  point(item) {
    const node = item && item.kind !== "more" ? item.node : null;
    this.info.textContent = item ? describeNode(item) : this.rest;
    this.mask.point(node);
    this.onPoint(node);
  }

  /** @param {number | null} node that is pointed at elsewhere */
  pointAt(node) {
    const item = this.layout?.placed.find((one) => one.node === node) ?? null;
    for (const pill of this.picture?.querySelectorAll(".node") ?? []) {
      pill.classList.toggle("pointed", node !== null && pill.getAttribute("data-node") === String(node));
    }
    this.info.textContent = item ? describeNode(item) : this.rest;
    this.mask.point(node);
  }
}
