// A panel: one run's title and state, its figures with their formulas, its text and its steps.
import { DASH, STEP_PARTS, duration, durations, h, milliseconds, number, percent, plural, splitWords }
  from "../kit.js";
import { Scrubber } from "./scrubber.js";
import { TokenText } from "./text.js";

/** @typedef {import("./text.js").Track} Track */
/** @typedef {Record<string, any>} Metrics */

/** @type {[key: string, title: string, words: (metrics: Metrics) => string][]} */
const FIGURES = [
  ["tok_s", "tok/s", (m) => number(m.tok_s, 1)],
  ["mat", "MAT", (m) => number(m.mat, 2)],
  ["draft_acceptance", "accepted", (m) => percent(m.draft_acceptance)],
  ["ttft_s", "TTFT", (m) => duration(1000 * (m.ttft_s ?? NaN))],
  ["itl_ms", "ITL", (m) => duration(m.itl_ms)],
  ["step_p95_ms", "step p50 / p95", (m) => durations(m.step_p50_ms, m.step_p95_ms)],
  ["num_new_tokens", "tokens / steps", (m) => `${m.num_new_tokens} / ${m.num_steps}`],
];
const MOST_RATES = 16;
const USELESS_DRAFTS = "Almost no draft is accepted: drafting only costs time here.";
const USELESS_AFTER_STEPS = 16, USELESS_MAT = 1.05;

/** Live figures of a run: numbers with their formulas, position rates, time split. */
class Figures {
  /** @param {Record<string, string>} formulas */
  constructor(formulas) {
    /** @type {Map<string, HTMLElement>} */
    this.values = new Map();
    const cells = FIGURES.map(([key, title]) => {
      const value = h("span", { class: "value", "data-figure": key }, DASH);
      this.values.set(key, value);
      const formula = formulas[key] ?? "new tokens, counted after any cut / steps of the loop";
      return h("div", { class: "figure", tabindex: "0", "aria-label": `${title}: ${formula}` },
        value, h("span", { class: "name" }, title), h("span", { class: "formula" }, formula));
    });
    this.rates = h("div", { class: "rates" });
    this.parts = STEP_PARTS.map((name) => h("i", { class: `part ${name}` }));
    this.splitWords = h("span", { class: "name" });
    const rates = h("div", { class: "figure wide", tabindex: "0" }, this.rates,
      h("span", { class: "name" }, "position rates"),
      h("span", { class: "formula" }, formulas.position_rates ?? ""));
    this.split = h("div", { class: "figure wide", tabindex: "0" },
      h("div", { class: "split" }, ...this.parts), this.splitWords,
      h("span", { class: "formula" }, formulas.time_split ?? ""));
    this.host = h("div", { class: "figures" }, ...cells, rates, this.split);
    this.show(null);
  }

  /** @param {Metrics | null} metrics */
  show(metrics) {
    for (const [key, , words] of FIGURES) {
      const text = metrics ? words(metrics) : DASH;
      const cell = this.values.get(key);
      if (cell && cell.textContent !== text) cell.textContent = text;
    }
    this.showRates(metrics?.position_rates ?? []);
    this.showSplit(metrics?.time_split ?? null);
  }

  /** @param {number[]} rates */
  showRates(rates) {
    const shown = rates.slice(0, MOST_RATES);
    while (this.rates.children.length > shown.length) this.rates.lastChild?.remove();
    while (this.rates.children.length < shown.length) {
      this.rates.append(h("i", { class: "rate" }, h("b")));
    }
    shown.forEach((rate, i) => {
      const bar = /** @type {HTMLElement} */ (this.rates.children[i]);
      /** @type {HTMLElement} */ (bar.firstChild).style.height = `${Math.max(3, 100 * rate)}%`;
      bar.title = `at least ${plural(i + 1, "draft token")} accepted in ${percent(rate)} of steps`;
    });
  }

  /** @param {Record<string, number> | null} split seconds by part */
  showSplit(split) {
    const seconds = STEP_PARTS.map((name) => split?.[`${name}_s`] ?? 0);
    const total = seconds.reduce((sum, part) => sum + part, 0);
    STEP_PARTS.forEach((name, i) => {
      this.parts[i].style.width = `${total > 0 ? 100 * seconds[i] / total : 0}%`;
      this.parts[i].title = total > 0 ? `${name} ${milliseconds(1000 * seconds[i])} ms` : name;
    });
    const words = split && total > 0 ? splitWords(split) : null;
    this.split.setAttribute("aria-label", `time per step: ${words ?? "unknown"}`);
    this.splitWords.textContent = words ?? "time split";
  }
}

