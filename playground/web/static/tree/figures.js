// The figures of the tree in the editor, and of each of its nodes.
import { DASH, duration, figure, h, number, percent, plural, speedup, visible } from "../kit.js";
import { depthOf, keyOf, parentOf, pathText, rankOf } from "./model.js";
import { debounced, latest } from "./parts.js";
import { maxDepth, predictDrafted } from "./replay.js";

/**
 * Value as text; digits if the difference to the opened tree is shown.
 * @type {Record<string, [(figures: any) => string, number?]>}
 */
const NOTATION = {
  mat: [(f) => number(f.mat, 3), 3],
  tok_s: [(f) => number(f.tok_s, 1), 1],
  speedup: [(f) => speedup(f.speedup)],
  step_ms: [(f) => duration(f.step_ms ?? NaN)],
  nodes: [(f) => `${f.nodes} / ${f.depth}`],
  steps: [(f) => f.steps === null ? DASH : `${f.steps} / ${f.tokens}`],
};
const NAMES = Object.keys(NOTATION);

export class TreeFigures {
  /** @param {Record<string, [string, string]>} figures title and formula of each */
  constructor(host, figures) {
    this.values = NAMES.map((name) => ({ was: h("span", { class: "was" }),
      value: h("span", { class: "value", "data-figure": name }, DASH) }));
    host.append(...NAMES.map((name, i) => figure(figures[name][1],
      h("span", { class: "pair" }, this.values[i].value, this.values[i].was), figures[name][0])));
  }

  // before: figures to compare with, or null.
  show(figures, before) {
    NAMES.forEach((name, i) => {
      const [format, digits] = NOTATION[name], { value, was } = this.values[i], now = figures[name], then = before?.[name];
      value.textContent = format(figures);
      const by = digits && Number.isFinite(now) && Number.isFinite(then) ? now - then : 0;
      const shown = digits && Math.abs(by) >= 0.5 * 10 ** -digits;
      was.textContent = shown ? `${by > 0 ? "+" : "\u2212"}${Math.abs(by).toFixed(digits)}` : "";
      was.dataset.mood = by > 0 ? "better" : "worse";
    });
  }
}

// The facts of a node by its key: { size, share, label, text, known }.
export function factsOf(tree, replay, table) {
  const steps = replay?.numSteps ?? 0;
  return (key) => {
    const place = key === "" ? "root, the last committed token"
      : `${pathText(key)}, depth ${depthOf(key)}, rank ${rankOf(key)}`;
    const node = tree.nodes.get(key), fact = { size: 0.5, share: 0, label: "", text: place };
    if (node === undefined) return { ...fact, size: 0.3, text: `${place}, proposed`, known: true };
    if (!steps) return { ...fact, known: false };
    if (node === 0) {
      const text = `${place}; ${plural(steps, "step")} replayed`;
      return { ...fact, size: 1, share: 1, text, known: true };
    }
    const known = Boolean(table.chains)
      || (depthOf(key) <= table.depths && rankOf(key) < table.numRanks);
    const count = replay.counts[node], tries = replay.counts[tree.nodes.get(parentOf(key))];
    const share = count / steps, chance = tries ? count / tries : 0;
    return { size: Math.sqrt(share), share, known, label: known ? percent(chance) : "?",
      text: `${place}: tried ${plural(tries, "time")}, accepted ${count} `
        + `(${fine(chance)} of tries, ${fine(share)} of steps)` };
  };
}

// Figures of recorded trees, as the editor's `figuresOf` returns them.
export function draftedFigures(drafted, speed) {
  const { mat, rates, nodes, steps, tokens, counts } = drafted, depth = maxDepth(counts);
  return { replay: null, mat, rates, nodes: Math.round(10 * nodes) / 10, depth, steps, tokens,
    ...predictDrafted(speed, drafted) };
}

export function draftedFacts({ paths, steps }) {
  const counts = new Map(paths.map(([path, ...drafted]) => [keyOf(path), drafted]));
  counts.set("", [steps, steps]);
  return (key) => {
    const [drafted, accepted] = counts.get(key) ?? [0, 0];
    const share = drafted / steps, chance = drafted ? accepted / drafted : 0;
    const text = key === "" ? `root; ${plural(steps, "tree")} drafted`
      : `${pathText(key)}: drafted in ${fine(share)} of the steps, accepted in ${fine(chance)} of those`;
    return { size: Math.sqrt(share), share, known: true, text, label: key ? percent(chance) : "" };
  };
}

const fine = (share) =>
  share > 0 && share < 0.1 ? `${number(100 * share, 1)}%` : percent(share);

const EXAMPLE_AFTER_MS = 140;

// The facts of the node under the pointer or with the focus.
export class NodeInfo {
  /** @type {string | null} */ key = null;

  // example(key) → promise of { before, tokens: [..] } or null.
  constructor(parts, example) {
    this.parts = parts;
    const newestExample = latest();
    this.fetch = debounced(async () => {
      const { key } = this, answer = await newestExample(example(key));
      if (key === this.key) parts.example.replaceChildren(...(answer ? quote(answer) : []));
    }, EXAMPLE_AFTER_MS);
  }

  show(key, text, loss) {
    this.parts.facts.textContent = text;
    this.parts.loss.textContent = loss;
    if (key !== this.key) this.parts.example.replaceChildren();
    this.key = key;
    this.fetch();
  }
}

function quote({ before, tokens }) {
  const marked = tokens.map((token, i) =>
    h("b", { class: i === tokens.length - 1 ? "last" : "" }, visible(token)));
  return ["for example ", h("q", {}, visible(before), ...marked)];
}
