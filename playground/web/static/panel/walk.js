// One step played back from its record: guess, mask, verify, accept, commit, and what a chain of as
// many drafts would have accepted. A sentence for each picture.
import {
  actionButton, h, plural, probability, s, speedMenu, textButton, visible, wantsStill,
} from "../kit.js";
import { sees } from "../mask.js";

const PACE_MS = 3200;
const MAX_LEVELS = 3, MAX_NAMED = 3, MATRIX_PX = 132, MIN_CELL = 2, MAX_CELL = 9;

/**
 * A picture: nodes down to `depth` are drafted; `row`: the highlighted row of the mask; `probs`: whether
 * the target's probabilities are known; `judged`: number of nodes accepted so far; `rejected`: whether the
 * nodes after the accepted path are rejected already.
 * @typedef {{ text: string, depth: number, row: number | null, probs: boolean, judged: number,
 *   rejected: boolean, committed: boolean }} Frame
 */

const quoted = (label) => `\u201c${visible(label)}\u201d`;

function quotedTokens(step, nodes) {
  const some = nodes.slice(0, MAX_NAMED).map((node) => {
    const prob = step.draft_probs[node];
    return quoted(step.token_texts[node]) + (prob === null ? "" : ` (${probability(prob)})`);
  });
  return some.join(", ") + (nodes.length > MAX_NAMED ? " \u2026" : "");
}

const childrenOf = (step, node) => step.parents.flatMap((parent, at) => at && parent === node ? [at] : []);

/** Length of the path of the drafter's first choices, and how many of them were accepted. */
export function firstChoices(step) {
  const accepted = new Set(step.accepted);
  let node = 0, length = 0, kept = 0;
  for (;;) {
    const children = childrenOf(step, node);
    if (!children.length) return { length, kept };
    node = children.reduce((a, b) => (step.ranks[b] ?? 0) < (step.ranks[a] ?? 0) ? b : a);
    if (accepted.has(node) && kept === length) kept += 1;
    length += 1;
  }
}

function chainAgainstTree(step) {
  const drafts = plural(step.parents.length - 1, "draft");
  if (new Set(step.parents).size === step.parents.length) {
    return "This draft is a chain: it ends at its first wrong token. A tree spends some of the rows on second "
      + "and third guesses; the Tree page shows when that accepts more.";
  }
  const { length, kept } = firstChoices(step), tree = step.accepted.length;
  const turn = step.accepted.find((node) => node !== 0
    && childrenOf(step, step.parents[node]).some((other) => (step.ranks[other] ?? 0) < (step.ranks[node] ?? 0)));
  if (kept < tree && turn !== undefined) {
    return `Chain against tree: a chain of ${drafts} has the drafter's first choices only. It would have `
      + `kept ${kept} here, the tree kept ${tree}: it had ${quoted(step.token_texts[turn])}, choice `
      + `${(step.ranks[turn] ?? 0) + 1} of the drafter, as well.`;
  }
  if (kept === length) {
    return `Chain against tree: every accepted token was the drafter's first choice, down to the end of `
      + `its path. A chain of ${drafts} would have kept at least these ${kept}, and perhaps more.`;
  }
  return `Chain against tree: the drafter's first choices were right ${kept} times and then wrong, and no `
    + "other draft was right: a chain would have done as well here.";
}

function acceptanceText(step, node, sampled) {
  const label = quoted(step.token_texts[node]), parent = quoted(step.token_texts[step.parents[node]]);
  const target = probability(step.target_probs[node]), draft = step.draft_probs[node];
  const others = childrenOf(step, step.parents[node]).length - 1;
  const rest = others ? ` The ${others === 1 ? "other guess" : `${others} other guesses`} for this position, `
    + "and all nodes below, are rejected." : "";
  if (!sampled) return `After ${parent} the target's own choice is ${label}, and it was drafted: accepted.${rest}`;
  return `${label}: the target gives it ${target}${draft === null ? "" : `, the drafter gave it ${probability(draft)}`}. `
    + `The draw accepts it.${rest}`;
}

