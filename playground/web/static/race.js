// The race: runs replayed side by side on their recorded clocks. Needs dom.js and panel.js.
//
// A clock is { run, at_s: [seconds from the request to each commit], num: [tokens of it] }; entry 0
// is the prefill's token, entry n is step n - 1. Times are shown in whole milliseconds.
const RACE_SPEEDS = [0.125, 0.25, 0.5, 1, 2, 4];
const MOST_BLOCKS = 700;

function seconds(ms) { return `${(ms / 1000).toFixed(3)} s`; }

// One run of the race: its commits, its lane, and the tokens of its panel.
class Racer {
  constructor(clock, panel) {
    this.panel = panel;
    this.run = clock.run;
    this.atMs = clock.at_s.map((at) => Math.round(1000 * at));
    this.done = [0];
    for (const num of clock.num) this.done.push(this.done.at(-1) + num);
    this.shown = this.atMs.length;
    this.collectTokens();
    this.drawLane();
  }

  get total() { return this.done.at(-1); }
  get endMs() { return this.atMs.at(-1) ?? 0; }

  // Spans by the event that they came with; what has no event of its own shows at the very end.
  collectTokens() {
    this.spans = this.atMs.map(() => []);
    this.last = [];
    for (const span of this.panel.track.body.children) {
      if (span.classList.contains("prompt")) continue;
      (this.spans[Number(span.dataset.n)] ?? this.last).push(span);
    }
  }

  drawLane() {
    const kinds = this.panel.track.events.map((event) => (event[3] > 0 ? "many" : "one"));
    const blocks = this.done.slice(1).map((to, n) => ({ tokens: to - this.done[n], kind: kinds[n] }));
    const shown = blocks.length > MOST_BLOCKS ? [{ tokens: this.total, kind: "many" }] : blocks;
    this.cover = h("span", { class: "cover" });
    this.time = h("span", { class: "lane-time" });
    this.count = h("span", { class: "lane-count" });
    this.track = h("div", { class: "lane-track" }, ...shown.map((block) => {
      const bar = h("i", { class: block.kind });
      bar.style.flexGrow = String(block.tokens);
      return bar;
    }), this.cover);
    this.lane = h("div", { class: "lane", "data-run": this.run },
      h("span", { class: "lane-name", title: this.panel.track.meta.title },
        this.panel.track.meta.title), this.track, this.count, this.time);
  }

  // How many commits had happened at a moment: binary search.
  commitsAt(ms) {
    let low = 0, high = this.atMs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.atMs[middle] <= ms) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  seek(ms, place) {
    const commits = this.commitsAt(ms);
    this.reveal(commits);
    const atMs = commits ? this.atMs[commits - 1] : 0;
    const over = commits === this.atMs.length;
    this.lane.dataset.commits = String(commits);
    this.lane.dataset.ms = String(atMs);
    this.lane.classList.toggle("over", over);
    const text = over ? `${seconds(atMs)}${place ? ` \u00b7 ${place}` : ""}` : seconds(atMs);
    if (this.time.textContent !== text) this.time.textContent = text;
    this.count.textContent = `${this.done[commits]} / ${this.total}`;
    this.cover.style.width = `${100 * (1 - (this.total ? this.done[commits] / this.total : 1))}%`;
    this.panel.clock.textContent = commits ? seconds(atMs) : "prefill";
  }

