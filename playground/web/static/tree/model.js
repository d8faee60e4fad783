// A choice tree as a value, edits that make new values, their history, and where the nodes go.
// Nothing here draws.
//
// A path is the list of ranks from the root, [0, 1]; its key is "0.1", the root's key is "".

/** @typedef {{ depth?: number | null, ranks?: number | null, what: string }} Limits of a drafter */

const MOST_NODES = 1024;
export const MOST_DEPTH = 64;
const MOST_UNDONE = 500;

/** @type {(path: number[]) => string} */
export const keyOf = (path) => path.join(".");
/** @type {(key: string) => number[]} */
const pathOf = (key) => key === "" ? [] : key.split(".").map(Number);
/** @type {(key: string) => string} */
export const parentOf = (key) => key.slice(0, Math.max(0, key.lastIndexOf(".")));
/** @type {(key: string) => number} */
export const depthOf = (key) => key === "" ? 0 : key.split(".").length;
/** @type {(key: string) => number} */
export const rankOf = (key) => Number(key.slice(key.lastIndexOf(".") + 1));
/** @type {(key: string, top: string) => boolean} */
export const isWithin = (key, top) => top === "" || key === top || key.startsWith(top + ".");
/** @type {(key: string) => string} */
export const pathText = (key) => key === "" ? "the root" : `[${key.split(".").join(", ")}]`;

/** @type {(a: number[], b: number[]) => number} */
function comparePaths(a, b) {
  if (a.length !== b.length) return a.length - b.length;
  const at = a.findIndex((rank, i) => rank !== b[i]);
  return at < 0 ? 0 : a[at] - b[at];
}