function rejectionText(step, sampled) {
  const last = step.accepted.at(-1) ?? 0, parent = quoted(step.token_texts[last]);
  const wrong = childrenOf(step, last), bonus = quoted(step.bonus_text);
  if (!wrong.length) {
    return `The path is accepted to its end. The target's row after ${parent} has been computed, too: its `
      + `token ${bonus} is a bonus at no extra cost.`;
  }
  const guesses = quotedTokens(step, wrong);
  if (!sampled) {
    return `After ${parent} the target's own choice is ${bonus}; drafted ${wrong.length > 1 ? "were" : "was"} ${guesses}: rejected, and all `
      + `below ${wrong.length > 1 ? "them" : "it"}. The target's token takes the place.`;
  }
  return `The draws reject ${guesses}. ${bonus} is drawn from the residual, the part of the target's probabilities `
    + "above the drafter's, rescaled: so the text follows the target's distribution exactly.";
}

/**
 * The pictures of a step, in order.
 * @param {import("./draft_tree.js").Step} step
 * @param {boolean} sampled whether the run drew at random
 */
export function framesOf(step, sampled) {
  const depths = [0], root = quoted(step.token_texts[0]);
  for (const parent of step.parents.slice(1)) depths.push(depths[parent] + 1);
  const deepest = Math.max(...depths);
  /** @type {Frame[]} */
  const frames = [{ depth: 0, row: null, probs: false, judged: 0, rejected: false, committed: false,
    text: `The root ${root} is the last token of the text so far. The step begins after it.` }];
  const add = (text, changes = {}) =>
    frames.push({ ...frames[frames.length - 1], row: null, text, ...changes });
  const level = (depth) => depths.flatMap((own, node) => own === depth ? [node] : []);
  for (let depth = 1; depth <= Math.min(deepest, MAX_LEVELS); depth += 1) {
    const nodes = level(depth);
    add(depth === 1
      ? `The drafter guesses the next token: ${quotedTokens(step, nodes)}${nodes.length > 1
        ? `, ${nodes.length} guesses for one place` : ""}.`
      : `Depth ${depth}: ${nodes.length === 1 ? "1 guess, after the one that it continues"
        : `${nodes.length} guesses, each after the one that it continues`}.`,
    { depth });
  }
  if (deepest > MAX_LEVELS) {
    add(`And so on, down to depth ${deepest}: ${plural(step.parents.length - 1, "draft token")} in all.`,
      { depth: deepest });
  }
  if (deepest) {
    const siblings = (node) => childrenOf(step, step.parents[node]).filter((other) => other !== node);
    const seen = step.accepted.findLast((node) => siblings(node).length) ?? step.accepted.at(-1)
      ?? level(deepest).find((node) => siblings(node).length) ?? level(deepest)[0];
    add(`Every node is a row of one forward. The row of ${quoted(step.token_texts[seen])} sees the text so far, `
      + "its own ancestors and itself, as if its path were the text.", { row: seen });
    const [sibling] = siblings(seen);
    if (sibling) {
      add(`${quoted(step.token_texts[sibling])} is another guess for the same position. It must not see `
        + `${quoted(step.token_texts[seen])}: only one of them can be the text.`, { row: sibling });
    }
    add(`One forward of the target reads all ${step.parents.length} rows at once and gives the `
      + "probability of every draft after its own path.", { probs: true });
    step.accepted.forEach((node, i) => add(acceptanceText(step, node, sampled), { judged: i + 1 }));
    add(rejectionText(step, sampled), { rejected: true });
  } else add("Nothing was drafted: the target reads the root alone.", { probs: true, rejected: true });
  const count = step.accepted.length + 1, kept = Math.min(count, step.num_committed ?? count);
  add(kept < count
    ? `The text ends here: of ${plural(count, "token")}, the first ${kept === 1 ? "one is" : `${kept} are`} committed.`
    : `Committed: ${plural(count - 1, "accepted draft")} and the target's own ${quoted(step.bonus_text)}, `
      + `${plural(count, "token")} in one step where plain decoding writes one. `
      + `${quoted(step.bonus_text)} is the next root.`, { committed: true });
  if (deepest) add(chainAgainstTree(step));
  return frames;
}

/** The mask of a step as a picture with one row highlighted. */
function matrix(mask, row) {
  const count = mask.length, cell = Math.min(MAX_CELL, Math.max(MIN_CELL, Math.floor(MATRIX_PX / count)));
  const side = count * cell, all = [...Array(count).keys()];
  const cells = (rows) => rows.flatMap((r) => all.filter((c) => sees(mask[r], c))
    .map((c) => `M${c * cell},${r * cell}h${cell - 0.6}v${cell - 0.6}h${0.6 - cell}z`)).join("");
  return s("svg", { width: side, height: side, class: "walk-mask", role: "img",
    "aria-label": `attention mask, row ${row} lit` },
  s("rect", { class: "no", width: side, height: side }), s("path", { class: "yes", d: cells(all) }),
  s("rect", { class: "lit-row", x: 0, y: row * cell, width: side, height: cell }),
  s("path", { class: "own", d: cells([row]) }));
}

