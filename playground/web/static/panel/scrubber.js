// Walks through the steps of a run: timeline, range input, keys, and the draft tree of the step.
// Whatever shows a step (thumb, label, marked text, tree) shows the same one, also while it streams.
import { ask, h, plural } from "../kit.js";
import { StepTree } from "./draft_tree.js";
import { Timeline, ranked } from "./timeline.js";

const LIVE_TREE_MS = 250;
const MOST_CACHED_STEPS = 400;
const HINT = "The draft tree of a step appears here.";

/**
 * What the server tells of a run: a step; steps added up, as a text; the Chrome trace.
 * @typedef {{ fetchStep: (run: string, index: number) => Promise<any>,
 *   fetchSteps: (run: string, first: number, last: number) => Promise<any>,
 *   fetchTrace: (run: string) => Promise<any> }} Fetch
 */

export class Scrubber {
  // around: Fetch; onStep(track, n, reveal), which is told what is on show; onPoint(track, n, i), which
  // is told of the token of the tree's node under the pointer.
  constructor(around) {
    this.around = around;
    /** @type {import("./text.js").Track | null} */
    this.track = null;
    this.following = true;
    /** @type {Map<string, Promise<any>>} */
    this.cache = new Map();
    this.wanted = 0;
    this.drawnAt = 0;
    this.fetching = false;
    this.shown = -1;
    /** @type {number | null} where a selection with Shift began */
    this.anchor = null;
    this.range = h("input", { type: "range", min: 1, max: 1, value: 1, disabled: true,
      "aria-label": "step", oninput: () => this.moved(),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) });
    this.label = h("span", { class: "step-label" }, "no steps yet");
    this.split = h("span", { class: "step-split" });
    this.follow = h("button", { type: "button", class: "quiet", hidden: true,
      title: "show the newest step again (End)", onclick: () => this.go(Infinity) }, "follow");
    /** @type {(text: string, name: string, by: number) => HTMLElement} */
    const button = (text, name, by) => h("button", { type: "button", class: "step", "aria-label": name,
      title: name, onclick: () => this.go(this.index + by) }, text);
    this.timeline = new Timeline((index) => this.go(index), around.fetchSteps,
      (index) => this.explain(index));
    this.host = h("div", { class: "scrubber" }, button("\u2039", "previous step", -1), this.range,
      button("\u203a", "next step", 1), this.follow, this.label, this.split);
    this.tree = new StepTree((node) => this.point(node));
    /** @type {any} the step on show */
    this.current = null;
    this.tree.hint(HINT);
  }

  get index() { return Number(this.range.value) - 1; }

  attach(track) {
    this.track = track;
    this.following = !track.end;
    this.wanted += 1;
    this.fetching = false;
    this.shown = -1;
    this.range.disabled = true;
    this.range.max = this.range.value = "1";
    this.label.textContent = "no steps yet";
    this.split.textContent = "";
    this.timeline.attach(track);
    this.tree.hint(HINT);
    this.grown(track);
  }

  /** The track got more steps: the newest is shown while following, a few times a second. */
  grown(track) {
    if (!track || track !== this.track || !track.numSteps) return;
    this.range.disabled = false;
    this.range.max = String(track.numSteps);
    this.timeline.draw();
    if (!this.following) { this.describe(track); return; }
    const due = performance.now() - this.drawnAt > LIVE_TREE_MS && !this.fetching;
    if (track.end || due) this.show(track, track.numSteps - 1, false);
  }

  ended(track) {
    if (track !== this.track || !track.numSteps) return;
    this.follow.hidden = true;
    if (this.following) this.show(track, ranked(track.events.slice(1))[0], false);
  }

  /** The token of a node of the step on show: of the root, the one before. */
  point(node) {
    const at = node === null || !this.current ? null
      : node === this.current.tokens.length ? this.current.accepted.length
        : this.current.accepted.indexOf(node);
    const n = node === 0 ? this.shown : this.shown + 1;
    this.around.onPoint(at === null ? null : this.track, n, node === 0 ? -1 : at === -1 ? Infinity : at);
  }

  /** A token of the text is pointed at: its node, if its step is on show. */
  pointAt(track, n, i) {
    const { current } = this;
    if (!current || track !== this.track || n !== this.shown + 1 || i < 0) this.tree.pointAt(null);
    else this.tree.pointAt(current.accepted[i] ?? current.tokens.length);
  }

  /** A person moved the thumb: following ends where it was moved back, and nowhere else. */
  moved() {
    const { track } = this;
    if (!track) return;
    const forward = this.following && this.index >= this.shown;
    this.following = !track.end && (forward || this.index + 1 >= track.numSteps);
    this.follow.hidden = this.following || Boolean(track.end);
    if (this.anchor !== null) this.timeline.select(this.anchor, this.index);
    this.show(track, this.index, true);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) this.anchor ??= this.index;
    else if (event.key !== "Shift") this.anchor = null;
    const work = { b: () => this.timeline.extreme(1), w: () => this.timeline.extreme(-1),
      "+": () => this.timeline.zoom(2), "-": () => this.timeline.zoom(0.5) }[event.key.toLowerCase()];
    if (!work) return;
    event.preventDefault();
    work();
  }

  go(index) {
    if (!this.track?.numSteps) return;
    this.range.value = String(Math.min(Math.max(0, index), this.track.numSteps - 1) + 1);
    this.moved();
  }

  /** A token of commit n was picked. */
  pick(track, n) {
    if (track !== this.track) this.attach(track);
    this.following = false;
    if (n > 0) { this.go(n - 1); this.range.focus({ preventScroll: true }); return; }
    this.wanted += 1;
    this.around.onStep(track, 0, false);
    this.label.textContent = "prefill: commits the first token, no step";
  }

  describe(track) {
    const event = track.events[this.shown + 1];
    if (!event || this.shown < 0) return;
    const [, , pieces, accepted, , , drafted] = event;
    this.label.textContent = `step ${this.shown + 1} of ${track.numSteps} \u00b7 `
      + `accepted ${accepted} of ${drafted}, committed ${pieces.length}`;
  }

  async show(track, index, reveal) {
    const ticket = ++this.wanted;
    this.drawnAt = performance.now();
    this.fetching = true;
    const step = await this.step(track.meta.id, index);
    if (ticket !== this.wanted) return;
    this.fetching = false;
    this.range.value = String(index + 1);
    this.shown = index;
    this.describe(track);
    this.around.onStep(track, index + 1, reveal);
    this.timeline.mark(index);
    this.current = step.error ? null : step;
    if (step.error) { this.tree.hint(step.error); return; }
    this.tree.walk.sampled = track.meta.temperature > 0;
    this.split.textContent = step.split;
    this.tree.show(step, step.decision || restingWords(step));
  }

  /** What was decided for a step, and why. */
  async explain(index) {
    const { track } = this;
    if (!track || index >= track.numSteps) return "";
    const step = await this.step(track.meta.id, index);
    return step.error ? "" : step.decision || restingWords(step);
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
  const cut = step.num_cut ? `, ${plural(step.num_cut, "draft")} cut by the grammar` : "";
  const forced = step.num_forced ? `, ${step.num_forced} of them by the grammar, which leaves no choice there` : "";
  if (!drafted) return `Nothing was drafted: ${step.bypass ?? "a plain decoding step"}${cut}.`;
  const extra = step.num_extra_rows ? `, ${plural(step.num_extra_rows, "extra row")}` : "";
  return `${plural(drafted, "draft token")} verified in one forward${forced}${extra}${cut}; `
    + `${step.context_len} tokens in the cache before it.`;
}