/** Prefix-closed paths in node order: by depth, then lexicographically. paths[i] is node i + 1. */
export class Choices {
  /** @param {number[][]} paths */
  constructor(paths) {
    this.paths = [...paths].sort(comparePaths);
    this.keys = this.paths.map(keyOf);
    /** @type {Map<string, number>} */
    this.nodes = new Map(["", ...this.keys].map((key, i) => [key, i]));
    /** @type {Map<string, string[]>} */
    this.below = new Map(["", ...this.keys].map((key) => [key, []]));
    for (const key of this.keys) this.childrenOf(parentOf(key)).push(key);
    this.depth = this.paths.length ? this.paths[this.paths.length - 1].length : 0;
    this.maxRank = Math.max(0, ...this.paths.map((path) => path[path.length - 1]));
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
    const all = new Map();
    for (const path of paths) {
      for (let n = 1; n <= path.length; n += 1) all.set(keyOf(path.slice(0, n)), path.slice(0, n));
    }
    return new Choices([...all.values()]);
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
  /** @param {string} key */
  with(key) { return new Choices([...this.paths, pathOf(key)]); }
  /** @param {string} top */
  without(top) { return new Choices(this.paths.filter((path, i) => !isWithin(this.keys[i], top))); }
}

/**
 * Why a node cannot be added.
 * @type {(tree: Choices, key: string, limits?: Limits) => string | null}
 */
function refuse(tree, key, limits) {
  const depth = depthOf(key), most = Math.min(MOST_DEPTH, limits?.depth ?? MOST_DEPTH);
  if (tree.size >= MOST_NODES) return `A choice tree has at most ${MOST_NODES} nodes.`;
  if (depth > most) {
    return `${pathText(key)} would be at depth ${depth}; ${limits?.what ?? "the editor"} `
      + `drafts ${most} deep.`;
  }
  if (limits?.ranks && rankOf(key) >= limits.ranks) {
    return `${pathText(key)} would need rank ${rankOf(key)}; ${limits.what} offers ranks 0 to `
      + `${limits.ranks - 1}.`;
  }
  return null;
}

/**
 * What an edit gives: the tree, the key to go to and what to say, or why it cannot be.
 * @typedef {{ tree: Choices, at: string, words: string, fault?: undefined } | { fault: string }} Edit
 */

/**
 * Adds the lowest free rank below a parent, from one on.
 * @type {(tree: Choices, parent: string, from: number, limits?: Limits) => Edit}
 */
function add(tree, parent, from, limits) {
  const taken = new Set(tree.childrenOf(parent).map(rankOf));
  let rank = from;
  while (taken.has(rank)) rank += 1;
  const made = keyOf([...pathOf(parent), rank]);
  const fault = refuse(tree, made, limits);
  return fault ? { fault } : { tree: tree.with(made), at: made, words: `Added ${pathText(made)}` };
}

/** @type {Record<string, (tree: Choices, key: string, limits?: Limits) => Edit>} */
export const EDITS = {
  child: (tree, key, limits) => add(tree, key, 0, limits),
  next: (tree, key, limits) => key === ""
    ? { fault: "The root has no other rank; add a child to it." }
    : add(tree, parentOf(key), rankOf(key) + 1, limits),
  remove(tree, key) {
    if (key === "") return { fault: "The root stays: it is the last committed token." };
    const siblings = tree.childrenOf(parentOf(key)), at = siblings.indexOf(key);
    const below = tree.subtree(key).length - 1;
    return { tree: tree.without(key), at: siblings[at + 1] ?? siblings[at - 1] ?? parentOf(key),
      words: `Removed ${pathText(key)}${below ? ` and ${below} below it` : ""}` };
  },
};

/** @template State */
export class EditHistory {
  /** @param {State} state */
  constructor(state) {
    this.now = state;
    /** @type {State[]} */
    this.past = [];
    /** @type {State[]} */
    this.future = [];
  }
  /** @param {State} state */
  reset(state) { Object.assign(this, new EditHistory(state)); }
  /** @param {State} state */
  push(state) {
    this.past = [...this.past.slice(-MOST_UNDONE), this.now];
    this.now = state;
    this.future = [];
  }
  undo() { return this.move(this.past, this.future); }
  redo() { return this.move(this.future, this.past); }
  /** @type {(from: State[], to: State[]) => boolean} whether there was anything to go to */
  move(from, to) {
    const state = from.pop();
    if (state === undefined) return false;
    to.push(this.now);
    this.now = state;
    return true;
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

/** @typedef {"left" | "top"} Root where the root is */
/** @typedef {{ key: string, depth: number, folded: number, slot: number, x: number, y: number }} Item */
/** @typedef {{ items: Map<string, Item>, order: Item[], depth: number, width: number,
 *   height: number }} Layout */

/**
 * @param {Choices} tree
 * @param {Set<string>} collapsed keys whose subtree is folded away
 * @param {Root} root
 * @returns {Layout}
 */
export function layoutChoices(tree, collapsed, root) {
  /** @type {Map<string, Item>} */
  const items = new Map();
  let slot = 0;
  /** @type {(key: string, depth: number) => Item} */
  const place = (key, depth) => {
    const below = collapsed.has(key) ? [] : tree.childrenOf(key);
    const folded = below.length ? 0 : tree.subtree(key).length - Number(key !== "");
    /** @type {Item} */
    const item = { key, depth, folded, slot: 0, x: 0, y: 0 };
    items.set(key, item);
    const placed = below.map((child) => place(child, depth + 1));
    item.slot = placed.length ? (placed[0].slot + placed[placed.length - 1].slot) / 2 : slot++;
    return item;
  };
  place("", 0);
  const depth = Math.max(...[...items.values()].map((item) => item.depth));
  const { x: left, y: top } = MARGIN[root];
  for (const item of items.values()) {
    const along = item.depth * ALONG[root], across = item.slot * ACROSS[root];
    item.x = left + (root === "left" ? along : across);
    item.y = top + (root === "left" ? across : along);
  }
  const long = (depth + 1) * ALONG[root], wide = Math.max(1, slot) * ACROSS[root];
  return { items, depth,
    order: [...items.values()].sort((a, b) => a.depth - b.depth || a.slot - b.slot),
    width: root === "left" ? left + long : left + wide + 8,
    height: root === "left" ? top + wide : top + long - 20 };
}

/**
 * The node that an arrow key leads to.
 * @type {(layout: Layout, key: string, arrow: string, root: Root) => string | undefined}
 */
export function neighbour(layout, key, arrow, root) {
  /** @type {Record<string, string>} */
  const turned = { ArrowUp: "ArrowLeft", ArrowLeft: "ArrowUp", ArrowDown: "ArrowRight",
    ArrowRight: "ArrowDown" };
  const item = layout.items.get(key);
  if (!item) return undefined;
  const level = layout.order.filter((other) => other.depth === item.depth);
  const at = level.indexOf(item);
  const way = root === "left" ? arrow : turned[arrow];
  if (way === "ArrowLeft") return key === "" ? undefined : parentOf(key);
  if (way === "ArrowRight") return layout.order.find((other) => parentOf(other.key) === key
    && other.depth === item.depth + 1)?.key;
  return level[at + (way === "ArrowUp" ? -1 : 1)]?.key;
}