/** Plays the frames of a step. */
export class Walk {
  /** @param {import("./draft_tree.js").StepTree} tree */
  constructor(tree) {
    this.tree = tree;
    this.frames = [];
    this.at = 0;
    this.sampled = false;
    this.timer = 0;
    this.playing = false;
    this.button = actionButton("\u25b6 Walk through this step", () => this.toggle(),
      { class: "action walk-start", disabled: true, "data-key": "p",
        title: "play this step, a sentence for each part (P)" });
    this.play = textButton("", "play or pause", () => this.setPlaying(!this.playing));
    this.speed = speedMenu("speed", [0.5, 1, 2]);
    this.text = h("p", { class: "walk-text", "aria-live": "polite" });
    this.count = h("span", { class: "walk-count" });
    this.mask = h("div", { class: "walk-matrix" });
    this.host = h("div", { class: "walk", hidden: true, role: "group", "aria-label": "walk through this step" },
      h("div", { class: "walk-words" }, h("div", { class: "walk-line" }, this.count,
        textButton("\u2039", "one picture back", () => this.go(this.at - 1)), this.play,
        textButton("\u203a", "one picture on", () => this.go(this.at + 1)), this.speed,
        h("span", { class: "spring" }), textButton("close", "end the walk-through (P)", () => this.toggle())), this.text),
      this.mask);
  }

  get isOpen() { return !this.host.hidden; }

  /** @param {import("./draft_tree.js").Step | null} step the step to play; null = none */
  setStep(step) {
    if (step !== this.step) this.close();
    this.step = step;
    this.button.disabled = !step;
  }

  toggle() {
    if (this.isOpen) { this.close(); this.tree.draw(); return; }
    if (!this.step) return;
    this.frames = framesOf(this.step, this.sampled);
    this.host.hidden = false;
    this.button.hidden = true;
    this.at = 0;
    this.setPlaying(!wantsStill());
    this.tree.draw();
    this.host.scrollIntoView({ block: "nearest" });
  }

  close() {
    this.setPlaying(false);
    this.host.hidden = true;
    this.button.hidden = false;
  }

  setPlaying(playing) {
    clearTimeout(this.timer);
    this.playing = playing;
    this.play.textContent = playing ? "pause" : "play";
    if (playing && this.at === this.frames.length - 1) this.at = 0;
    if (playing) this.schedule();
  }

  schedule() {
    this.timer = setTimeout(() => {
      if (this.at === this.frames.length - 1) { this.setPlaying(false); return; }
      this.at += 1;
      this.applyFrame();
      this.schedule();
    }, PACE_MS / Number(this.speed.value));
  }

  go(at) {
    this.setPlaying(false);
    this.at = Math.min(Math.max(0, at), this.frames.length - 1);
    this.applyFrame();
  }

  /** Shows the current frame in the tree's picture, e.g. after it was redrawn. */
  applyFrame() {
    const { layout } = this.tree, { step } = this;
    if (!this.isOpen || !layout || !step) return;
    const frame = this.frames[this.at], accepted = step.accepted.slice(0, frame.judged);
    this.count.textContent = `${this.at + 1} of ${this.frames.length}`;
    this.text.textContent = frame.text;
    const mask = step.buffers?.spec_decoding_packed_mask;
    this.mask.replaceChildren(...frame.row !== null && mask ? [matrix(mask, frame.row)] : []);
    const lit = new Set();
    for (let node = frame.row ?? -1; node >= 0; node = step.parents[node]) lit.add(node);
    const last = accepted.at(-1) ?? 0;
    for (const item of layout.placed) {
      const own = item.kind === "bonus" || item.kind === "recovered";
      const judged = item.node === 0 || accepted.includes(item.node);
      const wrong = frame.rejected && !own && item.parent === last && !judged;
      const states = {
        absent: own ? !frame.committed : item.depth > frame.depth,
        lit: lit.has(item.node),
        pending: item.accepted && !judged && !own, wrong,
        faded: frame.row === null ? frame.rejected && !judged && !own && !wrong : !lit.has(item.node),
        unverified: !frame.probs,
      };
      for (const [name, on] of Object.entries(states)) {
        item.pill.classList.toggle(name, on);
        item.edge?.classList.toggle(name, on);
      }
    }
  }
}
