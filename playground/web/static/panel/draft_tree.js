// The draft tree of a step as SVG: nodes fill the available space, improbable siblings are folded.
import { clip, h, plural, probability, remember, remembered, s, textButton, visible } from "../kit.js";
import { MaskView } from "../mask.js";
import { ZOOM, curve, keepPlace, neighbourOf, pannable, placeInSlots } from "../trees.js";
import { Walk } from "./walk.js";

const PILL = 22, ROOMY_ROW = 40, ROW = 26, LEVEL = 62, GAP = 22, MAX_GAP = 150, SIDE_GAP = 8;
const ROOMY_LEAVES = 9, MIN_SLOTS = 6, MAX_LETTERS = 14;
const CHAR_PX = 7.3, PROBS_PX = 66;
const MIN_ZOOM = 0.2, MAX_ZOOM = 3;
const ROOT = "pg-tree-root";

/**
 * A step as the server sends it; node 0 is the root, parents precede children. `bonus` is the token that
 * the target added, `recovered` tells whether after a rejection; `num_committed` is the number of path
 * tokens up to the end of the text; absent = all.
 * @typedef {{ token_texts: string[], parents: number[], accepted: number[], tokens: number[],
 *   draft_probs: (number | null)[], target_probs: (number | null)[], ranks: (number | null)[],
 *   bonus: number, bonus_text: string, recovered: boolean, num_committed?: number,
 *   buffers?: import("../mask.js").Buffers, num_extra_rows?: number }} Step
 */

/**
 * The nodes of a draft tree, and the token that the target added after the accepted path. Tokens accepted
 * beyond the end of the text count as not accepted, and the added token is left out.
 * @param {Step} tree
 */
