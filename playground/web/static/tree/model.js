// A choice tree as a value, edits that make new values, their history, and where the nodes go.
// Nothing here draws.
//
// A path is the list of ranks from the root, [0, 1]; its key is "0.1", the root's key is "".
import { neighbourOf, placeInSlots } from "../kit.js";

/** @typedef {{ depth?: number | null, ranks?: number | null, what: string }} Limits of a drafter */

const MOST_NODES = 1024, MOST_UNDONE = 500;
export const MOST_DEPTH = 64;

/** @type {(path: number[]) => string} */
export const keyOf = (path) => path.join(".");
/** @type {(key: string) => number[]} */
const pathOf = (key) => key === "" ? [] : key.split(".").map(Number);
/** @type {(key: string) => string} */
export const parentOf = (key) => key.slice(0, Math.max(0, key.lastIndexOf(".")));
/** @type {(key: string) => number} */
export const depthOf = (key) => pathOf(key).length;
/** @type {(key: string) => number} */
export const rankOf = (key) => Number(key.slice(key.lastIndexOf(".") + 1));
/** @type {(key: string, top: string) => boolean} */
export const isWithin = (key, top) => top === "" || key === top || key.startsWith(top + ".");
/** @type {(key: string) => string} */
export const pathText = (key) => key === "" ? "the root" : `[${key.split(".").join(", ")}]`;

/** Prefix-closed paths in node order: by depth, then lexicographically. paths[i] is node i + 1. */
export class Choices {
  /** @param {number[][]} paths */
  constructor(paths) {
    this.paths = [...paths].sort((a, b) => {
      const at = a.length === b.length ? a.findIndex((rank, i) => rank !== b[i]) : -1;
      return at < 0 ? a.length - b.length : a[at] - b[at];
    });
    this.keys = this.paths.map(keyOf);
    /** @type {Map<string, number>} */
    this.nodes = new Map(["", ...this.keys].map((key, i) => [key, i]));
    /** @type {Map<string, string[]>} */
    this.below = new Map(["", ...this.keys].map((key) => [key, []]));
    for (const key of this.keys) this.childrenOf(parentOf(key)).push(key);
    this.depth = this.paths.at(-1)?.length ?? 0;
    this.maxRank = Math.max(0, ...this.keys.map(rankOf));
  }

  /** @param {number} length */
  static chain(length) {
    return new Choices(Array.from({ length }, (_, i) => Array(i + 1).fill(0)));
  }

  /**
   * Every prefix of every path, once.
   * @param {number[][]} paths
   */
  static closed(paths) {
    const prefixes = paths.flatMap((path) => path.map((_, i) => path.slice(0, i + 1)));
    return new Choices([...new Map(prefixes.map((path) => [keyOf(path), path])).values()]);
  }

  get size() { return this.paths.length; }
  get isChain() { return this.depth === this.size; }
  get leaves() { return this.keys.filter((key) => !this.childrenOf(key).length); }
  /** @param {string} key */
  has(key) { return this.nodes.has(key); }
  /** @param {string} key of a node of this tree */
  nodeOf(key) { return /** @type {number} */ (this.nodes.get(key)); }
  /** @param {string} key */
  childrenOf(key) { return this.below.get(key) ?? []; }
  /** @param {string} top */
  subtree(top) { return this.keys.filter((key) => isWithin(key, top)); }
  /** @param {Choices} other */
  equals(other) { return this.keys.join() === other.keys.join(); }
  /** @param {string} top */
  without(top) { return new Choices(this.paths.filter((_, i) => !isWithin(this.keys[i], top))); }
}

/**
 * What an edit gives: the tree, the key to go to and what to say, or why it cannot be.
 * @typedef {{ tree?: Choices, at?: string, text?: string, fault?: string }} Edit
 */

/**
 * Adds the lowest free rank below a parent, from one on.
 * @type {(tree: Choices, parent: string, from: number, limits?: Limits) => Edit}
 */
function add(tree, parent, from, limits) {
  const taken = tree.childrenOf(parent).map(rankOf), most = limits?.depth ?? MOST_DEPTH;
  let rank = from;
  while (taken.includes(rank)) rank += 1;
  const path = [...pathOf(parent), rank], at = keyOf(path), place = pathText(at);
  if (tree.size >= MOST_NODES) return { fault: `A choice tree has at most ${MOST_NODES} nodes.` };
  if (path.length > most) {
    return { fault: `${place} would be at depth ${path.length}; ${limits?.what ?? "the editor"} `
      + `drafts ${most} deep.` };
  }
  if (limits?.ranks && rank >= limits.ranks) {
    return { fault: `${place} would need rank ${rank}; ${limits.what} offers ranks 0 to `
      + `${limits.ranks - 1}.` };
  }
  return { tree: new Choices([...tree.paths, path]), at, text: `Added ${place}` };
}

