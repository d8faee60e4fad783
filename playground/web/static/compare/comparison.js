// The Compare page's results: how far the comparison is, the race, and the panels.
import { show } from "../address.js";
import { ask, clip, h, part, plural } from "../kit.js";
import { LOOK_MS, Panels } from "../panel/panels.js";
import { Race, Racer } from "./race.js";

/** @typedef {import("../kit.js").Component} Component */
/** @typedef {import("../panel/panels.js").Given} Given */

/**
 * Where a comparison is.
 * @typedef {{ id: string | null, text: string, state: string, final: boolean,
 *   progress: number | null, error: string | null }} State
 */

const LOAD_MS = 40;
const FAILED = "failed", MEDIAN = "median";
const NO_ANSWER = { id: null, text: "no answer", state: FAILED, final: false, progress: null };

class Comparison {
  /**
   * @param {Component} component
   * @param {Given} given
   */
  constructor(component, given) {
    this.component = component;
    const { element } = component;
    this.panels = new Panels(component, given);
    this.text = h("span", { class: "compare-text", role: "status" });
    this.bar = h("i");
    this.progress = h("span", { class: "progress", hidden: true }, this.bar);
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    this.setup = h("span", { class: "compare-setup" });
    this.link = h("a", { class: "quiet", hidden: true }, "permalink");
    const steps = h("input", { type: "checkbox",
      onchange: () => { element.dataset.steps = String(steps.checked); } });
    part(element, ".compare-head").append(h("div", { class: "compare-state" }, this.text,
      this.progress, h("span", { class: "spring" }), this.setup,
      h("label", { class: "toggle" }, steps, " steps and trees"), this.link), this.alert);
    this.race = new Race(part(element, ".compare-race"));
    /** @type {any} */
    this.report = null;
    this.reportText = "";
    /** @type {string | null} */
    this.raced = null;
    this.wasRunning = false;
    setInterval(() => this.look(), LOOK_MS);
  }

  // Asks whether the server is there while a comparison goes on and nothing comes of it.
  async look() {
    if (!this.wasRunning || !this.panels.isSilent) return;
    const answer = await ask(this.component.server.clocks({ runs: ["-"] }));
    if (answer.gone && this.wasRunning) this.showState({ ...NO_ANSWER, error: answer.error });
  }

  /** @param {any} message what the component's value is now */
  receive(message) {
    this.panels.receive(message);
    if (!message?.compare) return;
    /** @type {State} */
    const state = JSON.parse(message.compare);
    if (message.report !== this.reportText) {
      this.reportText = message.report;
      this.report = this.reportText ? JSON.parse(this.reportText) : null;
    }
    this.showState(state);
    this.linkTo(state.id);
    if (!state.final) {
      this.wasRunning = true;
      this.raced = null;
      this.race.follow(this.panels.panels.flatMap(({ track }) => track ?? []));
      return;
    }
    if (this.raced === message.stream) return;
    this.raced = message.stream;
    this.component.element.dataset.final = "false";
    this.drawPickers();
    this.startWhenWhole(this.wasRunning && state.state === "completed");
    this.wasRunning = false;
  }

  /** @param {State} state */
  showState(state) {
    this.text.textContent = state.text;
    this.text.dataset.state = state.state;
    this.progress.hidden = state.final || state.state === FAILED;
    this.progress.classList.toggle("unknown", state.progress == null);
    this.bar.style.width = state.progress == null ? "" : `${100 * state.progress}%`;
    this.complain(state.error);
    const repeats = state.final ? ` \u00b7 ${plural(this.report?.num_repeats ?? 0, "repeat")}` : "";
    this.setup.textContent = this.report ? this.report.setup + repeats : "";
  }

  /** @param {string | null} sentence */
  complain(sentence) {
    this.alert.hidden = !sentence;
    this.alert.textContent = sentence ?? "";
  }

  /**
   * The address of the page becomes the comparison's, so that a reload or a copy finds it again.
   * @param {string | null} id
   */
  linkTo(id) {
    this.link.hidden = !this.report;
    if (id) this.link.href = show("compare", { compare: id }, true);
  }

