// The Compare page's results: the progress of the comparison, the race, and the panels.
import { show } from "../address.js";
import {
  ask, clip, h, onValue, part, plural, progressBar, showAlert, showProgress, wantsStill,
} from "../kit.js";
import { Panels } from "../panel/panels.js";
import { Race, Racer } from "./race.js";

const LOAD_MS = 40;
const FAILED = "failed";

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
    this.drawPrompts();
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
      new Racer(panel, panel.track, this.report.speedups[run] ?? ""));
    this.race.load(racers);
    this.component.element.dataset.final = "true";
    if (autoplay && !wantsStill() && racers.length > 1) { this.race.seek(0); this.race.play(); }
  }

  // A menu of the prompts, if there are several: the median runs of each can be raced.
  drawPrompts() {
    const { prompts } = this.race, [first] = this.panels.byRun.keys();
    const choices = this.report?.prompts ?? [];
    prompts.hidden = choices.length < 2;
    prompts.replaceChildren(...choices.map(([text, runs]) =>
      h("option", { selected: runs.includes(first) }, clip(text, 48))));
    prompts.onchange = () => this.raceRuns(choices[prompts.selectedIndex][1]);
  }

  /** @param {string[]} runs */
  async raceRuns(runs) {
    this.component.element.dataset.final = "false";
    const { server } = this.component;
    const answers = await Promise.all(runs.map((run) => ask(server.show({ run }))));
    const error = answers.find((answer) => answer.error)?.error;
    if (error) { showAlert(this.alert, error); return; }
    this.race.clear();
    this.panels.begin({ stream: `local ${runs[0]}`, resync: true,
      runs: answers.flatMap((answer) => answer.runs) });
    this.panels.resync();
    this.raceWhenComplete(false);
  }
}

export function mount(component, options) {
  const comparison = new Comparison(component, options);
  onValue(component, (message) => comparison.receive(message));
}
