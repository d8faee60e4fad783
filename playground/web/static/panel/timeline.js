// All steps of a run side by side, as in a trace viewer: height = tokens committed, parts = share of
// the time. A click picks a step; a drag selects several, whose sums are shown.
import { showTip } from "../about.js";
import { STEP_PARTS, ask, duration, h, perFrame, plural, swatch, textButton, visible } from "../kit.js";

/** @typedef {import("./text.js").Commit} Commit */

const HEIGHT = 54, TOP = 3, GAP_FROM = 4, CLICK_PX = 4, HOVER_MS = 120;
const COLOURS = ["--pg-prob", "--pg-target", "--pg-draft", "--pg-dim", "--pg-reject"];

const total = (parts) => parts.reduce((sum, part) => sum + part, 0);

/**
 * Indices of steps, the most instructive first: most accepted drafts beside a rejected one, then the
 * larger draft.
 * @param {Commit[]} steps
 */
export function mostInstructive(steps) {
  return sortedBy(steps, ([, , accepted, , , drafted]) =>
    [Number(accepted > 0 && drafted > accepted), accepted, drafted]);
}

/**
 * Indices of steps, the most wasteful first: the largest drafts of which the least was accepted.
 * @param {Commit[]} steps
 */
export function mostWasteful(steps) {
  return sortedBy(steps, ([, , accepted, , , drafted, ms]) => [drafted - accepted, total(ms)]);
}

/** Indices of steps in descending lexicographic order of their keys. */
function sortedBy(steps, keyOf) {
  const keys = steps.map(keyOf);
  const compared = (one, other) => {
    const at = one.findIndex((value, i) => value !== other[i]);
    return at < 0 ? 0 : one[at] - other[at];
  };
  return [...steps.keys()].sort((a, b) => compared(keys[b], keys[a]) || a - b);
}

