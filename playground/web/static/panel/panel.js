// A panel: one run's title and state, figures with their formulas, text and steps.
import {
  DASH, STEP_PARTS, actionButton, ask, copyButton, download, duration, figure, h, part, percent,
  plural, progressBar, remember, remembered, showAlert, showProgress, swatch, textButton,
} from "../kit.js";
import { Scrubber } from "./scrubber.js";
import { TokenText } from "./text.js";

const FIGURES = ["tok_s", "mat", "draft_acceptance", "ttft_s", "num_prompt_tokens", "itl_ms",
  "step_p95_ms", "num_new_tokens"];
const PART_KEYS = ["draft_s", "verify_s", "accept_s", "other_s", "rollback_s"];
const MAX_RATES = 16;
const BADGES = {
  lossless: "writes what the target alone would write",
  "may differ at near-ties": "this target is computed in 16 bits by transformers' modules, where "
    + "rounding depends on the number of rows: where two tokens are almost equally likely, the text "
    + "may differ from plain decoding's. Choose float32 for identical texts",
  lossy: "by design accepts tokens that the target would not have chosen",
};

/** Live figures of a run: numbers with their formulas, position rates, time split. */
class Figures {
  /** @param {Record<string, [string, string]>} figures title and formula of each */
  constructor(figures) {
    this.values = FIGURES.map((key) => h("span", { class: "value", "data-figure": key }, DASH));
    const show = (key, value, [title, formula] = figures[key]) => figure(formula, value, title);
    const cells = FIGURES.map((key, i) => show(key, this.values[i]));
    this.rates = h("div", { class: "rates" });
    this.parts = STEP_PARTS.map((name) => h("i", { class: `part ${name}` }));
    const rates = show("position_rates", this.rates);
    const split = show("time_split", h("div", { class: "split" }, ...this.parts));
    this.splitText = part(split, ".name");
    this.splitTitle = this.splitText.textContent;
    for (const wide of [rates, split]) wide.classList.add("wide");
    this.host = h("div", { class: "figures" }, ...cells, rates, split);
    this.show(null);
  }

  show(metrics) {
    FIGURES.forEach((key, i) => {
      const text = metrics?.texts[key] ?? DASH;
      if (this.values[i].textContent !== text) this.values[i].textContent = text;
    });
    const rates = metrics?.position_rates ?? [], split = metrics?.time_split;
    this.rates.replaceChildren(...rates.slice(0, MAX_RATES).map((rate, i) => h("i", { class: "rate",
      "data-about": `at least ${plural(i + 1, "draft token")} accepted in ${percent(rate)} of steps` },
    h("b", { style: `height: ${Math.max(3, 100 * rate)}%` }))));
    STEP_PARTS.forEach((name, i) => {
      const seconds = split?.[PART_KEYS[i]] ?? 0;
      this.parts[i].style.flexGrow = String(1e6 * seconds);
      this.parts[i].dataset.about = split ? `${name} ${duration(1000 * seconds)}` : name;
    });
    this.splitText.textContent = metrics?.texts.time_split ?? this.splitTitle;
  }
}

/**
 * Steps by how many drafts they accepted: 0, 1, 2, ….
 * @param {number[]} atLeast steps that accepted at least 1, 2, … drafts
 */
export function lengthCounts(atLeast, numSteps) {
  return [numSteps, ...atLeast].map((count, i) => count - (atLeast[i] ?? 0));
}

function bars(title, shares, first) {
  const most = Math.max(...shares, 0.01);
  return h("figure", { class: "bars" }, h("figcaption", {}, title),
    h("div", { class: "bars-row" }, ...shares.slice(0, MAX_RATES).map((share, i) =>
      h("span", { class: "bar" }, h("small", {}, percent(share)),
        h("i", { style: `height: ${Math.max(2, 56 * share / most)}px` }), h("small", {}, `${first + i}`)))));
}

/** Charts of the accepted length: a bar per position, and a bar per length. */
class Acceptance {
  metrics = null;

  constructor() {
    this.host = h("div", { class: "acceptance", hidden: true });
    const title = "acceptance by position, and how many drafts steps accepted";
    this.button = textButton("acceptance", title, () => {
      this.host.hidden = !this.host.hidden;
      this.button.setAttribute("aria-expanded", String(!this.host.hidden));
      this.show(this.metrics);
    }, { "aria-expanded": "false" });
  }

  show(metrics) {
    this.metrics = metrics;
    if (this.host.hidden || !metrics) return;
    const steps = metrics.num_steps, counts = lengthCounts(metrics.at_least ?? [], steps);
    this.host.replaceChildren(...!steps ? ["No steps yet."] : [
      bars("Steps that accepted at least so many drafts", metrics.position_rates ?? [], 1),
      bars(`Accepted drafts of a step, of ${plural(steps, "step")}`,
        counts.map((count) => count / steps), 0)]);
  }
}

/** Storage key of the switch that shows rejected drafts, the same for all panels. */
const REJECTED = "pg-rejected";

