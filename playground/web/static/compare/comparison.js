// The Compare page's results: the progress of the comparison, the race, and the panels.
import { show } from "../address.js";
import {
  ask, clip, h, onValue, part, plural, progressBar, showAlert, showProgress, wantsStill,
} from "../kit.js";
import { Panels } from "../panel/panels.js";
import { Race, Racer } from "./race.js";

const LOAD_MS = 40;
const FAILED = "failed", MEDIAN = "median";

class Comparison {
  constructor(component, options) {
    this.component = component;
    const { element } = component;
    this.panels = new Panels(component, options);
    this.text = h("span", { class: "compare-text", role: "status" });
    this.progress = progressBar();
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    this.setup = h("span", { class: "compare-setup" });
    const steps = h("input", { type: "checkbox",
      onchange: () => { element.dataset.steps = String(steps.checked); } });
    part(element, ".compare-head").append(h("div", { class: "compare-state" }, this.text,
      this.progress, h("span", { class: "spring" }), this.setup,
      h("label", { class: "toggle" }, steps, " steps and trees")), this.alert);
    this.race = new Race(part(element, ".compare-race"));
    this.report = null;
    this.reportText = "";
    this.racedStream = null;
    this.wasRunning = false;
  }

  /** @param {any} message the component's value */
  receive(message) {
    this.panels.receive(message);
    if (!message?.compare) return;
    const state = JSON.parse(message.compare);
    if (message.report !== this.reportText) {
      this.reportText = message.report;
      this.report = this.reportText ? JSON.parse(this.reportText) : null;
    }
    this.showState(state);
    // The page's URL names the comparison, so a reload or a copied link opens it again.
    if (state.id) show("compare", { compare: state.id }, true);
    if (!state.final) {
      this.wasRunning = true;
      this.racedStream = null;
      this.race.clear();
      return;
    }
    if (this.racedStream === message.stream) return;
    this.racedStream = message.stream;
    this.component.element.dataset.final = "false";
    this.drawPickers();
    this.raceWhenComplete(this.wasRunning && state.state === "completed");
    this.wasRunning = false;
  }

  /**
   * @param {{ text: string, state: string, error: string | null, final?: boolean,
   *   progress?: number | null }} where a comparison is
   */
  showState({ text, state, error, final = false, progress = null }) {
    this.text.textContent = text;
    this.text.dataset.state = state;
    this.progress.hidden = final || state === FAILED;
    showProgress(this.progress, progress);
    showAlert(this.alert, error);
    const repeats = final ? ` \u00b7 ${plural(this.report?.num_repeats ?? 0, "repeat")}` : "";
    this.setup.textContent = this.report ? this.report.setup + repeats : "";
  }

  // Starts the race as soon as every panel has its complete text.
  async raceWhenComplete(autoplay) {
    const { panels } = this, stream = panels.stream;
    const complete = () => [...panels.byRun.values()].every(({ track }) => track?.end);
    while (stream === panels.stream && !complete()) {
      await new Promise((resolve) => { setTimeout(resolve, LOAD_MS); });
    }
    if (stream !== panels.stream) return;
    const racers = [...panels.byRun].map(([run, panel]) =>
      new Racer(panel, panel.track, this.speedupOf(run)));
    this.race.load(racers);
    this.component.element.dataset.final = "true";
    if (autoplay && !wantsStill() && racers.length > 1) { this.race.seek(0); this.race.play(); }
  }

  /** The speedup of a run's configuration, exactly as in the table. */
  speedupOf(run) {
    const row = this.report.runs.find((one) => one[3] === run);
    return this.report.configurations.find(({ name }) => name === row?.[2])?.speedup ?? "";
  }

  // Menus for prompt and repeat if there are several; the default is the median repeat.
  drawPickers() {
    this.race.pickers.replaceChildren();
    if (!this.report) return;
    const { prompts, num_repeats, runs } = this.report, [first] = this.panels.byRun.keys();
    const pick = (label, choices, value) => {
      const box = h("select", { "aria-label": label,
        onchange: () => this.raceRuns(prompt.value, repeat.value) },
      ...choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
      if (choices.length > 1) this.race.pickers.append(box);
      return box;
    };
    const prompt = pick("prompt of the race", prompts.map(([name, text]) => [name, clip(text, 48)]),
      runs.find((row) => row[3] === first)?.[0]);
    const repeats = Array.from({ length: num_repeats }, (_, i) => [String(i), `repeat ${i + 1}`]);
    const repeat = pick("repeat of the race",
      num_repeats > 1 ? [[MEDIAN, "median repeats"], ...repeats] : repeats, MEDIAN);
  }

  /** @param {string} repeat a number, or the median of each configuration */
  async raceRuns(prompt, repeat) {
    const { configurations, medians, runs } = this.report;
    const wanted = repeat === MEDIAN ? medians[prompt] ?? [] : configurations.flatMap(({ name }) =>
      runs.filter((row) => row[0] === prompt && String(row[1]) === repeat && row[2] === name)
        .map((row) => row[3]));
    if (!wanted.length) return;
    this.component.element.dataset.final = "false";
    const { server } = this.component;
    const answers = await Promise.all(wanted.map((run) => ask(server.show({ run }))));
    const error = answers.find((answer) => answer.error)?.error;
    if (error) { showAlert(this.alert, error); return; }
    this.race.clear();
    this.panels.begin({ stream: `local ${wanted[0]}`, resync: true,
      runs: answers.flatMap((answer) => answer.runs) });
    this.panels.resync();
    this.raceWhenComplete(false);
  }
}

export function mount(component, options) {
  const comparison = new Comparison(component, options);
  onValue(component, (message) => comparison.receive(message));
}
