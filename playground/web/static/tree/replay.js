// The exact what-if: walks every text of a rank table with a choice tree, and predicts its speed.
import { isWithin, parentOf, rankOf } from "./model.js";

/** @typedef {import("./model.js").Choices} Choices */
/** @typedef {[number, number][]} Points */

/**
 * A rank table as the server packs it: `ranks` is base64 of little-endian integers of `width` bytes,
 * rank + 1 per position and depth, 0 where the true token was not among the ranks kept. `chains` are
 * the steps that a drafter which looks up made while measuring, for one draft length: by the length
 * accepted (`ends`) and by the tokens drafted.
 * @typedef {{ depths: number, num_ranks: number, positions: number, starts: number[],
 *   categories: (string | null)[], width: number, ranks: string,
 *   chains?: { length: number, category: string, ends: number[], drafted: number[] }[] }} PackedTable
 */

/**
 * `counts[node]`: steps whose accepted path goes through the node; `counts[0]` is every step.
 * `sizes`: drafted nodes, and the share of the steps that drafted so many.
 * @typedef {{ counts: number[], sizes: Points, numSteps: number, numAccepted: number,
 *   mat: number | null, rates: number[] }} Replay
 */

/**
 * What a step takes on this machine: by its rows, and of a draft once and by level.
 * @typedef {{ verify: Points, trees: { star: Points, level: Points } | null, start_ms: number,
 *   level_ms: number, text: string }} Speed
 */

/** @param {PackedTable} packed */
export function unpackTable(packed) {
  const bytes = Uint8Array.from(atob(packed.ranks), (letter) => letter.charCodeAt(0));
  const { depths, positions, categories } = packed;
  const chains = packed.chains?.length ? packed.chains : null;
  return { ranks: packed.width === 1 ? bytes : new Uint16Array(bytes.buffer), depths, positions,
    starts: [...packed.starts, positions], categories, chains, numRanks: packed.num_ranks,
    lengths: chains ? [...new Set(chains.map((row) => row.length))].sort((a, b) => a - b)
      : Array.from({ length: depths }, (_, i) => i + 1) };
}

/** @typedef {ReturnType<typeof unpackTable>} RankTable */

/**
 * Walks every text of the table, or of a category.
 * @param {RankTable} table
 * @param {Choices} tree
 * @param {string | null} category
 * @param {(position: number, node: number, depth: number) => void} onStep is told of
 *   every step's root position and deepest accepted node
 */
function walkTexts(table, tree, category, onStep) {
  const { ranks, depths, starts, categories } = table;
  // goes[node * width + rank + 1] is the child of that rank, 0 where there is none.
  const width = tree.maxRank + 2, goes = new Uint16Array((tree.size + 1) * width);
  tree.keys.forEach((key, i) => {
    goes[tree.nodeOf(parentOf(key)) * width + rankOf(key) + 1] = i + 1;
  });
  for (let text = 0; text + 1 < starts.length; text += 1) {
    if (category !== null && categories[text] !== category) continue;
    let at = starts[text];
    while (at < starts[text + 1]) {
      let node = 0, depth = 0;
      while (depth < depths) {
        const rank = ranks[at * depths + depth];
        const child = rank === 0 || rank >= width ? 0 : goes[node * width + rank];
        if (child === 0) break;
        node = child;
        depth += 1;
      }
      onStep(at, node, depth);
      at += depth + 1;
    }
  }
}

/**
 * Null where the table cannot tell: a chain of a length that was not tried.
 * @type {(table: RankTable, tree: Choices, category?: string | null) => Replay | null}
 */
export function replayTree(table, tree, category = null) {
  if (table.chains) return replayLookUps(table, tree, category);
  const counts = Array(tree.size + 1).fill(0), lengths = [];
  walkTexts(table, tree, category, (at, node, depth) => {
    counts[node] += 1;
    lengths[depth] = (lengths[depth] ?? 0) + 1;
  });
  for (let node = tree.size; node > 0; node -= 1) {
    counts[tree.nodeOf(parentOf(tree.keys[node - 1]))] += counts[node];
  }
  return { counts, sizes: [[tree.size, 1]], ...tally(lengths, counts[0]) };
}

