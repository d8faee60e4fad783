// A choice tree as a value, edits that make new values, and their history. Nothing here draws.
//
// A path is the list of ranks from the root, [0, 1]; its key is "0.1", the root's key is "".
const MOST_NODES = 1024;
const MOST_DEPTH = 64;

const keyOf = (path) => path.join(".");
const pathOf = (key) => key === "" ? [] : key.split(".").map(Number);
const parentOf = (key) => key.slice(0, Math.max(0, key.lastIndexOf(".")));
const depthOf = (key) => key === "" ? 0 : key.split(".").length;
const rankOf = (key) => Number(key.slice(key.lastIndexOf(".") + 1));
const isWithin = (key, top) => top === "" || key === top || key.startsWith(top + ".");
const pathWords = (key) => key === "" ? "the root" : `[${key.split(".").join(", ")}]`;

function comparePaths(a, b) {
  if (a.length !== b.length) return a.length - b.length;
  const at = a.findIndex((rank, i) => rank !== b[i]);
  return at < 0 ? 0 : a[at] - b[at];
}

// Prefix-closed paths in node order: by depth, then lexicographically. paths[i] is node i + 1.
class Choices {
  constructor(paths) {
    this.paths = [...paths].sort(comparePaths);
    this.keys = this.paths.map(keyOf);
    this.nodes = new Map(this.keys.map((key, i) => [key, i + 1]));
    this.nodes.set("", 0);
    this.below = new Map([["", []]]);
    for (const key of this.keys) {
      this.below.set(key, []);
      this.below.get(parentOf(key)).push(key);
    }
    this.depth = this.paths.length ? this.paths[this.paths.length - 1].length : 0;
    this.maxRank = Math.max(0, ...this.paths.map((path) => path[path.length - 1]));
  }

  static chain(length) {
    return new Choices(Array.from({ length }, (_, i) => Array(i + 1).fill(0)));
  }

  // Every prefix of every path, once.
  static closed(paths) {
    const all = new Map();
    for (const path of paths) {
      for (let n = 1; n <= path.length; n += 1) all.set(keyOf(path.slice(0, n)), path.slice(0, n));
    }
    return new Choices([...all.values()]);
  }

  get size() { return this.paths.length; }
  get isChain() { return this.depth === this.size; }
  get leaves() { return this.keys.filter((key) => !this.below.get(key).length); }
  has(key) { return this.nodes.has(key); }
  childrenOf(key) { return this.below.get(key) ?? []; }
  subtree(top) { return this.keys.filter((key) => isWithin(key, top)); }
  equals(other) { return this.keys.join() === other.keys.join(); }
  with(key) { return new Choices([...this.paths, pathOf(key)]); }
  without(top) { return new Choices(this.paths.filter((path, i) => !isWithin(this.keys[i], top))); }
}

// What the drafter can take: { depth, ranks, what }; null = unknown.
function refuse(tree, key, limits) {
  const depth = depthOf(key), most = Math.min(MOST_DEPTH, limits?.depth ?? MOST_DEPTH);
  if (tree.size >= MOST_NODES) return `A choice tree has at most ${MOST_NODES} nodes.`;
  if (depth > most) {
    return `${pathWords(key)} would be at depth ${depth}; ${limits?.what ?? "the editor"} `
      + `drafts ${most} deep.`;
  }
  if (limits?.ranks && rankOf(key) >= limits.ranks) {
    return `${pathWords(key)} would need rank ${rankOf(key)}; ${limits.what} offers ranks 0 to `
      + `${limits.ranks - 1}.`;
  }
  return null;
}

function lowestFree(tree, parent, from) {
  const taken = new Set(tree.childrenOf(parent).map(rankOf));
  let rank = from;
  while (taken.has(rank)) rank += 1;
  return parent === "" ? String(rank) : `${parent}.${rank}`;
}

// Edits give { tree, at, words } or { fault }; `at` is the key to go to.
const EDITS = {
  child(tree, key, limits) {
    const made = lowestFree(tree, key, 0);
    const fault = refuse(tree, made, limits);
    return fault ? { fault } : { tree: tree.with(made), at: made, words: `Added ${pathWords(made)}` };
  },
  next(tree, key, limits) {
    if (key === "") return { fault: "The root has no other rank; add a child to it." };
    const made = lowestFree(tree, parentOf(key), rankOf(key) + 1);
    const fault = refuse(tree, made, limits);
    return fault ? { fault } : { tree: tree.with(made), at: made, words: `Added ${pathWords(made)}` };
  },
  remove(tree, key) {
    if (key === "") return { fault: "The root stays: it is the last committed token." };
    const siblings = tree.childrenOf(parentOf(key));
    const at = siblings.indexOf(key);
    const gone = tree.subtree(key).length;
    const more = gone > 1 ? ` and ${gone - 1} below it` : "";
    return { tree: tree.without(key), at: siblings[at + 1] ?? siblings[at - 1] ?? parentOf(key),
      words: `Removed ${pathWords(key)}${more}` };
  },
};

class EditHistory {
  constructor(state) { this.reset(state); }
  reset(state) { this.past = []; this.now = state; this.future = []; }
  push(state) {
    this.past.push(this.now);
    if (this.past.length > 500) this.past.shift();
    this.now = state;
    this.future = [];
  }
  undo() {
    if (!this.past.length) return false;
    this.future.push(this.now);
    this.now = this.past.pop();
    return true;
  }
  redo() {
    if (!this.future.length) return false;
    this.past.push(this.now);
    this.now = this.future.pop();
    return true;
  }
}

// A link's short form lists the leaves: "0.0.0.0_0.1.0_1.0_1.1".
const linkOf = (tree) => tree.leaves.join("_");
function fromLink(text) {
  if (!/^\d{1,4}([._]\d{1,4})*$/.test(text) || text.length > 60_000) return null;
  const paths = text.split("_").map(pathOf);
  if (paths.some((path) => path.length > MOST_DEPTH)) return null;
  const tree = Choices.closed(paths);
  return tree.size <= MOST_NODES ? tree : null;
}