export function withBonus(tree) {
  const { num_committed: committed = Infinity } = tree;
  const accepted = new Set([0, ...tree.accepted.slice(0, committed)]);
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

/** @typedef {ReturnType<typeof withBonus>[number]} TreeNode */

/**
 * The nodes of a tree that fits into `slots` rows: the least probable siblings are folded into one "+12".
 * Accepted nodes are never folded.
 * @param {TreeNode[]} nodes parents precede children
 * @param {number} slots rows for leaves
 * @param {Set<number>} opened parents whose children are never folded
 */
export function foldImprobable(nodes, slots, opened) {
  /** @type {TreeNode[][]} */
  const children = nodes.map(() => []);
  const chance = [1], hidden = new Set();
  for (const one of nodes.slice(1)) {
    children[one.parent].push(one);
    chance[one.node] = chance[one.parent] * (one.draft ?? one.target ?? 0.5);
  }
  const rows = (node) => {
    const shown = children[node].filter((one) => !hidden.has(one));
    const some = Number(shown.length < children[node].length);
    return shown.reduce((sum, one) => sum + rows(one.node), some) || 1;
  };
  // The first guess after the accepted path stays, too: it shows where the draft went wrong.
  const last = nodes.findLast((one) => one.accepted && (one.kind === "draft" || one.kind === "root"));
  const wrong = children[last?.node ?? 0].filter((one) => one.kind === "draft")
    .sort((a, b) => (a.rank ?? 0) - (b.rank ?? 0))[0];
  const improbable = nodes.filter((one) => !one.accepted && one !== wrong && !opened.has(one.parent))
    .sort((a, b) => chance[a.node] - chance[b.node]);
  for (const one of improbable) {
    if (rows(0) <= slots) break;
    hidden.add(one);
  }
  const size = (one) => children[one.node].reduce((sum, child) => sum + size(child), 1);
  const keep = (one) => {
    const away = children[one.node].filter((child) => hidden.has(child));
    const shown = children[one.node].filter((child) => !hidden.has(child)).flatMap(keep);
    const count = away.reduce((sum, child) => sum + size(child), 0);
    return [one, ...shown, ...count
      ? [{ ...away[0], label: `+${count}`, kind: "more", node: -1, parent: one.node }] : []];
  };
  return keep(nodes[0]);
}

/** A short label for a part of a character: "2 of 4 bytes of X" becomes X 2/4. */
const short = (label) => label.replace(/(\d) of (\d) bytes of (.)/u, "$3 $1/$2");

/**
 * Positions of nodes: depth along one axis, leaves along the other.
 * @param {TreeNode[]} nodes parents precede children
 * @param {number} room pixels available for the depth (root on the left) or the leaves (root on top)
 * @param {boolean} onTop whether the root is on top
 */
export function layoutTree(nodes, room = 0, onTop = false) {
  /** @type {any[]} */
  const placed = nodes.map((item) => {
    const text = item.kind === "more" ? item.label : clip(visible(short(item.label)), MAX_LETTERS);
    return { ...item, text, width: Math.max(26, Array.from(text).length * CHAR_PX + 14), children: [] };
  });
  const byNode = new Map(placed.map((item) => [item.node, item]));
  for (const item of placed.slice(1)) {
    item.parentItem = byNode.get(item.parent);
    item.parentItem.children.push(item);
  }
  const slots = placeInSlots(placed[0]), probs = onTop || slots <= ROOMY_LEAVES;
  for (const item of placed) {
    if (probs && item.kind === "draft") item.width = Math.max(item.width, PROBS_PX);
  }
  const style = { probs, onTop };
  return onTop ? fromTop(placed, slots, room, style) : fromLeft(placed, slots, room, style);
}

function fromLeft(placed, slots, room, style) {
  const widths = [];
  for (const item of placed) widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
  const own = widths.reduce((sum, width) => sum + width, 16);
  const gap = Math.min(MAX_GAP, Math.max(GAP, (room - own) / Math.max(1, widths.length - 1)));
  const left = [8], row = style.probs ? ROOMY_ROW : ROW;
  widths.forEach((width, depth) => left.push(left[depth] + width + gap));
  for (const item of placed) {
    item.x = left[item.depth];
    item.y = item.slot * row + row / 2;
  }
  return { placed, style, width: left[left.length - 1] - gap + 8, height: slots * row + 6 };
}

function fromTop(placed, slots, room, style) {
  // A node with several children has their space as well.
  const widest = placed.reduce((most, { children, width }) => children.length > 1 ? most : Math.max(most, width), 0);
  const pitch = Math.min(widest + MAX_GAP, Math.max(widest + SIDE_GAP, (room - 16) / slots));
  let depth = 0;
  for (const item of placed) {
    depth = Math.max(depth, item.depth);
    item.x = 8 + (item.slot + 0.5) * pitch - item.width / 2;
    item.y = item.depth * LEVEL + ROOMY_ROW / 2;
  }
  return { placed, style, width: slots * pitch + 16, height: depth * LEVEL + ROOMY_ROW + 6 };
}

export function describeNode(item) {
  if (item.kind === "more") return `${item.label} improbable drafts; click to show them`;
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

function nodePill(item, { probs }) {
  const { kind, draft, target, width } = item, top = -PILL / 2 - (probs ? 5 : 0), foot = top + PILL;
  const group = s("g", {
    class: `node ${kind} ${item.accepted ? "on" : "off"}`, role: "treeitem",
    transform: `translate(${item.x},${item.y})`, tabindex: item.node === 0 ? "0" : "-1",
    "aria-level": item.depth + 1, "aria-label": describeNode(item), "data-node": item.node,
  }, s("rect", { x: 0, y: top, width, height: PILL, rx: 4 }),
  s("text", { x: width / 2, y: top + PILL / 2, dy: "0.34em" }, item.text));
  if (kind !== "draft") return group;
  const bar = (name, value, y) => value === null ? "" : s("rect", { class: name, x: 3, y, height: 1.8,
    width: Math.max(0.5, (width - 6) * Math.min(1, value)) });
  group.append(bar("p-draft", draft, foot - 4.5), bar("p-target", target, foot - 2.5));
  if (probs) {
    group.append(s("text", { class: "probs", x: width / 2, y: foot + 11 },
      ...draft === null ? [] : [s("tspan", { class: "t-draft" }, probability(draft)), " "],
      s("tspan", { class: "t-target" }, probability(target))));
  }
  return group;
}

function connection(to, { probs, onTop }) {
  const from = to.parentItem;
  const drop = probs ? 5 : 0, foot = probs && from.kind === "draft" ? 13 : 0;
  const ends = onTop
    ? [from.x + from.width / 2, from.y + PILL / 2 - drop + foot, to.x + to.width / 2,
      to.y - PILL / 2 - drop]
    : [from.x + from.width, from.y - drop, to.x, to.y - drop];
  return s("path", { class: `edge ${to.kind} ${to.accepted ? "on" : "off"}`, d: curve(...ends, onTop) });
}

/**
 * The picture of a tree; every item gets its `pill` and its `edge`.
 * @param {ReturnType<typeof layoutTree>} layout
 * @param {{ point: (item: any) => void, open: (parent: number) => void }} on
 */
function pictureOf({ placed, style, width, height }, on) {
  for (const item of placed) {
    item.pill = nodePill(item, style);
    item.edge = item.parentItem && connection(item, style);
  }
  const itemAt = ({ target }) => placed.find(({ pill }) => pill.contains(target)) ?? null;
  const open = (event) => {
    const item = itemAt(event);
    if (item?.kind === "more") on.open(item.parent);
    return item?.kind === "more";
  };
  const edges = placed.slice(1).sort((a, b) => Number(a.accepted) - Number(b.accepted));
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "draft tree",
    onpointerover: (event) => on.point(itemAt(event)), onfocusin: (event) => on.point(itemAt(event)),
    onpointerleave: () => on.point(null), onclick: open,
    onkeydown: (event) => {
      const item = itemAt(event), next = item && neighbourOf(placed, item, event.key, style.onTop);
      const opens = (event.key === "Enter" || event.key === " ") && open(event);
      if (!next && !opens) return;
      event.preventDefault();
      event.stopPropagation();
      if (opens) return;
      item.pill.setAttribute("tabindex", "-1");
      next.pill.setAttribute("tabindex", "0");
      next.pill.focus();
    } }, ...edges.map(({ edge }) => edge), ...placed.map(({ pill }) => pill));
}

