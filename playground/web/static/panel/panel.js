// A panel: one run's title and state, its figures with their formulas, its text and its steps.
import {
  DASH, STEP_PARTS, ask, download, duration, figure, h, percent, plural, remember, remembered,
  showProgress, toClipboard,
} from "../kit.js";
import { Acceptance } from "./acceptance.js";
import { Scrubber } from "./scrubber.js";
import { TokenText } from "./text.js";

/** @type {[key: string, title: string][]} */
const FIGURES = [
  ["tok_s", "tok/s"], ["mat", "MAT"], ["draft_acceptance", "accepted"], ["ttft_s", "TTFT"],
  ["num_prompt_tokens", "read / cached"], ["itl_ms", "ITL"], ["step_p95_ms", "step p50 / p95"],
  ["num_new_tokens", "tokens / steps"],
];
const PART_KEYS = ["draft_s", "verify_s", "accept_s", "other_s", "rollback_s"];
const MOST_RATES = 16;
const SAID_MS = 2000;
const BADGES = {
  lossless: "writes what the target alone would write",
  "may differ at near-ties": "this target is computed in 16 bits by transformers' modules, where "
    + "a row is rounded differently among others: where two tokens are almost equally likely, the "
    + "text may leave plain decoding's. Choose float32 for equal texts",
  lossy: "accepts other tokens than the target's own, by design",
};

/** Live figures of a run: numbers with their formulas, position rates, time split. */
class Figures {
  constructor(formulas) {
    this.values = FIGURES.map(([key]) => h("span", { class: "value", "data-figure": key }, DASH));
    const cells = FIGURES.map(([key, title], i) => figure(formulas[key], this.values[i],
      h("span", { class: "name" }, title)));
    this.rates = h("div", { class: "rates" });
    this.parts = STEP_PARTS.map((name) => h("i", { class: `part ${name}` }));
    this.splitText = h("span", { class: "name" });
    const rates = figure(formulas.position_rates, this.rates,
      h("span", { class: "name" }, "position rates"));
    this.split = figure(formulas.time_split,
      h("div", { class: "split" }, ...this.parts), this.splitText);
    for (const wide of [rates, this.split]) wide.classList.add("wide");
    this.host = h("div", { class: "figures" }, ...cells, rates, this.split);
    this.show(null);
  }

  show(metrics) {
    FIGURES.forEach(([key], i) => {
      const text = metrics?.texts[key] ?? DASH;
      if (this.values[i].textContent !== text) this.values[i].textContent = text;
    });
    this.showRates(metrics?.position_rates ?? []);
    this.showSplit(metrics?.time_split ?? null, metrics?.texts.time_split ?? "time split");
  }

  showRates(rates) {
    const shown = rates.slice(0, MOST_RATES);
    while (this.rates.children.length > shown.length) this.rates.lastChild?.remove();
    while (this.rates.children.length < shown.length) {
      this.rates.append(h("i", { class: "rate" }, h("b")));
    }
    shown.forEach((rate, i) => {
      const bar = /** @type {HTMLElement} */ (this.rates.children[i]);
      /** @type {HTMLElement} */ (bar.firstChild).style.height = `${Math.max(3, 100 * rate)}%`;
      bar.dataset.about = `at least ${plural(i + 1, "draft token")} accepted in ${percent(rate)} of steps`;
    });
  }

  /**
   * @param {Record<string, number> | null} split seconds by part
   * @param {string} text
   */
  showSplit(split, text) {
    STEP_PARTS.forEach((name, i) => {
      const seconds = split?.[PART_KEYS[i]] ?? 0;
      this.parts[i].style.flexGrow = String(1e6 * seconds);
      this.parts[i].dataset.about = split ? `${name} ${duration(1000 * seconds)}` : name;
    });
    this.splitText.textContent = text;
  }
}

/** @typedef {(event: "compare" | "by_text", data?: object) => void} Trigger of the component */

/** What the run was worth beside plain decoding, in a sentence from the server. */
class Result {
  /** @param {Trigger | null} trigger */
  constructor(trigger) {
    this.words = h("span", { class: "result-words" });
    this.compare = h("button", { type: "button", class: "result-compare", hidden: true,
      onclick: () => trigger?.("compare", { run: this.run }) }, "Compare with plain");
    this.offers = trigger !== null;
    this.host = h("div", { class: "result" }, this.words, this.compare);
    this.run = "";
  }

  show(result) {
    this.host.dataset.mood = result?.mood ?? "";
    this.words.replaceChildren(...!result ? [] : [h("b", {}, result.head), ` ${result.text} `,
      result.advice && `${result.advice} `, h("span", { class: "result-source" }, result.source)]);
  }

  /** @param {string} run its id in the log, once it is over */
  ended(run) {
    this.run = run;
    this.compare.hidden = !this.offers || this.host.dataset.mood === "plain";
  }
}

/** Whether rejected drafts are shown: one switch for all panels, remembered by the browser. */
const REJECTED = "pg-rejected";