export class Panel {
  /**
   * @param {{ formulas: Record<string, string>, placeholder: string }} given
   * @param {(run: string, index: number) => Promise<any>} fetchStep
   */
  constructor(given, fetchStep) {
    this.title = h("h3");
    this.badge = h("span", { class: "badge", hidden: true });
    this.state = h("span", { class: "state" });
    this.bar = h("i");
    this.progress = h("span", { class: "progress", hidden: true }, this.bar);
    this.link = h("a", { class: "quiet", hidden: true }, "permalink");
    this.copy = h("button", { type: "button", class: "quiet", hidden: true,
      onclick: () => navigator.clipboard?.writeText(this.track?.text ?? "") }, "copy text");
    this.hint = h("span", { class: "hint", hidden: true }, USELESS_DRAFTS);
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    this.clock = h("span", { class: "panel-clock" });
    this.figures = new Figures(given.formulas);
    const text = h("div", { class: "text", role: "log", tabindex: "0", "aria-label": "text",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) },
    h("div", { class: "placeholder" }, given.placeholder));
    this.text = new TokenText(text, (track, n) => this.scrubber.pick(track, n));
    this.scrubber = new Scrubber({ fetchStep,
      onStep: (track, n, reveal) => this.text.mark(track, n, reveal) });
    const showRejected = h("input", { type: "checkbox", onchange: () => {
      this.root.classList.toggle("show-rejected", showRejected.checked);
    } });
    this.root = h("section", { class: "panel" },
      h("header", {}, this.title, this.badge, this.state, this.progress, this.hint,
        h("span", { class: "spring" }), this.copy, this.link, this.clock),
      this.figures.host, this.alert, this.text.frame,
      h("div", { class: "legend" }, swatch("target", "prefill bonus"),
        swatch("target after a rejection", "recovered"),
        swatch("accepted draft, deeper = darker", ...[1, 3, 5, 8].map((depth) => `draft d${depth}`)),
        h("label", { class: "toggle" }, showRejected, " show rejected drafts")),
      this.scrubber.host,
      h("div", { class: "legend" }, swatch("accepted path", "k-path"), swatch("rejected", "k-off"),
        swatch("draft probability", "k-draft"), swatch("target probability", "k-target"),
        swatch("bonus or recovered token", "k-bonus")),
      this.scrubber.treeHost);
    /** @type {Track | null} */
    this.track = null;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.scrubber.go(this.scrubber.index + by);
  }

  /** @param {import("./text.js").RunFacts} meta */
  open(meta) {
    if (!this.text.tracks.size) this.text.host.replaceChildren();
    this.track = this.text.open(meta);
    this.title.textContent = meta.title;
    this.title.title = meta.target ? `${meta.title} on ${meta.target}` : meta.title;
    const kind = meta.lossless ? "lossless" : "lossy";
    this.badge.hidden = false;
    this.badge.textContent = kind;
    this.badge.className = `badge ${kind}`;
    this.showFigures(null);
    this.scrubber.attach(this.track);
    this.link.hidden = this.copy.hidden = true;
  }

  /** @param {Record<string, any>} status */
  status(status) {
    this.state.textContent = status.text;
    this.state.dataset.state = this.root.dataset.state = status.state;
    this.progress.hidden = !["loading", "queued", "prefill"].includes(status.state);
    this.progress.classList.toggle("unknown", status.progress == null);
    this.bar.style.width = status.progress == null ? "" : `${100 * status.progress}%`;
    this.fault(status.error, status.warning);
    if (status.log_id == null) return;
    const url = new URL(location.href);
    url.search = "";
    url.searchParams.set("run", status.log_id);
    this.link.href = url.href;
    this.link.hidden = false;
  }

  /** @param {Metrics | null} metrics */
  showFigures(metrics) {
    this.figures.show(metrics);
    this.hint.hidden = !(metrics && metrics.num_steps >= USELESS_AFTER_STEPS
      && metrics.num_drafted >= metrics.num_steps && metrics.mat < USELESS_MAT);
  }

  /**
   * @param {string | null} sentence
   * @param {string | null} [warning]
   */
  fault(sentence, warning = null) {
    this.alert.hidden = !(sentence || warning);
    this.alert.classList.toggle("warning", !sentence && Boolean(warning));
    this.alert.textContent = sentence ?? warning ?? "";
  }

  /**
   * Takes the next commit; one that is known already is passed over.
   * @param {import("./text.js").Commit} event
   * @returns {boolean} false where commits before this one are missing
   */
  take(event) {
    const { track } = this;
    if (!track || event[1] > track.events.length) return false;
    if (event[1] === track.events.length) this.text.append(track, event);
    return true;
  }

  /** @param {import("./text.js").End} end */
  finish(end) {
    if (!this.track || this.track.end) return;
    this.text.finish(this.track, end);
    this.scrubber.ended(this.track);
    this.copy.hidden = false;
  }
}

/**
 * @param {string} words
 * @param {string[]} kinds
 */
function swatch(words, ...kinds) {
  return h("span", { class: "swatch" }, ...kinds.map((kind) => h("i", { class: kind })), ` ${words}`);
}