  reveal(commits) {
    const from = Math.min(commits, this.shown), to = Math.max(commits, this.shown);
    for (let n = from; n < to; n++) {
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
    let span = null;
    for (let n = this.shown - 1; n >= 0 && !span; n--) span = this.spans[n].at(-1);
    if (!span) { text.scrollTop = 0; return; }
    const below = span.offsetTop + span.offsetHeight + 12;
    if (below > text.scrollTop + text.clientHeight || below < text.scrollTop + 40) {
      text.scrollTop = Math.max(0, below - text.clientHeight);
    }
  }
}

class Race {
  constructor(host) {
    this.racers = [];
    this.ms = 0;
    this.playing = false;
    this.button = h("button", { type: "button", class: "race-play", disabled: true,
      onclick: () => this.toggle() }, "\u25b6 Race");
    this.speed = h("select", { class: "race-speed", "aria-label": "speed of the race" },
      ...RACE_SPEEDS.map((speed) => h("option", { value: speed, selected: speed === 1 },
        `${speed < 1 ? `1/${1 / speed}` : speed}\u00d7`)));
    this.range = h("input", { type: "range", min: 0, max: 1, value: 0, step: 1, disabled: true,
      "aria-label": "moment of the race in milliseconds",
      oninput: () => { this.pause(); this.seek(Number(this.range.value)); } });
    this.clock = h("span", { class: "race-clock" }, DASH);
    this.pickers = h("span", { class: "race-pickers" });
    this.lanes = h("div", { class: "lanes" });
    host.append(h("div", { class: "race-bar" }, this.button, this.speed, this.range, this.clock,
      this.pickers), this.lanes);
  }

  // While the runs are being made: a lane each, with what it has written so far.
  follow(tracks) {
    if (this.racers.length || this.lanes.children.length !== tracks.length) {
      this.clear();
      this.lanes.replaceChildren(...tracks.map(() => h("div", { class: "lane" },
        h("span", { class: "lane-name" }), h("div", { class: "lane-track" }),
        h("span", { class: "lane-count" }), h("span", { class: "lane-time" }))));
    }
    tracks.forEach((track, i) => {
      const [name, , count, time] = this.lanes.children[i].children;
      name.textContent = name.title = track.meta.title;
      count.textContent = track.numTokens ? plural(track.numTokens, "token") : "";
      time.textContent = track.end ? "done" : track.numTokens ? "running" : "waiting";
    });
  }

  clear() {
    this.pause();
    for (const racer of this.racers) racer.panel.clock.textContent = "";
    this.racers = [];
    this.lanes.replaceChildren();
    this.range.disabled = this.button.disabled = true;
    this.clock.textContent = DASH;
  }

  load(racers) {
    this.clear();
    this.racers = racers;
    this.lanes.replaceChildren(...racers.map((racer) => racer.lane));
    this.endMs = Math.max(1, ...racers.map((racer) => racer.endMs));
    this.range.max = this.endMs;
    this.range.disabled = this.button.disabled = !racers.length;
    this.seek(this.endMs);
  }

  // Those that end in the same millisecond share a place, and the next one is left out.
  place(racer) {
    const before = this.racers.filter(({ endMs }) => endMs < racer.endMs).length;
    return this.racers.length > 1 ? ["1st", "2nd", "3rd", "4th", "5th"][before] : "";
  }

  seek(ms) {
    this.ms = Math.min(Math.max(0, ms), this.endMs);
    for (const racer of this.racers) racer.seek(this.ms, this.place(racer));
    this.range.value = Math.round(this.ms);
    this.clock.textContent = `${seconds(Math.round(this.ms))} / ${seconds(this.endMs)}`;
  }

  toggle() { if (this.playing) this.pause(); else this.play(); }

  play() {
    if (!this.racers.length) return;
    if (this.ms >= this.endMs) this.seek(0);
    this.playing = true;
    this.button.textContent = "\u2016 Pause";
    this.lastFrame = null;
    requestAnimationFrame((now) => this.frame(now));
  }

  pause() {
    this.playing = false;
    this.button.textContent = "\u25b6 Race";
  }

  frame(now) {
    if (!this.playing) return;
    const passed = this.lastFrame === null ? 0 : now - this.lastFrame;
    this.lastFrame = now;
    this.seek(this.ms + passed * Number(this.speed.value));
    if (this.ms >= this.endMs) this.pause();
    else requestAnimationFrame((next) => this.frame(next));
  }
}