/** The tree of a step with its toolbar. */
export class StepTree {
  /** @param {(node: number | null) => void} onPoint called with the node under the pointer */
  constructor(onPoint) {
    this.onPoint = onPoint;
    this.step = null;
    this.defaultInfo = "";
    /** @type {number | null} null fits the tree into the available space, at most at full size */
    this.scale = 1;
    /** @type {Set<number>} parents whose children are all shown */
    this.opened = new Set();
    this.onTop = remembered(ROOT) === "top";
    /** Height of the tallest tree so far, so that nothing below moves from step to step. */
    this.tallest = 0;
    this.view = h("div", { class: "tree-view" });
    this.info = h("div", { class: "tree-info" });
    this.mask = new MaskView((node) => this.highlight(node));
    this.mask.show(null);
    this.turn = textButton("", "draw the root on the other side", () => this.turnRoot());
    this.walk = new Walk(this);
    this.host = h("div", { class: "tree" }, h("div", { class: "tree-tools" }, this.walk.button,
      h("span", { class: "spring" }), this.turn,
      textButton("fit", "fit the tree into its space", () => this.zoom(null)),
      textButton("\u2212", "smaller (Ctrl+wheel)", () => this.zoom(1 / ZOOM)),
      textButton("+", "larger (Ctrl+wheel)", () => this.zoom(ZOOM)),
      textButton("full screen", "full screen (F)", () => this.isFull ? document.exitFullscreen()
        : this.host.requestFullscreen(), { "data-key": "f" })),
    this.walk.host, this.view, this.info, this.mask.host);
    const { view } = this;
    pannable(view, (factor, at) => this.zoom(factor, at), () => this.isFull);
    document.addEventListener("fullscreenchange", () => { if (this.step) this.draw(); });
    let width = 0;
    new ResizeObserver(() => {
      if (view.clientWidth === width) return;
      width = view.clientWidth;
      if (this.step) this.draw();
    }).observe(view);
  }