  /**
   * Races as soon as every panel has its whole text.
   * @param {boolean} autoplay
   */
  async startWhenWhole(autoplay) {
    const { panels } = this, asked = panels.stream;
    const whole = () => [...panels.byRun.values()].every(({ track }) => track?.end);
    while (asked === panels.stream && !whole()) {
      await new Promise((resolve) => { setTimeout(resolve, LOAD_MS); });
    }
    if (asked !== panels.stream) return;
    const runs = [...panels.byRun.keys()];
    const answer = runs.length ? await ask(this.component.server.clocks({ runs })) : { clocks: [] };
    if (asked !== panels.stream) return;
    if (answer.error) { this.complain(answer.error); return; }
    const racers = answer.clocks.flatMap((/** @type {import("./race.js").Clock} */ clock) => {
      const panel = panels.byRun.get(clock.run);
      return panel?.track ? new Racer(clock, panel, panel.track, this.speedupOf(clock.run)) : [];
    });
    this.race.load(racers);
    this.component.element.dataset.final = "true";
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (autoplay && !still && racers.length > 1) { this.race.seek(0); this.race.play(); }
  }

  /**
   * The table's figure for a run's configuration, word for word.
   * @param {string} run
   */
  speedupOf(run) {
    const row = this.report.runs.find((/** @type {any[]} */ one) => one[3] === run);
    const own = this.report.configurations.find((/** @type {any} */ one) => one.name === row?.[2]);
    return own?.speedup ?? "";
  }

  // Which prompt and repeat is raced, where there are several; the median repeat unless another is picked.
  drawPickers() {
    this.race.pickers.replaceChildren();
    if (!this.report) return;
    const [first] = this.panels.byRun.keys();
    const shown = this.report.runs.find((/** @type {any[]} */ row) => row[3] === first) ?? [];
    /** @type {(label: string, choices: [string, string][], value: string) => HTMLSelectElement} */
    const pick = (label, choices, value) => {
      const box = h("select", { "aria-label": label, onchange: () => this.raceOther(
        prompt.value, repeat.value) },
      ...choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
      if (choices.length > 1) this.race.pickers.append(box);
      return box;
    };
    const prompt = pick("prompt of the race", this.report.prompts.map(
      (/** @type {[string, string]} */ [name, text]) => [name, clip(text, 48)]), shown[0]);
    /** @type {[string, string][]} */
    const repeats = Array.from({ length: this.report.num_repeats },
      (_, i) => [String(i), `repeat ${i + 1}`]);
    const all = repeats.length > 1 ? [[MEDIAN, "median repeats"], ...repeats] : repeats;
    const repeat = pick("repeat of the race", /** @type {[string, string][]} */ (all), MEDIAN);
  }

  /**
   * @param {string} prompt
   * @param {string} repeat a number, or the median of each configuration
   */
  async raceOther(prompt, repeat) {
    const { configurations, medians, runs } = this.report;
    /** @type {string[]} */
    const wanted = repeat === MEDIAN ? medians[prompt] ?? []
      : configurations.flatMap((/** @type {{ name: string }} */ { name }) =>
        runs.filter((/** @type {any[]} */ row) => row[0] === prompt && String(row[1]) === repeat
          && row[2] === name).map((/** @type {any[]} */ row) => row[3]));
    if (!wanted.length) return;
    this.component.element.dataset.final = "false";
    const answer = await ask(this.component.server.metas({ runs: wanted }));
    if (answer.error) { this.complain(answer.error); return; }
    this.race.clear();
    this.panels.begin({ stream: `local ${wanted[0]}`, runs: answer.runs, resync: true });
    this.panels.resync();
    this.startWhenWhole(false);
  }
}

/**
 * @param {Component} component
 * @param {Given} given
 */
export function mount(component, given) {
  const comparison = new Comparison(component, given);
  const receive = () => comparison.receive(component.props.value);
  component.watch("value", receive);
  receive();
}