/** @type {Record<string, (tree: Choices, key: string, limits?: Limits) => Edit>} */
export const EDITS = {
  child: (tree, key, limits) => add(tree, key, 0, limits),
  next: (tree, key, limits) => key === ""
    ? { fault: "The root has no siblings; add a child to it." }
    : add(tree, parentOf(key), rankOf(key) + 1, limits),
  remove(tree, key) {
    if (key === "") return { fault: "The root cannot be removed: it is the last committed token." };
    const siblings = tree.childrenOf(parentOf(key)), at = siblings.indexOf(key);
    const below = tree.subtree(key).length - 1;
    return { tree: tree.without(key), at: siblings[at + 1] ?? siblings[at - 1] ?? parentOf(key),
      text: `Removed ${pathText(key)}${below ? ` and ${below} below it` : ""}` };
  },
};

/** The states that edits led to, and where among them we are. */
export class EditHistory {
  place = 0;

  constructor(state) { this.states = [state]; }

  reset(state) {
    this.states = [state];
    this.place = 0;
  }

  get now() { return this.states[this.place]; }
  set now(state) { this.states[this.place] = state; }

  push(state) {
    this.states = [...this.states.slice(0, this.place + 1), state].slice(-MOST_UNDONE);
    this.place = this.states.length - 1;
  }

  /** @param {number} by -1 to undo, 1 to redo */
  can(by) { return this.place + by in this.states; }

  go(by) {
    const moves = this.can(by);
    if (moves) this.place += by;
    return moves;
  }
}

// A link's short form lists the leaves: "0.0.0.0_0.1.0_1.0_1.1".
/** @type {(tree: Choices) => string} */
export const linkOf = (tree) => tree.leaves.join("_");

/** @param {string} text */
export function fromLink(text) {
  if (!/^\d{1,4}([._]\d{1,4})*$/.test(text) || text.length > 60_000) return null;
  const paths = text.split("_").map(pathOf);
  if (paths.some((path) => path.length > MOST_DEPTH)) return null;
  const tree = Choices.closed(paths);
  return tree.size <= MOST_NODES ? tree : null;
}

// ---- where the nodes go: one column per depth (or row, with the root on top)

export const ALONG = { left: 92, top: 76 };
const ACROSS = { left: 24, top: 52 };
export const MARGIN = { left: { x: 26, y: 44 }, top: { x: 66, y: 24 } };
const TURNED = { ArrowUp: "ArrowLeft", ArrowLeft: "ArrowUp", ArrowDown: "ArrowRight",
  ArrowRight: "ArrowDown" };

/**
 * Places by key, and in the order of depths and slots.
 * @param {Choices} tree
 * @param {Set<string>} collapsed keys whose subtree is folded away
 * @param {string} root whether it is "left" or on "top"
 */
export function layoutChoices(tree, collapsed, root) {
  const items = new Map();
  const make = (key, above) => {
    const below = collapsed.has(key) ? [] : tree.childrenOf(key);
    const folded = below.length ? 0 : tree.subtree(key).length - Number(key !== "");
    /** @type {any} */
    const item = { key, above, folded, below: [], depth: 0, slot: 0, x: 0, y: 0 };
    items.set(key, item);
    item.below = below.map((child) => make(child, item));
    return item;
  };
  const slots = placeInSlots(make("", null));
  const order = [...items.values()].sort((a, b) => a.depth - b.depth || a.slot - b.slot);
  const { x: left, y: top } = MARGIN[root], depth = order[order.length - 1].depth;
  for (const item of order) {
    const along = item.depth * ALONG[root], across = item.slot * ACROSS[root];
    item.x = left + (root === "left" ? along : across);
    item.y = top + (root === "left" ? across : along);
  }
  const long = (depth + 1) * ALONG[root], wide = Math.max(1, slots) * ACROSS[root];
  return { items, order, depth, width: left + (root === "left" ? long : wide + 8),
    height: top + (root === "left" ? wide : long - 20) };
}

/** The key of the node that an arrow key leads to. */
export function neighbour(layout, key, arrow, root) {
  const item = layout.items.get(key), way = root === "left" ? arrow : TURNED[arrow];
  return item && neighbourOf(layout.order, item, way)?.key;
}
