// The race: runs replayed side by side on their recorded clocks, in whole milliseconds. It begins
// with every run's first token, as tok/s does, or with the requests, prefill included.
import { DASH, h, plural } from "../kit.js";

/** @typedef {import("../panel/panel.js").Panel} Panel */
/** @typedef {import("../panel/text.js").Track} Track */

/**
 * When a run's commits happened, in seconds from the request, and how many tokens each has; entry 0 is
 * the prefill's token, entry n is step n - 1.
 * @typedef {{ run: string, at_s: number[], num: number[] }} Clock
 */

const SPEEDS = [0.125, 0.25, 0.5, 1, 2, 4];
const PLACES = ["1st", "2nd", "3rd", "4th", "5th"];
const MOST_BLOCKS = 700;

/** @param {number} ms */
function seconds(ms) { return `${(ms / 1000).toFixed(3)} s`; }

/**
 * How many of these ascending moments have come.
 * @param {number[]} moments
 * @param {number} ms
 */
export function numReached(moments, ms) {
  let low = 0, high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle] <= ms) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** One run of the race: its commits, its lane, and the tokens of its panel. */
export class Racer {
  /**
   * @param {Clock} clock
   * @param {Panel} panel
   * @param {Track} track
   * @param {string} speedup of its configuration, as the table has it
   */
  constructor(clock, panel, track, speedup) {
    this.panel = panel;
    this.run = clock.run;
    this.clock = clock;
    /** @type {number[]} */
    this.atMs = [];
    this.endMs = 0;
    this.begin(false);
    this.done = [0];
    for (const num of clock.num) this.done.push(this.done[this.done.length - 1] + num);
    this.total = this.done[this.done.length - 1];
    this.shown = this.atMs.length;
    // Spans by the commit that they came with; what has none of its own shows at the very end.
    /** @type {HTMLElement[][]} */
    this.spans = this.atMs.map(() => []);
    /** @type {HTMLElement[]} */
    this.last = [];
    for (const span of track.body.children) {
      if (!(span instanceof HTMLElement) || span.classList.contains("prompt")) continue;
      (this.spans[Number(span.dataset.n)] ?? this.last).push(span);
    }
    this.cover = h("span", { class: "cover" });
    this.time = h("span", { class: "lane-time" });
    this.count = h("span", { class: "lane-count" });
    this.speedup = h("span", { class: "lane-speedup",
      tabindex: "0", "data-about": "the table's speedup: decoding only, over all prompts and repeats" }, speedup);
    const { title } = track.meta;
    this.lane = h("div", { class: "lane", "data-run": this.run },
      h("span", { class: "lane-name", title }, title),
      h("div", { class: "lane-track" }, ...this.blocks(track), this.cover), this.count, this.time, this.speedup);
  }

  /** @param {boolean} withPrefill whether the clock starts at the request or at the first token */
  begin(withPrefill) {
    const { at_s: at } = this.clock, start = withPrefill ? 0 : at[0] ?? 0;
    this.atMs = at.map((moment) => Math.round(1000 * (moment - start)));
    this.endMs = this.atMs.at(-1) ?? 0;
  }

  /** @param {Track} track */
  blocks(track) {
    const all = track.events.map((event, n) => ({
      tokens: this.done[n + 1] - this.done[n], kind: event[3] > 0 ? "many" : "one" }));
    const shown = all.length > MOST_BLOCKS ? [{ tokens: this.total, kind: "many" }] : all;
    return shown.map(({ tokens, kind }) => h("i", { class: kind, style: `flex-grow:${tokens}` }));
  }

  /**
   * @param {number} ms
   * @param {string} place among the runs, once it is over
   */
  seek(ms, place) {
    const commits = numReached(this.atMs, ms);
    this.reveal(commits);
    const atMs = commits ? this.atMs[commits - 1] : 0;
    const over = commits === this.atMs.length;
    this.lane.dataset.commits = String(commits);
    this.lane.dataset.ms = String(atMs);
    this.lane.classList.toggle("over", over);
    this.time.textContent = over && place ? `${seconds(atMs)} \u00b7 ${place}` : seconds(atMs);
    this.count.textContent = `${this.done[commits]} / ${this.total}`;
    this.cover.style.width = `${this.total ? 100 * (1 - this.done[commits] / this.total) : 0}%`;
    this.panel.clock.textContent = commits ? seconds(atMs) : "prefill";
  }