export class Timeline {
  /**
   * @param {(index: number) => void} onPick
   * @param {Record<string, (question: object) => Promise<any>>} server sums up steps
   * @param {(index: number) => Promise<string>} explain how much a step drafted, and why
   */
  constructor(onPick, server, explain) {
    this.onPick = onPick;
    this.server = server;
    this.explain = explain;
    /** the sums over all steps, as the server words them */
    this.totalSummary = "";
    this.summaryKey = "";
    this.track = null;
    this.current = -1;
    /** @type {[number, number] | null} first and last step selected */
    this.selected = null;
    this.extremeRank = 0;
    this.draw = perFrame(() => { this.paint(); this.fetchSummary(); });
    this.canvas = h("canvas", { height: HEIGHT, role: "img", "aria-label": "steps of the run" });
    this.summary = h("span", { class: "timeline-words" });
    const key = h("div", { class: "legend timeline-key" },
      h("span", {}, "A bar per step: height = tokens committed; parts = share of its time:"),
      ...STEP_PARTS.map((name) => swatch(name, `part ${name}`)));
    this.tools = h("span", {});
    this.host = h("div", { class: "timeline" }, this.canvas, key, h("div", { class: "timeline-line" },
      this.summary, h("span", { class: "spring" }), this.tools,
      textButton("best", "the most accepted drafts beside a rejected one; again: the next (B)",
        () => this.goToExtreme(1)),
      textButton("worst", "the largest draft with the least accepted; again: the next (W)",
        () => this.goToExtreme(-1))));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get steps() { return this.track?.events.slice(1) ?? []; }

  listen() {
    let pressed = null;
    let hoverTimer;
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      pressed = { x: event.offsetX, step: this.stepAt(event.offsetX) };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const index = this.stepAt(event.offsetX);
      clearTimeout(hoverTimer);
      this.tip(index, event.clientX, "");
      if (!pressed && index >= 0) {
        const mine = hoverTimer = setTimeout(async () => {
          const why = await this.explain(index);
          if (mine === hoverTimer) this.tip(index, event.clientX, why);
        }, HOVER_MS);
      }
      if (!pressed || Math.abs(event.offsetX - pressed.x) < CLICK_PX) return;
      this.select(pressed.step, this.stepAt(event.offsetX));
    });
    canvas.addEventListener("pointerleave", () => {
      clearTimeout(hoverTimer);
      hoverTimer = undefined;
      showTip(null);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (pressed && Math.abs(event.offsetX - pressed.x) < CLICK_PX) {
        this.select(null);
        this.onPick(this.stepAt(event.offsetX));
      }
      pressed = null;
    });
  }

  /** Shows what a step did, where its time went, and why. */
  tip(index, left, why) {
    const step = this.steps[index], { top, bottom } = this.canvas.getBoundingClientRect();
    if (!step) return;
    const [, pieces, accepted, , , drafted, ms] = step;
    const parts = STEP_PARTS.flatMap((name, i) => ms[i] >= 0.05 ? [`${name} ${duration(ms[i])}`] : []);
    showTip({ left, top, bottom }, h("b", {}, `Step ${index + 1} of ${this.track?.numSteps}`),
      h("div", {}, `${accepted} of ${drafted} drafted accepted, ${plural(pieces.length, "token")} committed`),
      h("code", {}, visible(pieces.join(""))),
      h("div", {}, `${duration(total(ms))}: ${parts.join(", ")}`), h("div", { class: "why" }, why));
  }

  stepAt(x) {
    const count = this.steps.length, at = Math.floor(count * x / Math.max(1, this.canvas.clientWidth));
    return Math.max(0, Math.min(count - 1, at));
  }

  attach(track) {
    this.track = track;
    this.current = -1;
    this.select(null);
  }

  /** Marks the displayed step. */
  mark(index) {
    this.current = index;
    this.draw();
  }

  /** @param {number | null} first nothing is selected without it */
  select(first, /** @type {any} */ last = first) {
    this.selected = first === null ? null : [Math.min(first, last), Math.max(first, last)];
    this.draw();
  }

  /** Picks the best step, or the worst (-1); if it is displayed already, the next best. */
  goToExtreme(sign) {
    const order = (sign < 0 ? mostWasteful : mostInstructive)(this.steps);
    if (!order.length) return;
    this.extremeRank = order[this.extremeRank % order.length] === this.current ? this.extremeRank + 1 : 0;
    this.onPick(order[this.extremeRank % order.length]);
  }

  // Fetches the sums over the selected steps, once per selection.
  async fetchSummary() {
    const { track, selected } = this, count = this.steps.length;
    if (!track || !selected || selected[1] - selected[0] + 1 === count) {
      this.summaryKey = "";
      this.showSummary(count ? this.totalSummary : "");
      return;
    }
    const [first, last] = selected;
    const key = `${track.meta.id}/${first}/${last}`;
    if (key === this.summaryKey) return;
    this.summaryKey = key;
    const { text, error } = await ask(this.server.steps({ run: track.meta.id, first, last }));
    if (this.summaryKey === key) this.showSummary(error ?? `selected, ${first + 1} to ${last + 1}, ${text}`);
  }

  showSummary(text) {
    this.summary.textContent = text;
    this.canvas.setAttribute("aria-label", `steps of the run: ${text}`);
  }

  paint() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    if (!context || !width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    context.scale(ratio, ratio);
    const { steps } = this, style = getComputedStyle(this.canvas);
    if (!steps.length) return;
    const colours = COLOURS.map((name) => style.getPropertyValue(name));
    const most = Math.max(...steps.map(([, pieces]) => pieces.length)), each = width / steps.length;
    const wide = each >= GAP_FROM ? Math.min(each - 1, 24) : Math.max(1, each);
    steps.forEach(([, pieces, , , , , ms], i) => {
      let y = HEIGHT;
      const height = (HEIGHT - TOP) * pieces.length / most, all = total(ms) || 1;
      ms.forEach((part, at) => {
        const high = height * part / all;
        context.fillStyle = colours[at];
        context.fillRect(i * each, y -= high, wide, high);
      });
    });
    context.fillStyle = style.getPropertyValue("--color-accent");
    if (this.selected) {
      const [first, last] = this.selected;
      context.globalAlpha = 0.2;
      context.fillRect(first * each, 0, (last - first + 1) * each, HEIGHT);
      context.globalAlpha = 1;
    }
    if (this.current >= 0) context.fillRect(this.current * each, 0, Math.max(2, wide), TOP);
  }
}
