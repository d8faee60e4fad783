// The exact what-if: replays every text of a rank table with a choice tree, and predicts the speed.
import { isWithin, parentOf, rankOf } from "./model.js";

/** @typedef {import("./model.js").Choices} Choices */

/**
 * A rank table as the server packs it: `ranks` is base64 of little-endian integers of `width` bytes,
 * rank + 1 per position and depth, 0 if the true token is not among the stored ranks. `chains` has the
 * steps of a lookup drafter by draft length, as measured: histograms of the accepted length (`ends`) and
 * of the tokens drafted (`drafted`).
 * @typedef {{ depths: number, num_ranks: number, positions: number, starts: number[],
 *   categories: (string | null)[], width: number, ranks: string,
 *   chains?: { length: number, category: string, ends: number[], drafted: number[] }[] }} PackedTable
 */

/**
 * The time of a step on this machine, as in `engine.tuning.latency.StepLatency`: of verification by the
 * number of rows; of drafting once per step (`start_ms`) and per level.
 * @typedef {{ verify: { rows: number[], ms: number[], context_len: number, trees: { rows: number[],
 *   star_ms: number[], level_ms: number[] } | null }, start_ms: number, level_ms: number }} Speed
 */

/** @param {PackedTable} packed */
export function unpackTable(packed) {
  const bytes = Uint8Array.from(atob(packed.ranks), (letter) => letter.charCodeAt(0));
  const { depths, categories } = packed;
  const chains = packed.chains?.length ? packed.chains : null;
  return { ranks: packed.width === 1 ? bytes : new Uint16Array(bytes.buffer), depths,
    starts: [...packed.starts, packed.positions], categories, chains, numRanks: packed.num_ranks,
    lengths: chains ? [...new Set(chains.map((row) => row.length))].sort((a, b) => a - b)
      : Array.from({ length: depths }, (_, i) => i + 1) };
}

/** @typedef {ReturnType<typeof unpackTable>} RankTable */

/**
 * Walks every text of the table, or of a category; `onStep(position, node, depth)` gets every
 * step's root position and its deepest accepted node.
 * @param {RankTable} table
 * @param {Choices} tree
 */
function walkTexts(table, tree, category, onStep) {
  const { ranks, depths, starts, categories } = table;
  // goes[node * width + rank + 1] is the child of that rank, 0 where there is none.
  const width = Math.max(0, ...tree.keys.map(rankOf)) + 2;
  const goes = new Uint16Array(tree.nodes.size * width);
  tree.keys.forEach((key, i) => {
    goes[tree.nodes.get(parentOf(key)) * width + rankOf(key) + 1] = i + 1;
  });
  for (let text = 0; text + 1 < starts.length; text += 1) {
    if (category && categories[text] !== category) continue;
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
 * Null if the table has no answer: a chain of a length that was not measured. `counts[node]`: steps whose
 * accepted path contains the node, so `counts[0]` is all steps; `sizes`: numbers of drafted nodes, each
 * with the share of the steps that drafted so many.
 */
export function replayTree(/** @type {RankTable} */ table, tree, category = "") {
  if (table.chains) return replayLookUps(table, tree, category);
  const counts = Array(tree.size + 1).fill(0), lengths = [];
  walkTexts(table, tree, category, (at, node, depth) => {
    counts[node] += 1;
    lengths[depth] = (lengths[depth] ?? 0) + 1;
  });
  for (let node = tree.size; node > 0; node -= 1) {
    counts[tree.nodes.get(parentOf(tree.keys[node - 1]))] += counts[node];
  }
  return { counts, sizes: [[tree.size, 1]], ...tally(lengths, counts[0]) };
}

function replayLookUps(table, tree, category) {
  if (!tree.isChain || !table.lengths.includes(tree.depth)) return null;
  const lengths = [], sizes = [];
  const add = (sums, counts) => counts.forEach((n, i) => { sums[i] = (sums[i] ?? 0) + n; });
  for (const row of table.chains) {
    if (row.length !== tree.depth || (category && row.category !== category)) continue;
    add(lengths, row.ends);
    add(sizes, row.drafted);
  }
  const counts = Array.from({ length: tree.size + 1 }, (_, depth) =>
    lengths.slice(depth).reduce((sum, count) => sum + (count ?? 0), 0));
  const shares = sizes.map((count, n) => [n, count / counts[0]]);
  return { counts, sizes: shares.filter(([, share]) => share), ...tally(lengths, counts[0]) };
}

/** Figures from `lengths`, the number of steps by accepted length. */
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
  const positions = [];
  if (table.chains) return positions;
  walkTexts(table, tree, category, (at, node) => {
    if (positions.length < most && isWithin(node ? tree.keys[node - 1] : "", key)) positions.push(at);
  });
  return positions;
}

// ---- prediction

/** Linear interpolation; constant before the first point, the last slope beyond the last point. */
export function interpolate(rows, ms, n) {
  if (rows.length === 1 || n <= rows[0]) return ms[0];
  const at = rows.findIndex((row) => row >= n), right = at < 0 ? rows.length - 1 : at;
  const slope = (ms[right] - ms[right - 1]) / (rows[right] - rows[right - 1]);
  return ms[right - 1] + slope * (n - rows[right - 1]);
}

/** Milliseconds of a verify forward of a tree; with recurrent layers they also depend on its depth. */
export function verifyMs({ verify: { rows, ms, trees } }, nodes, depth) {
  if (!trees || depth >= nodes) return interpolate(rows, ms, nodes + 1);
  return interpolate(trees.rows, trees.star_ms, nodes + 1)
    + (depth - 1) * interpolate(trees.rows, trees.level_ms, nodes + 1);
}

export const draftMs = ({ start_ms, level_ms }, depth) => start_ms + depth * level_ms;

/**
 * Predicted step time, tok/s and speedup; nulls if no latency was measured.
 * @param {number[][]} sizes numbers of drafted nodes, each with the share of steps that drafted so many
 */
export function predict(/** @type {Speed | null} */ speed, mat, sizes, depth) {
  if (!speed || mat === null) return { step_ms: null, tok_s: null, speedup: null, parts: null };
  const parts = { draft: draftMs(speed, depth),
    verify: sizes.reduce((sum, [n, share]) => sum + share * verifyMs(speed, n, depth), 0) };
  const step = parts.draft + parts.verify, plain = verifyMs(speed, 0, 0);
  return { step_ms: step, tok_s: 1000 * mat / step, speedup: mat * plain / step, parts };
}

/** The largest depth of recorded trees. */
export function maxDepth({ depths }) { return Math.max(0, ...depths.map(([depth]) => depth)); }

/** The prediction for recorded trees. */
export function predictDrafted(speed, { mat, counts, steps }) {
  return predict(speed, mat, counts.nodes.map(([n, count]) => [n, count / steps]),
    maxDepth(counts));
}