  /** @param {number} commits */
  reveal(commits) {
    const from = Math.min(commits, this.shown), to = Math.max(commits, this.shown);
    for (let n = from; n < to; n += 1) {
      for (const span of this.spans[n]) span.classList.toggle("later", n >= commits);
    }
    const over = commits === this.atMs.length;
    for (const span of this.last) span.classList.toggle("later", !over);
    this.shown = commits;
    this.follow();
  }

  // Keeps the newest token on show in the panel's text.
  follow() {
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
  /** @param {HTMLElement} host */
  constructor(host) {
    /** @type {Racer[]} */
    this.racers = [];
    this.ms = 0;
    this.endMs = 1;
    this.playing = false;
    this.lastFrame = 0;
    this.button = h("button", { type: "button", class: "race-play", disabled: true,
      onclick: () => (this.playing ? this.pause() : this.play()) }, "\u25b6 Race");
    this.speed = h("select", { class: "race-speed", "aria-label": "speed of the race" },
      ...SPEEDS.map((speed) => h("option", { value: speed, selected: speed === 1 },
        `${speed < 1 ? `1/${1 / speed}` : speed}\u00d7`)));
    this.range = h("input", { type: "range", min: 0, max: 1, value: 0, step: 1, disabled: true,
      "aria-label": "position in the race, in milliseconds",
      oninput: () => { this.pause(); this.seek(Number(this.range.value)); } });
    this.clock = h("span", { class: "race-clock" }, DASH);
    this.prefill = h("input", { type: "checkbox", onchange: () => this.restart() });
    const prefill = h("label", { class: "toggle", title: "start each clock when its request is sent; "
      + "otherwise at its first token, as for tok/s and speedup" }, this.prefill, " with prefill");
    this.pickers = h("span", { class: "race-pickers" });
    this.lanes = h("div", { class: "lanes" });
    host.append(h("div", { class: "race-bar" }, this.button, this.speed, this.range, this.clock,
      prefill, this.pickers), this.lanes);
  }

  /**
   * While the runs are being made: a lane each, with what it has written so far.
   * @param {Track[]} tracks
   */
  follow(tracks) {
    this.clear();
    this.lanes.append(...tracks.map(({ meta, numTokens, end }) => h("div", { class: "lane" },
      h("span", { class: "lane-name", title: meta.title }, meta.title),
      h("div", { class: "lane-track" }),
      h("span", { class: "lane-count" }, numTokens ? plural(numTokens, "token") : ""),
      h("span", { class: "lane-time" }, end ? "done" : numTokens ? "running" : "waiting"),
      h("span", { class: "lane-speedup" }))));
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
    this.lanes.replaceChildren(...racers.map((racer) => racer.lane));
    this.range.disabled = this.button.disabled = !racers.length;
    this.restart();
  }

  /** From the moment that counts as the start; all runs stand at their ends. */
  restart() {
    this.pause();
    for (const racer of this.racers) racer.begin(this.prefill.checked);
    this.endMs = Math.max(1, ...this.racers.map((racer) => racer.endMs));
    this.range.max = String(this.endMs);
    this.seek(this.endMs);
  }

  /** @param {number} ms */
  seek(ms) {
    this.ms = Math.min(Math.max(0, ms), this.endMs);
    for (const racer of this.racers) {
      // Those that end in the same millisecond share a place, and the next one is left out.
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

  /** @param {number} now */
  frame(now) {
    if (!this.playing) return;
    const passed = Math.max(0, now - this.lastFrame);
    this.lastFrame = now;
    this.seek(this.ms + passed * Number(this.speed.value));
    if (this.ms >= this.endMs) this.pause();
    else requestAnimationFrame((next) => this.frame(next));
  }
}
