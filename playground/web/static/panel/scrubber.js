// Navigation through the steps of a run: timeline, slider, keys, and the draft tree of the step.
// Slider, label, marked text and tree always show the same step, also while the run streams.
import { actionButton, ask, h, plural, textButton } from "../kit.js";
import { StepTree } from "./draft_tree.js";
import { Timeline, mostInstructive } from "./timeline.js";

const LIVE_TREE_MS = 250;
const MAX_CACHED_STEPS = 400;

export class Scrubber {
  /**
   * @param {Record<string, (question: object) => Promise<any>>} server answers questions on a run's steps
   * @param {import("./text.js").TokenText} text marks the tokens of the displayed step
   */
  constructor(server, text) {
    this.server = server;
    this.text = text;
    this.track = null;
    this.following = true;
    this.cache = new Map();
    this.lastTicket = 0;
    this.drawnAt = 0;
    /** @type {number | null} where a selection with Shift began */
    this.anchor = null;
    this.range = h("input", { type: "range", min: 1,
      "aria-label": "step", oninput: () => this.onMove(), onkeydown: (event) => this.key(event) });
    this.label = h("span", { class: "step-label" });
    this.split = h("span", { class: "step-split" });
    this.follow = textButton("follow", "show the newest step again (End)", () => this.go(Infinity),
      { hidden: true });
    const button = (text, name, by) =>
      actionButton(text, () => this.go(this.index + by), { "aria-label": name, title: name });
    this.timeline = new Timeline((index) => this.go(index), server, (index) => this.explain(index));
    this.host = h("div", { class: "scrubber" }, button("\u2039", "previous step", -1), this.range,
      button("\u203a", "next step", 1), this.follow, this.label, this.split);
    this.tree = new StepTree((node) => this.highlightToken(node));
    /** @type {any} the displayed step */
    this.current = null;
    this.reset();
  }

  reset() {
    this.fetching = false;
    this.shown = -1;
    this.range.disabled = true;
    this.range.max = this.range.value = "1";
    this.label.textContent = "no steps yet";
    this.split.textContent = "";
    this.tree.showMessage("The draft tree of a step appears here.");
  }

  get index() { return Number(this.range.value) - 1; }

  attach(track) {
    this.track = track;
    this.following = !track.end;
    this.lastTicket += 1;
    this.reset();
    this.timeline.attach(track);
    this.update(track);
  }

  /** Called when the track has new steps: while following, the newest is shown a few times a second. */
  update(track) {
    if (!track || track !== this.track || !track.numSteps) return;
    this.range.disabled = false;
    this.range.max = String(track.numSteps);
    this.timeline.draw();
    if (!this.following) { this.describe(track); return; }
    const due = performance.now() - this.drawnAt > LIVE_TREE_MS && !this.fetching;
    if (track.end || due) this.show(track, track.numSteps - 1, false);
  }

  finish(track) {
    if (track !== this.track || !track.numSteps) return;
    this.follow.hidden = true;
    if (this.following) this.show(track, mostInstructive(track.events.slice(1))[0], false);
  }

  /** Highlights the token of a node of the displayed step; the root is the token before the step. */
  highlightToken(node) {
    const at = node === null || !this.current ? null
      : node === this.current.tokens.length ? this.current.accepted.length
        : this.current.accepted.indexOf(node);
    const n = node === 0 ? this.shown : this.shown + 1;
    this.text.highlight(at === null ? null : this.track, n, node === 0 ? -1 : at === -1 ? Infinity : at);
  }

  /** Highlights the node of a token in the text, if its step is displayed. */
  highlightNode(track, n, i) {
    const { current } = this;
    if (!current || track !== this.track || n !== this.shown + 1 || i < 0) this.tree.highlight(null);
    else this.tree.highlight(current.accepted[i] ?? current.tokens.length);
  }

  /** The user moved the slider: moving it back ends following, nothing else does. */
  onMove() {
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
    const sign = { b: 1, w: -1 }[event.key.toLowerCase()];
    if (!sign) return;
    event.preventDefault();
    this.timeline.goToExtreme(sign);
  }

  go(index) {
    if (!this.track?.numSteps) return;
    this.range.value = String(Math.min(Math.max(0, index), this.track.numSteps - 1) + 1);
    this.onMove();
  }

  /** Shows the step of commit n, whose token was clicked. */
  showCommit(track, n) {
    if (track !== this.track) this.attach(track);
    this.following = false;
    if (n > 0) { this.go(n - 1); this.range.focus({ preventScroll: true }); return; }
    this.lastTicket += 1;
    this.text.mark(track, 0, false);
    this.label.textContent = "prefill: commits the first token and is no step";
  }

  describe(track) {
    const event = track.events[this.shown + 1];
    if (!event || this.shown < 0) return;
    const [, pieces, accepted, , , drafted] = event;
    this.label.textContent = `step ${this.shown + 1} of ${track.numSteps} \u00b7 `
      + `accepted ${accepted} of ${drafted}, committed ${pieces.length}`;
  }

  async show(track, index, reveal) {
    const ticket = ++this.lastTicket;
    this.drawnAt = performance.now();
    this.fetching = true;
    const step = await this.step(track.meta.id, index);
    if (ticket !== this.lastTicket) return;
    this.fetching = false;
    this.range.value = String(index + 1);
    this.shown = index;
    this.describe(track);
    this.text.mark(track, index + 1, reveal);
    this.timeline.mark(index);
    this.current = step.error ? null : step;
    if (step.error) { this.tree.showMessage(step.error); return; }
    this.tree.walk.sampled = track.meta.temperature > 0;
    this.split.textContent = step.split;
    this.tree.show(step, describeStep(step));
  }

  async explain(index) {
    const { track } = this;
    if (!track || index >= track.numSteps) return "";
    const step = await this.step(track.meta.id, index);
    return step.error ? "" : describeStep(step);
  }

  async step(run, index) {
    const key = `${run}/${index}`, { cache } = this;
    if (cache.size >= MAX_CACHED_STEPS) cache.clear();
    if (!cache.has(key)) cache.set(key, ask(this.server.step({ run, index })));
    const step = await cache.get(key);
    if (step.error) cache.delete(key);
    return step;
  }
}

/** How much a step drafted, and why. */
function describeStep(step) {
  if (step.decision) return step.decision;
  const drafted = step.tokens.length - 1;
  const cut = step.num_cut ? `, ${plural(step.num_cut, "draft")} cut by the grammar` : "";
  const forced = step.num_forced ? `, ${step.num_forced} of them by the grammar, which leaves no choice` : "";
  if (!drafted) return `Nothing was drafted: ${step.bypass ?? "a plain decoding step"}${cut}.`;
  const extra = step.num_extra_rows ? `, ${plural(step.num_extra_rows, "extra row")}` : "";
  return `${plural(drafted, "draft token")} verified in one forward${forced}${extra}${cut}; `
    + `${step.context_len} tokens in the cache before it.`;
}
