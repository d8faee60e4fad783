// A choice tree as a value, edits that make new values, their history, and the layout. No drawing.
//
// A path is the list of ranks from the root, [0, 1]; its key is "0.1", the root's key is "".
import { placeInSlots } from "../trees.js";

/** @typedef {{ depth?: number | null, ranks?: number | null, what: string }} Limits of a drafter */

const MAX_NODES = 1024, MAX_UNDONE = 500;
export const MAX_DEPTH = 64;

export const keyOf = (path) => path.join(".");
/** @returns {number[]} */
const pathOf = (key) => key === "" ? [] : key.split(".").map(Number);
export const parentOf = (key) => key.slice(0, Math.max(0, key.lastIndexOf(".")));
export const depthOf = (key) => pathOf(key).length;
export const rankOf = (key) => Number(key.slice(key.lastIndexOf(".") + 1));
export const isWithin = (key, top) => top === "" || key === top || key.startsWith(top + ".");
export const pathText = (key) => key === "" ? "the root" : `[${key.split(".").join(", ")}]`;

/** Prefix-closed paths in node order (by depth, then lexicographic); paths[i] is node i + 1. */
export class Choices {
  /** @param {number[][]} paths */
  constructor(paths) {
    this.paths = [...paths].sort((a, b) => {
      const at = a.length === b.length ? a.findIndex((rank, i) => rank !== b[i]) : -1;
      return at < 0 ? a.length - b.length : a[at] - b[at];
    });
    this.keys = this.paths.map(keyOf);
    /** @type {Map<string, any>} */
    this.nodes = new Map(["", ...this.keys].map((key, i) => [key, i]));
    /** @type {Map<string, string[]>} */
    this.children = new Map(["", ...this.keys].map((key) => [key, []]));
    for (const key of this.keys) this.childrenOf(parentOf(key)).push(key);
    this.depth = this.paths.at(-1)?.length ?? 0;
  }

  static chain(length) {
    return new Choices(Array.from({ length }, (_, i) => Array(i + 1).fill(0)));
  }

  /** Every prefix of every path, once. */
  static closed(paths) {
    const prefixes = paths.flatMap((path) => path.map((_, i) => path.slice(0, i + 1)));
    return new Choices([...new Map(prefixes.map((path) => [keyOf(path), path])).values()]);
  }

  get size() { return this.paths.length; }
  get isChain() { return this.depth === this.size; }
  has(key) { return this.nodes.has(key); }
  childrenOf(key) { return this.children.get(key) ?? []; }
  subtree(top) { return this.keys.filter((key) => isWithin(key, top)); }
  equals(other) { return this.keys.join() === other.keys.join(); }
  without(top) { return new Choices(this.paths.filter((_, i) => !isWithin(this.keys[i], top))); }
}

/** Adds a child to a parent: the lowest free rank that is at least `from`. */
function add(tree, parent, from, /** @type {Limits | undefined} */ limits) {
  const taken = tree.childrenOf(parent).map(rankOf), most = limits?.depth ?? MAX_DEPTH;
  let rank = from;
  while (taken.includes(rank)) rank += 1;
  const path = [...pathOf(parent), rank], at = keyOf(path), place = pathText(at);
  if (tree.size >= MAX_NODES) return { fault: `A choice tree has at most ${MAX_NODES} nodes.` };
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

/**
 * An edit returns the new tree, the key to select and a message, or why it is impossible.
 * @type {Record<string, (tree: Choices, key: string, limits?: Limits) =>
 *   { tree?: Choices, at?: string, text?: string, fault?: string }>}
 */
export const EDITS = {
  child: (tree, key, limits) => add(tree, key, 0, limits),
  next: (tree, key, limits) => key === "" ? { fault: "The root has no siblings; add a child to it." }
    : add(tree, parentOf(key), rankOf(key) + 1, limits),
  remove(tree, key) {
    if (key === "") return { fault: "The root cannot be removed: it is the last committed token." };
    const siblings = tree.childrenOf(parentOf(key)), at = siblings.indexOf(key);
    const below = tree.subtree(key).length - 1;
    return { tree: tree.without(key), at: siblings[at + 1] ?? siblings[at - 1] ?? parentOf(key),
      text: `Removed ${pathText(key)}${below ? ` and ${below} below it` : ""}` };
  },
};

/** The states that edits led to, and the index of the current one. */
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
    this.states = [...this.states.slice(0, this.place + 1), state].slice(-MAX_UNDONE);
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
export const linkOf = (tree) => tree.keys.filter((key) => !tree.childrenOf(key).length).join("_");

export function fromLink(text) {
  if (!/^\d{1,4}([._]\d{1,4})*$/.test(text) || text.length > 60_000) return null;
  const paths = text.split("_").map(pathOf);
  if (paths.some((path) => path.length > MAX_DEPTH)) return null;
  const tree = Choices.closed(paths);
  return tree.size <= MAX_NODES ? tree : null;
}

// ---- layout: one column per depth

export const COLUMN = 92, MARGIN = { x: 26, y: 44 };
const ROW = 24;

/** Items by key, and ordered by depth and slot; descendants of `collapsed` keys are left out. */
export function layoutChoices(tree, collapsed) {
  const items = new Map();
  const make = (key, parentItem) => {
    const children = collapsed.has(key) ? [] : tree.childrenOf(key);
    const folded = children.length ? 0 : tree.subtree(key).length - Number(key !== "");
    /** @type {any} */
    const item = { key, parentItem, folded };
    items.set(key, item);
    item.children = children.map((child) => make(child, item));
    return item;
  };
  const slots = placeInSlots(make("", null));
  const order = [...items.values()].sort((a, b) => a.depth - b.depth || a.slot - b.slot);
  for (const item of order) {
    item.x = MARGIN.x + item.depth * COLUMN;
    item.y = MARGIN.y + item.slot * ROW;
  }
  const { depth } = order[order.length - 1];
  return { items, order, depth, width: MARGIN.x + (depth + 1) * COLUMN,
    height: MARGIN.y + Math.max(1, slots) * ROW };
}
