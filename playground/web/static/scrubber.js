// Walks through the steps of a run: range input, keys, and the draft tree of the step. Needs tree.js.
const LIVE_TREE_MS = 250;
const MOST_CACHED_STEPS = 400;

class Scrubber {
  // fetchStep(run, index) → promise of a step; onStep(track, n, reveal) is told what is on show.
  constructor(host, treeHost, { fetchStep, onStep }) {
    this.fetchStep = fetchStep;
    this.onStep = onStep;
    this.treeHost = treeHost;
    this.track = null;
    this.following = true;
    this.cache = new Map();
    this.wanted = 0;
    this.drawnAt = 0;
    this.range = h("input", { type: "range", min: 1, max: 1, value: 1, disabled: true,
      "aria-label": "step", oninput: () => this.moved() });
    this.label = h("span", { class: "step-label" }, "no steps yet");
    this.split = h("span", { class: "step-split" });
    const button = (text, name, by) => h("button", { type: "button", "aria-label": name,
      title: name, onclick: () => this.go(this.index + by) }, text);
    host.append(button("\u2039", "previous step", -1), this.range,
      button("\u203a", "next step", 1), this.label, this.split);
    this.treeView = h("div", { class: "tree-view" });
    this.treeInfo = h("div", { class: "tree-info" });
    treeHost.append(this.treeView, this.treeInfo);
    this.hint("The draft tree of a step appears here.");
  }

  get index() { return Number(this.range.value) - 1; }

  hint(text) {
    this.treeView.replaceChildren(h("div", { class: "tree-hint" }, text));
    this.treeInfo.textContent = "";
  }

  attach(track) {
    this.track = track;
    this.following = !track?.end;
    this.range.disabled = true;
    this.range.max = this.range.value = 1;
    this.label.textContent = "no steps yet";
    this.split.textContent = "";
    this.hint("The draft tree of a step appears here.");
    if (track?.numSteps) this.grown(track);
  }

  // The track got more steps: keep the thumb at the end while following.
  grown(track) {
    if (track !== this.track || !track.numSteps) return;
    this.range.disabled = false;
    this.range.max = track.numSteps;
    if (!this.following) { this.describe(); return; }
    this.range.value = track.numSteps;
    this.describe();
    const due = performance.now() - this.drawnAt > LIVE_TREE_MS;
    if (due || track.end) this.show(false);
  }

  ended(track) {
    if (track === this.track && this.following && track.numSteps) this.show(false);
  }

  moved() {
    this.following = !this.track?.end && this.index + 1 >= this.track.numSteps;
    this.describe();
    this.show(true);
  }

  go(index) {
    if (!this.track?.numSteps) return;
    this.range.value = Math.min(Math.max(0, index), this.track.numSteps - 1) + 1;
    this.moved();
  }

  // A token of event n was picked.
  pick(track, n) {
    if (track !== this.track) {
      this.attach(track);
      this.following = false;
    }
    if (n > 0) { this.go(n - 1); this.range.focus({ preventScroll: true }); return; }
    this.onStep(track, 0, false);
    this.label.textContent = "prefill: commits the first token, no step";
  }

  describe() {
    const event = this.track.events[this.index + 1];
    if (!event) return;
    const [, , , accepted, , , drafted] = event;
    this.label.textContent = `step ${this.index + 1} of ${this.track.numSteps} \u00b7 `
      + `accepted ${accepted} of ${drafted}, committed ${event[2].length}`;
  }

  async show(reveal) {
    const track = this.track, index = this.index, ticket = ++this.wanted;
    this.drawnAt = performance.now();
    this.onStep(track, index + 1, reveal);
    const step = await this.step(track.meta.id, index);
    if (ticket !== this.wanted) return;
    if (!step || step.error) { this.hint(step?.error ?? "This step is not available."); return; }
    this.split.textContent = splitWords(step);
    const rest = step.decision || this.restingInfo(step);
    drawTree(this.treeView, step, (text) => { this.treeInfo.textContent = text || rest; });
    this.treeInfo.textContent = rest;
  }

  restingInfo(step) {
    const drafted = step.labels.length - 1;
    if (!drafted) return "Nothing was drafted: a plain decoding step.";
    const extra = step.num_extra_rows ? `, ${plural(step.num_extra_rows, "extra row")}` : "";
    return `${plural(drafted, "draft token")} verified in one forward${extra}; `
      + `${step.context_len} tokens in the cache before it.`;
  }

  step(run, index) {
    const key = `${run}/${index}`;
    if (!this.cache.has(key)) {
      if (this.cache.size >= MOST_CACHED_STEPS) this.cache.delete(this.cache.keys().next().value);
      const fetched = this.fetchStep(run, index);
      this.cache.set(key, fetched);
      fetched.then((step) => { if (!step || step.error) this.cache.delete(key); });
    }
    return this.cache.get(key);
  }
}
