// Walks through the steps of a run: range input, keys, and the draft tree of the step.
import { ask, h, plural, splitText } from "../kit.js";
import { drawTree } from "./draft_tree.js";

const LIVE_TREE_MS = 250;
const MOST_CACHED_STEPS = 400;
const HINT = "The draft tree of a step appears here.";

export class Scrubber {
  // around: fetchStep(run, index) → promise; onStep(track, n, reveal) is told what is on show.
  constructor(around) {
    this.around = around;
    /** @type {import("./text.js").Track | null} */
    this.track = null;
    this.following = true;
    /** @type {Map<string, Promise<any>>} */
    this.cache = new Map();
    this.wanted = 0;
    this.drawnAt = 0;
    this.range = h("input", { type: "range", min: 1, max: 1, value: 1, disabled: true,
      "aria-label": "step", oninput: () => this.moved() });
    this.label = h("span", { class: "step-label" }, "no steps yet");
    this.split = h("span", { class: "step-split" });
    /** @type {(text: string, name: string, by: number) => HTMLElement} */
    const button = (text, name, by) => h("button", { type: "button", "aria-label": name,
      title: name, onclick: () => this.go(this.index + by) }, text);
    this.host = h("div", { class: "scrubber" }, button("\u2039", "previous step", -1), this.range,
      button("\u203a", "next step", 1), this.label, this.split);
    this.treeView = h("div", { class: "tree-view" });
    this.treeInfo = h("div", { class: "tree-info" });
    this.treeHost = h("div", { class: "tree" }, this.treeView, this.treeInfo);
    this.hint(HINT);
  }

  get index() { return Number(this.range.value) - 1; }

  hint(text) {
    this.treeView.replaceChildren(h("div", { class: "tree-hint" }, text));
    this.treeInfo.textContent = "";
  }

  attach(track) {
    this.track = track;
    this.following = !track.end;
    this.range.disabled = true;
    this.range.max = this.range.value = "1";
    this.label.textContent = "no steps yet";
    this.split.textContent = "";
    this.hint(HINT);
    this.grown(track);
  }

  /** The track got more steps: keep the thumb at the end while following. */
  grown(track) {
    if (!track || track !== this.track || !track.numSteps) return;
    this.range.disabled = false;
    this.range.max = String(track.numSteps);
    if (this.following) this.range.value = this.range.max;
    this.describe(track);
    if (!this.following) return;
    if (track.end || performance.now() - this.drawnAt > LIVE_TREE_MS) this.show(track, false);
  }

  ended(track) {
    if (track === this.track && this.following && track.numSteps) this.show(track, false);
  }

  moved() {
    const { track } = this;
    if (!track) return;
    this.following = !track.end && this.index + 1 >= track.numSteps;
    this.describe(track);
    this.show(track, true);
  }

  go(index) {
    if (!this.track?.numSteps) return;
    this.range.value = String(Math.min(Math.max(0, index), this.track.numSteps - 1) + 1);
    this.moved();
  }

  /** A token of commit n was picked. */
  pick(track, n) {
    if (track !== this.track) {
      this.attach(track);
      this.following = false;
    }
    if (n > 0) { this.go(n - 1); this.range.focus({ preventScroll: true }); return; }
    this.around.onStep(track, 0, false);
    this.label.textContent = "prefill: commits the first token, no step";
  }

  describe(track) {
    const event = track.events[this.index + 1];
    if (!event) return;
    const [, , pieces, accepted, , , drafted] = event;
    this.label.textContent = `step ${this.index + 1} of ${track.numSteps} \u00b7 `
      + `accepted ${accepted} of ${drafted}, committed ${pieces.length}`;
  }

  async show(track, reveal) {
    const index = this.index, ticket = ++this.wanted;
    this.drawnAt = performance.now();
    this.around.onStep(track, index + 1, reveal);
    const step = await this.step(track.meta.id, index);
    if (ticket !== this.wanted) return;
    if (step.error) { this.hint(step.error); return; }
    this.split.textContent = splitText(step);
    const rest = step.decision || restingWords(step);
    drawTree(this.treeView, step, (words) => { this.treeInfo.textContent = words || rest; });
    this.treeInfo.textContent = rest;
  }

  step(run, index) {
    const key = `${run}/${index}`;
    const known = this.cache.get(key);
    if (known) return known;
    if (this.cache.size >= MOST_CACHED_STEPS) this.cache.delete([...this.cache.keys()][0]);
    const fetched = ask(this.around.fetchStep(run, index));
    this.cache.set(key, fetched);
    fetched.then((step) => { if (step.error) this.cache.delete(key); });
    return fetched;
  }
}

function restingWords(step) {
  const drafted = step.tokens.length - 1;
  if (!drafted) return "Nothing was drafted: a plain decoding step.";
  const extra = step.num_extra_rows ? `, ${plural(step.num_extra_rows, "extra row")}` : "";
  return `${plural(drafted, "draft token")} verified in one forward${extra}; `
    + `${step.context_len} tokens in the cache before it.`;
}
