// The race: runs replayed side by side on their recorded clocks, in whole milliseconds. It starts at
// every run's first token, as tok/s does, or at the request, with the prefill.
import { DASH, actionButton, h, speedMenu } from "../kit.js";

/** @typedef {import("../panel/text.js").Track} Track */

const PLACES = ["1st", "2nd", "3rd", "4th", "5th"];
const MAX_BLOCKS = 700;

const seconds = (ms) => `${(ms / 1000).toFixed(3)} s`;

/** How many of these ascending moments have passed. */
export const numReached = (moments, ms) => moments.findLastIndex((at) => at <= ms) + 1;

/** One run of the race: its commits, its lane, and the tokens of its panel. */
export class Racer {
  /**
   * @param {import("../panel/panel.js").Panel} panel
   * @param {Track} track
   * @param {string} speedup of its configuration, as the table has it
   */
  constructor(panel, track, speedup) {
    this.panel = panel;
    this.events = track.events;
    this.atMs = [];
    this.endMs = 0;
    this.setStart(false);
    this.numBefore = [0];
    for (const [n, pieces] of this.events) this.numBefore.push(this.numBefore[n] + pieces.length);
    this.total = track.numTokens;
    this.shown = this.atMs.length;
    // Spans by commit; spans without a commit of their own belong to the last one.
    /** @type {HTMLElement[][]} */
    this.spans = this.atMs.map(() => []);
    for (const span of track.body.querySelectorAll(":scope > :not(.prompt)")) {
      (this.spans[span.dataset.n] ?? this.spans.at(-1))?.push(span);
    }
    this.cover = h("span", { class: "cover" });
    this.time = h("span", { class: "lane-time" });
    this.count = h("span", { class: "lane-count" });
    this.speedup = h("span", { class: "lane-speedup",
      tabindex: "0", "data-about": "the table's speedup: decoding only, over all prompts and repeats" }, speedup);
    const { id, title } = track.meta;
    this.lane = h("div", { class: "lane", "data-run": id },
      h("span", { class: "lane-name", title }, title),
      h("div", { class: "lane-track" }, ...this.blocks(), this.cover),
      this.count, this.time, this.speedup);
  }

  /** @param {boolean} withPrefill whether the clock starts at the request or at the first token */
  setStart(withPrefill) {
    const at = this.events.map((event) => event[7]), start = withPrefill ? 0 : at[0] ?? 0;
    this.atMs = at.map((moment) => Math.round(1000 * (moment - start)));
    this.endMs = this.atMs.at(-1) ?? 0;
  }

  blocks() {
    const all = this.events.map(([, pieces, accepted]) => (
      { tokens: pieces.length, kind: accepted > 0 ? "many" : "one" }));
    const shown = all.length > MAX_BLOCKS ? [{ tokens: this.total, kind: "many" }] : all;
    return shown.map(({ tokens, kind }) => h("i", { class: kind, style: `flex-grow:${tokens}` }));
  }

  /** @param {string} place of the run in the race, shown once it has ended */
  seek(ms, place) {
    const commits = numReached(this.atMs, ms);
    this.reveal(commits);
    const atMs = commits ? this.atMs[commits - 1] : 0;
    const over = commits === this.atMs.length;
    this.lane.classList.toggle("over", over);
    this.time.textContent = over && place ? `${seconds(atMs)} \u00b7 ${place}` : seconds(atMs);
    this.count.textContent = `${this.numBefore[commits]} / ${this.total}`;
    this.cover.style.width = `${this.total ? 100 * (1 - this.numBefore[commits] / this.total) : 0}%`;
    this.panel.clock.textContent = commits ? seconds(atMs) : "prefill";
  }