  get isFull() { return document.fullscreenElement === this.host; }

  turnRoot() {
    this.onTop = !this.onTop;
    remember(ROOT, this.onTop ? "top" : "left");
    this.tallest = 0;
    this.draw();
  }

  showMessage(text) {
    this.step = null;
    this.tallest = 0;
    this.view.replaceChildren(h("div", { class: "tree-hint" }, text));
    this.info.textContent = "";
    this.walk.setStep(null);
    this.mask.show(null);
  }

  /** @param {string} defaultInfo shown while no node is pointed at */
  show(step, defaultInfo) {
    if (step !== this.step) this.opened = new Set();
    this.step = step;
    this.defaultInfo = defaultInfo;
    this.walk.setStep(step);
    this.draw();
    this.info.textContent = defaultInfo;
    const extra = step.num_extra_rows;
    this.mask.show(step.buffers ?? null, step.token_texts, [0, ...step.accepted],
      extra ? `Not shown: ${plural(extra, "row")} that the method verified in addition to its tree.` : "");
  }

  /** @param {number | null} factor null to fit */
  zoom(factor, /** @type {MouseEvent | null} */ at = null) {
    keepPlace(this.view, () => {
      const before = this.shownScale ?? 1;
      this.scale = factor === null ? null
        : Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, factor * before));
      this.draw();
      return (this.shownScale ?? 1) / before;
    }, at);
  }

  draw() {
    if (!this.step) return;
    const { view } = this, room = Math.max(200, view.clientWidth - 16);
    const most = this.isFull ? view.clientHeight : parseFloat(getComputedStyle(view).maxHeight) || 236;
    this.turn.textContent = this.onTop ? "root on the left" : "root on top";
    const perSlot = this.onTop ? PROBS_PX + SIDE_GAP : ROW;
    const slots = Math.max(MIN_SLOTS, Math.floor((this.onTop ? room : most - 18) / perSlot));
    const nodes = foldImprobable(withBonus(this.step), slots, this.opened);
    const layout = layoutTree(nodes, room, this.onTop);
    this.picture = pictureOf(layout, { point: (item) => this.onItem(item),
      open: (parent) => { this.opened.add(parent); this.draw(); } });
    this.layout = layout;
    this.tallest = Math.max(this.tallest, layout.height + 14);
    view.style.height = this.isFull ? "" : `${this.tallest}px`;
    const fit = Math.min(1, room / layout.width, (view.clientHeight - 12) / layout.height);
    const scale = this.shownScale = this.scale ?? Math.max(MIN_ZOOM, fit);
    this.picture.setAttribute("width", String(layout.width * scale));
    this.picture.setAttribute("height", String(layout.height * scale));
    view.replaceChildren(this.picture);
    const last = layout.placed.find((item) => item.kind === "bonus" || item.kind === "recovered");
    view.scrollTop = Math.max(0, scale * (last?.y ?? 0) - view.clientHeight / 2);
    this.walk.applyFrame();
  }

  /** The item under the pointer or with the focus; null = none. */
  onItem(item) {
    const node = item && item.kind !== "more" ? item.node : null;
    this.describe(item, node);
    this.onPoint(node);
  }

  /** @param {number | null} node the node that is pointed at elsewhere */
  highlight(node) {
    const placed = this.layout?.placed ?? [], item = placed.find((one) => one.node === node);
    for (const one of placed) one.pill.classList.toggle("pointed", one === item);
    this.describe(item, node);
  }

  describe(item, node) {
    this.info.textContent = item ? describeNode(item) : this.defaultInfo;
    this.mask.highlight(node);
  }
}