export class Panel {
  /**
   * @param {import("./panels.js").Given} given
   * @param {import("./scrubber.js").Fetch} fetch
   * @param {Trigger | null} [trigger]
   */
  constructor(given, fetch, trigger = null) {
    this.tab = given.tab;
    this.title = h("h3");
    this.on = h("span", { class: "on-target" });
    this.badge = h("span", { class: "badge", hidden: true });
    this.state = h("span", { class: "state" });
    this.progress = h("span", { class: "progress", hidden: true }, h("i"));
    this.link = h("a", { class: "quiet", hidden: true }, "permalink");
    this.copy = h("button", { type: "button", class: "quiet", hidden: true, "aria-live": "polite",
      onclick: () => this.copyText() }, "copy text");
    this.result = new Result(trigger);
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    this.byText = h("button", { type: "button", class: "by-text", onclick: () => trigger?.("by_text"),
      title: "its text is tokenized again for the target" }, "Use text");
    this.clock = h("span", { class: "panel-clock" });
    this.notes = h("div", { class: "notes" });
    this.figures = new Figures(given.formulas);
    const text = h("div", { class: "text", role: "log", tabindex: "0", "aria-label": "text",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) },
    h("div", { class: "placeholder" }, given.placeholder));
    this.text = new TokenText(text, (track, n) => this.scrubber.pick(track, n),
      (track, n, i) => this.scrubber.pointAt(track, n, i));
    this.scrubber = new Scrubber({ ...fetch,
      onStep: (track, n, reveal) => this.text.mark(track, n, reveal),
      onPoint: (track, n, i) => this.text.point(track, n, i) });
    this.lengths = new Acceptance();
    this.scrubber.timeline.tools.append(this.lengths.button, h("button", { type: "button", class: "quiet",
      title: "every step as slices, for Perfetto (ui.perfetto.dev) or chrome://tracing",
      onclick: () => this.saveTrace(fetch) }, "Chrome trace"));
    const shows = remembered(REJECTED) !== "hidden";
    const showRejected = h("input", { type: "checkbox", checked: shows, onchange: () => {
      this.root.classList.toggle("show-rejected", showRejected.checked);
      remember(REJECTED, showRejected.checked ? "shown" : "hidden");
    } });
    this.root = h("section", { class: shows ? "panel idle show-rejected" : "panel idle" },
      h("header", {}, this.title, this.on, this.badge, this.state, this.progress,
        h("span", { class: "spring" }), this.copy, this.link, this.clock),
      this.figures.host, this.alert, this.text.frame, this.result.host, this.notes,
      h("div", { class: "legend" }, swatch("target", "prefill bonus"),
        swatch("target after a rejection", "recovered"),
        swatch("accepted draft, deeper = darker", ...[1, 3, 5, 8].map((depth) => `draft d${depth}`)),
        h("label", { class: "toggle" }, showRejected, " rejected drafts, above the text")),
      this.scrubber.timeline.host, this.lengths.host, this.scrubber.host,
      h("div", { class: "legend" }, swatch("accepted path", "k-path"), swatch("rejected", "k-off"),
        swatch("draft probability", "k-draft"), swatch("target probability", "k-target"),
        swatch("bonus or recovered token", "k-bonus")),
      this.scrubber.tree.host);
    /** @type {import("./text.js").Track | null} */
    this.track = null;
  }

  async saveTrace({ fetchTrace }) {
    if (!this.track) return;
    const { error, text, name } = await ask(fetchTrace(this.track.meta.id));
    if (error) this.fault(error);
    else download(name, text);
  }

  async copyText() {
    const copied = await toClipboard(this.track?.text ?? "");
    this.copy.textContent = copied ? "copied" : "not copied: the browser does not allow it here";
    setTimeout(() => { this.copy.textContent = "copy text"; }, SAID_MS);
  }

  key(event) {
    const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
    if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.scrubber.go(this.scrubber.index + by);
  }

  open(meta) {
    if (!this.text.tracks.size) this.text.host.replaceChildren();
    this.root.classList.remove("idle");
    this.track = this.text.open(meta);
    this.title.textContent = meta.title;
    this.title.title = meta.title;
    this.on.textContent = this.on.title = meta.target ? `on ${meta.target}` : "";
    this.mark(meta.badge);
    this.showFigures(null);
    this.scrubber.attach(this.track);
    this.link.hidden = this.copy.hidden = this.result.compare.hidden = true;
  }

  mark(badge) {
    this.badge.hidden = !badge;
    this.badge.textContent = badge ?? "";
    this.badge.className = `badge ${badge === "lossless" ? badge : "lossy"}`;
    this.badge.title = BADGES[badge] ?? "";
  }

  status(status) {
    if (status.badge) this.mark(status.badge);
    this.state.textContent = status.text;
    this.state.dataset.state = this.root.dataset.state = status.state;
    this.progress.hidden = !["loading", "queued", "prefill"].includes(status.state);
    showProgress(this.progress, status.progress ?? null);
    this.fault(status.error, status.warning);
    if (status.by_text && this.tab) this.alert.append(this.byText);
    this.notes.replaceChildren(...(status.notes ?? []).map((note) => h("p", {}, note)));
    if (status.log_id == null) return;
    const url = new URL(location.href);
    url.search = this.tab ? `tab=${this.tab}` : "";
    url.searchParams.set("run", status.log_id);
    this.link.href = url.href;
    this.link.hidden = false;
    if (status.state === "completed") this.result.ended(status.log_id);
  }

  showFigures(metrics) {
    this.figures.show(metrics);
    this.lengths.show(metrics);
    this.result.show(metrics?.result);
    this.scrubber.timeline.whole = metrics?.texts.steps ?? "";
  }

  fault(sentence, warning = null) {
    this.alert.hidden = !(sentence || warning);
    this.alert.classList.toggle("warning", !sentence && Boolean(warning));
    this.alert.textContent = sentence ?? warning ?? "";
  }

  /**
   * Takes the next commit; one that is known already is passed over.
   * @returns {boolean} false where commits before this one are missing
   */
  take(event) {
    const { track } = this;
    if (!track || event[1] > track.events.length) return false;
    if (event[1] === track.events.length) this.text.append(track, event);
    return true;
  }

  finish(end) {
    if (!this.track || this.track.end) return;
    this.text.finish(this.track, end);
    this.scrubber.ended(this.track);
    this.copy.hidden = false;
  }
}

function swatch(words, ...kinds) {
  return h("span", { class: "swatch" }, ...kinds.map((kind) => h("i", { class: kind })), ` ${words}`);
}