/** @returns {Replay | null} */
function replayLookUps(table, tree, category) {
  if (!tree.isChain || !table.lengths.includes(tree.depth)) return null;
  const lengths = [], sizes = [];
  const add = (sums, counts) => counts.forEach((n, i) => { sums[i] = (sums[i] ?? 0) + n; });
  for (const row of table.chains) {
    if (row.length !== tree.depth || (category !== null && row.category !== category)) continue;
    add(lengths, row.ends);
    add(sizes, row.drafted);
  }
  const counts = Array.from({ length: tree.size + 1 }, (_, depth) =>
    lengths.slice(depth).reduce((sum, count) => sum + (count ?? 0), 0));
  /** @type {Points} */
  const shares = sizes.map((count, n) => [n, count / counts[0]]);
  return { counts, sizes: shares.filter(([, share]) => share), ...tally(lengths, counts[0]) };
}

/** @param {number[]} lengths steps by the length accepted */
function tally(lengths, numSteps) {
  let numAccepted = 0;
  const rates = [];
  for (let depth = lengths.length - 1, reached = 0; depth > 0; depth -= 1) {
    reached += lengths[depth] ?? 0;
    numAccepted += depth * (lengths[depth] ?? 0);
    rates[depth - 1] = reached / numSteps;
  }
  return { numSteps, numAccepted, mat: numSteps ? 1 + numAccepted / numSteps : null, rates };
}

/** Root positions of the first `most` steps that accepted the node. */
export function stepsThrough(table, tree, key, most, category) {
  const found = [];
  if (table.chains) return found;
  walkTexts(table, tree, category, (at, node) => {
    if (found.length < most && isWithin(node ? tree.keys[node - 1] : "", key)) found.push(at);
  });
  return found;
}

// ---- prediction

/** @type {(points: Points, n: number) => number} */
export function curveAt(points, n) {
  if (points.length === 1 || n <= points[0][0]) return points[0][1];
  const right = points.findIndex(([rows]) => rows >= n);
  const end = right < 1 ? points.length - 1 : right;
  const [[r0, m0], [r1, m1]] = [points[end - 1], points[end]];
  return m0 + (m1 - m0) / (r1 - r0) * (n - r0);
}

/**
 * A verify forward of so many nodes beside the root; recurrent layers read a tree by its depth too.
 * @type {(speed: Speed, nodes: number, depth: number) => number}
 */
export function verifyMs({ verify, trees }, nodes, depth) {
  if (!trees || depth >= nodes) return curveAt(verify, nodes + 1);
  return curveAt(trees.star, nodes + 1) + (depth - 1) * curveAt(trees.level, nodes + 1);
}

/** @type {(speed: Speed, depth: number) => number} */
export function draftMs({ start_ms, level_ms }, depth) { return start_ms + depth * level_ms; }

/**
 * What a step takes and what that comes to; nulls while nothing is measured.
 * @param {Speed | null} speed
 * @param {number | null} mat
 * @param {Points} sizes drafted nodes, and the share of the steps that drafted so many
 * @param {number} depth of the deepest node
 */
export function predict(speed, mat, sizes, depth) {
  if (!speed || mat === null) return { step_ms: null, tok_s: null, speedup: null, parts: null };
  const parts = { draft: draftMs(speed, depth),
    verify: sizes.reduce((sum, [n, share]) => sum + share * verifyMs(speed, n, depth), 0) };
  const step = parts.draft + parts.verify, plain = curveAt(speed.verify, 1);
  return { step_ms: step, tok_s: 1000 * mat / step, speedup: mat * plain / step, parts };
}

/** Depth of the deepest of the trees that a drafter grew. */
export function deepest({ depths }) { return Math.max(0, ...depths.map(([depth]) => depth)); }

/** The prediction for trees that a drafter grew, whose sizes were counted. */
export function predictDrafted(speed, { mat, counts, steps }) {
  return predict(speed, mat, counts.nodes.map(([n, count]) => [n, count / steps]),
    deepest(counts));
}