export class Panel {
  /**
   * @param {{ figures: Record<string, [string, string]>, placeholder: string, tab?: string | null }} options
   * @param {import("../kit.js").Component} component
   */
  constructor(options, { server, trigger }) {
    this.server = server;
    this.tab = options.tab;
    this.title = h("h3");
    this.on = h("span", { class: "on-target" });
    this.badge = h("span", { class: "badge", hidden: true });
    this.state = h("span", { class: "state" });
    this.progress = progressBar();
    this.link = h("a", { class: "quiet", hidden: true }, "permalink");
    this.copy = copyButton("copy text", () => this.track?.text ?? "");
    this.copy.hidden = true;
    this.resultWords = h("span", { class: "result-words" });
    this.compare = actionButton("Compare with plain", () => trigger("compare", { run: this.logId }),
      { hidden: true });
    this.result = h("div", { class: "result" }, this.resultWords, this.compare);
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    this.byText = actionButton("Use text", () => trigger("by_text"),
      { title: "its text is tokenized again for the target" });
    this.clock = h("span", { class: "panel-clock" });
    this.notes = h("div", { class: "notes" });
    this.figures = new Figures(options.figures);
    const text = h("div", { class: "text", role: "log", tabindex: "0", "aria-label": "text" },
      h("div", { class: "placeholder" }, options.placeholder));
    this.text = new TokenText(text, (track, n) => this.scrubber.showCommit(track, n),
      (track, n, i) => this.scrubber.highlightNode(track, n, i));
    this.scrubber = new Scrubber(server, this.text);
    this.acceptance = new Acceptance();
    this.scrubber.timeline.tools.append(this.acceptance.button, textButton("Chrome trace",
      "every step as slices, for Perfetto (ui.perfetto.dev) or chrome://tracing", () => this.saveTrace()));
    const shows = remembered(REJECTED) !== "hidden";
    const showRejected = h("input", { type: "checkbox", checked: shows, onchange: () => {
      this.root.classList.toggle("show-rejected", showRejected.checked);
      remember(REJECTED, showRejected.checked ? "shown" : "hidden");
    } });
    this.root = h("section", { class: shows ? "panel idle show-rejected" : "panel idle" },
      h("header", {}, this.title, this.on, this.badge, this.state, this.progress,
        h("span", { class: "spring" }), this.copy, this.link, this.clock),
      this.figures.host, this.alert, text, this.result, this.notes,
      h("div", { class: "legend" }, swatch("target", "prefill bonus"),
        swatch("target after a rejection", "recovered"),
        swatch("accepted draft, deeper = darker", ...[1, 3, 5, 8].map((depth) => `draft d${depth}`)),
        h("label", { class: "toggle" }, showRejected, " rejected drafts, above the text")),
      this.scrubber.timeline.host, this.acceptance.host, this.scrubber.host,
      h("div", { class: "legend" }, swatch("accepted path", "k-path"), swatch("rejected", "k-off"),
        swatch("draft probability", "k-draft"), swatch("target probability", "k-target"),
        swatch("bonus or recovered token", "k-bonus")),
      this.scrubber.tree.host);
    this.track = null;
  }

  async saveTrace() {
    if (!this.track) return;
    const { error, text, name } = await ask(this.server.trace({ run: this.track.meta.id }));
    if (error) this.fault(error);
    else download(name, text);
  }

  open(meta) {
    if (!this.text.tracks.size) this.text.host.replaceChildren();
    this.root.classList.remove("idle");
    this.track = this.text.open(meta);
    this.title.textContent = this.title.title = meta.title;
    this.on.textContent = this.on.title = meta.target ? `on ${meta.target}` : "";
    this.mark(meta.badge);
    this.showFigures(null);
    this.scrubber.attach(this.track);
    this.link.hidden = this.copy.hidden = this.compare.hidden = true;
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
    this.link.href = `?${new URLSearchParams({ ...this.tab && { tab: this.tab }, run: status.log_id })}`;
    this.link.hidden = false;
    if (status.state !== "completed") return;
    this.logId = status.log_id;
    this.compare.hidden = this.result.dataset.mood === "plain";
  }

  showFigures(metrics) {
    this.figures.show(metrics);
    this.acceptance.show(metrics);
    const result = metrics?.result;
    this.result.dataset.mood = result?.mood ?? "";
    this.resultWords.replaceChildren(...!result ? [] : [h("b", {}, result.head), ` ${result.text} `,
      result.advice && `${result.advice} `, h("span", { class: "result-source" }, result.source)]);
    this.scrubber.timeline.totalSummary = metrics?.texts.steps ?? "";
  }

  fault(sentence, warning = null) {
    showAlert(this.alert, sentence ?? warning);
    this.alert.classList.toggle("warning", !sentence && Boolean(warning));
  }

  /**
   * Adds the next commit; a known one is ignored.
   * @returns {boolean} false if commits before this one are missing
   */
  take(event) {
    const { track } = this;
    if (!track || event[0] > track.events.length) return false;
    if (event[0] === track.events.length) this.text.append(track, event);
    return true;
  }

  finish(end) {
    if (!this.track || this.track.end) return;
    this.text.finish(this.track, end);
    this.scrubber.finish(this.track);
    this.copy.hidden = false;
  }
}
