// What the tree in the editor is worth: exact replay figures and the prediction. Needs dom.js.
//
// speed: { verify, other: [[rows, ms], …], draft: { start_ms, points: [[rows, ms], …] }, levels, words },
// measured on this machine; `levels` says how a tree's levels count, see `levelsOf`.
const TREE_FIGURES = [
  ["mat", "MAT", (f) => number(f.mat, 3),
    "1 + accepted draft tokens / steps, replayed over every position of the table: exact for greedy"],
  ["tok_s", "predicted tok/s", (f) => number(f.tok_s, 1),
    "1000 · MAT / (draft ms + verify ms(nodes + 1) + other ms), times measured on this machine"],
  ["speedup", "× plain", (f) => f.speedup ? `${number(f.speedup, 2)}×` : DASH,
    "predicted tok/s / plain decoding's 1000 / (verify ms(1) + other ms(1))"],
  ["step_ms", "step", (f) => duration(f.step_ms ?? NaN),
    "draft ms + verify ms(nodes + 1) + other ms: drafting, one forward, the loop's own work"],
  ["nodes", "nodes / depth", (f) => `${f.nodes} / ${f.depth}`,
    "drafted nodes, root excluded / longest path"],
  ["steps", "steps / tokens", (f) => f.steps === null ? DASH : `${f.steps} / ${f.tokens}`,
    "steps that the tree needs for the table's texts / tokens that they commit; a last step may go "
    + "beyond the end of its text"],
];

function curveAt(points, n) {
  if (points.length === 1 || n <= points[0][0]) return points[0][1];
  const right = points.findIndex(([rows]) => rows >= n);
  const end = right < 1 ? points.length - 1 : right;
  const [[r0, m0], [r1, m1]] = [points[end - 1], points[end]];
  return m0 + (m1 - m0) / (r1 - r0) * (n - r0);
}

// Rows that the drafting network runs per level: one per depth, or the nodes that have children.
function levelsOf(tree, kind) {
  if (kind === "none") return [];
  const rows = Array(tree.depth).fill(kind === "depth" ? 1 : 0);
  if (kind === "expanded") {
    for (const key of ["", ...tree.keys]) if (tree.childrenOf(key).length) rows[depthOf(key)] += 1;
  }
  return rows;
}

function draftMs(draft, levels) {
  if (!draft.points.length) return draft.start_ms;
  return draft.start_ms + levels.reduce((sum, rows) => sum + curveAt(draft.points, rows), 0);
}

// levels: rows per level of the draft; sizes: [[drafted nodes, share of the steps], …].
// Gives { step_ms, tok_s, speedup, parts }, or nulls while nothing is measured.
function predict(speed, mat, levels, sizes) {
  if (!speed || mat === null) return { step_ms: null, tok_s: null, speedup: null, parts: null };
  const mean = (points) => sizes.reduce((sum, [n, share]) => sum + share * curveAt(points, n + 1), 0);
  const parts = { draft: draftMs(speed.draft, levels), verify: mean(speed.verify),
    other: mean(speed.other) };
  const step = parts.draft + parts.verify + parts.other;
  const plain = curveAt(speed.verify, 1) + curveAt(speed.other, 1);
  return { step_ms: step, tok_s: 1000 * mat / step, speedup: mat * plain / step, parts };
}

class TreeFigures {
  constructor() {
    this.values = new Map();
    this.host = h("div", { class: "figures" }, ...TREE_FIGURES.map(([key, title, , formula]) => {
      const value = h("span", { class: "value", "data-figure": key }, DASH);
      const was = h("span", { class: "was" });
      this.values.set(key, { value, was });
      return h("div", { class: "figure", tabindex: "0", "aria-label": `${title}: ${formula}` },
        h("span", { class: "pair" }, value, was), h("span", { class: "name" }, title),
        h("span", { class: "formula" }, formula));
    }));
  }

  // before: the figures to compare with, or null.
  show(figures, before) {
    for (const [key, , format] of TREE_FIGURES) {
      const { value, was } = this.values.get(key);
      const text = format(figures);
      if (value.textContent !== text) value.textContent = text;
      const [words, mood] = before && (key === "mat" || key === "tok_s")
        ? difference(figures[key], before[key], key === "mat" ? 3 : 1) : ["", ""];
      if (was.textContent !== words) was.textContent = words;
      if (was.dataset.mood !== mood) was.dataset.mood = mood;
    }
  }
}

function difference(now, then, digits) {
  if (!Number.isFinite(now) || !Number.isFinite(then)) return ["", ""];
  const by = now - then;
  if (Math.abs(by) < 0.5 * 10 ** -digits) return ["", ""];
  return [`${by > 0 ? "+" : "\u2212"}${Math.abs(by).toFixed(digits)}`, by > 0 ? "better" : "worse"];
}