  reveal(commits) {
    const from = Math.min(commits, this.shown), to = Math.max(commits, this.shown);
    for (let n = from; n < to; n += 1) {
      for (const span of this.spans[n]) span.classList.toggle("later", n >= commits);
    }
    this.shown = commits;
    // The newest token stays visible in the panel's text.
    const text = this.panel.text.host;
    const span = this.spans.slice(0, this.shown).findLast((spans) => spans.length)?.at(-1);
    if (!span) { text.scrollTop = 0; return; }
    const below = span.offsetTop + span.offsetHeight + 12;
    if (below > text.scrollTop + text.clientHeight || below < text.scrollTop + 40) {
      text.scrollTop = Math.max(0, below - text.clientHeight);
    }
  }
}

export class Race {
  constructor(host) {
    this.racers = [];
    this.ms = 0;
    this.endMs = 1;
    this.playing = false;
    this.lastFrame = 0;
    this.button = actionButton("\u25b6 Race", () => (this.playing ? this.pause() : this.play()),
      { class: "action race-play", disabled: true });
    this.speed = speedMenu("speed of the race", [0.125, 0.25, 0.5, 1, 2, 4]);
    this.range = h("input", { type: "range", min: 0, max: 1, value: 0, step: 1, disabled: true,
      "aria-label": "position in the race, in milliseconds",
      oninput: () => { this.pause(); this.seek(Number(this.range.value)); } });
    this.clock = h("span", { class: "race-clock" }, DASH);
    this.prefill = h("input", { type: "checkbox", onchange: () => this.restart() });
    const prefill = h("label", { class: "toggle", title: "start each clock when its request is sent; "
      + "otherwise at its first token, as for tok/s and speedup" }, this.prefill, " with prefill");
    this.prompts = h("select", { class: "race-prompts", "aria-label": "prompt of the race", hidden: true });
    this.lanes = h("div", { class: "lanes" });
    host.append(h("div", { class: "race-bar" }, this.button, this.speed, this.range, this.clock,
      prefill, this.prompts), this.lanes);
  }

  clear() {
    this.pause();
    for (const racer of this.racers) racer.panel.clock.textContent = "";
    this.racers = [];
    this.lanes.replaceChildren();
    this.range.disabled = this.button.disabled = true;
    this.clock.textContent = DASH;
  }

  /** @param {Racer[]} racers */
  load(racers) {
    this.clear();
    this.racers = racers;
    this.lanes.append(...racers.map((racer) => racer.lane));
    this.range.disabled = this.button.disabled = !racers.length;
    this.restart();
  }

  /** From the moment that counts as the start; all runs stand at their ends. */
  restart() {
    this.pause();
    for (const racer of this.racers) racer.setStart(this.prefill.checked);
    this.endMs = Math.max(1, ...this.racers.map((racer) => racer.endMs));
    this.range.max = String(this.endMs);
    this.seek(this.endMs);
  }

  seek(ms) {
    this.ms = Math.min(Math.max(0, ms), this.endMs);
    for (const racer of this.racers) {
      // Runs that end in the same millisecond share a place, and the next place is skipped.
      const before = this.racers.filter(({ endMs }) => endMs < racer.endMs).length;
      racer.seek(this.ms, this.racers.length > 1 ? PLACES[before] : "");
    }
    this.range.value = String(Math.round(this.ms));
    this.clock.textContent = `${seconds(Math.round(this.ms))} / ${seconds(this.endMs)}`;
  }

  play() {
    if (!this.racers.length) return;
    if (this.ms >= this.endMs) this.seek(0);
    this.playing = true;
    this.button.textContent = "\u2016 Pause";
    this.lastFrame = performance.now();
    requestAnimationFrame((now) => this.frame(now));
  }

  pause() {
    this.playing = false;
    this.button.textContent = "\u25b6 Race";
  }

  frame(now) {
    if (!this.playing) return;
    const passed = Math.max(0, now - this.lastFrame);
    this.lastFrame = now;
    this.seek(this.ms + passed * Number(this.speed.value));
    if (this.ms >= this.endMs) this.pause();
    else requestAnimationFrame((next) => this.frame(next));
  }
}
