// All steps of a run side by side, as a trace viewer draws them: height = tokens committed, parts =
// where the time went. A click picks a step, a drag selects some, whose sums are told.
import { STEP_PARTS, ask, duration, h, plural, visible } from "../kit.js";

/** @typedef {import("./text.js").Commit} Commit */
/** @typedef {import("./text.js").Track} Track */

const HEIGHT = 54, TOP = 3, GAP_FROM = 4, CLICK_PX = 4, LEAST_SHOWN = 8, ZOOM = 2, REST_MS = 120;
const COLOURS = ["--pg-prob", "--pg-target", "--pg-draft", "--pg-dim", "--pg-reject"];

/** @param {number[]} parts */
const total = (parts) => parts.reduce((sum, part) => sum + part, 0);

/**
 * Columns of a picture: a step each, or several where there is less than a pixel for each.
 * @param {Commit[]} steps
 * @param {number} width in pixels
 * @returns {{ tokens: number, ms: number[] }[]} the most tokens of a column's steps, their times
 */
export function columnsOf(steps, width) {
  const count = Math.min(steps.length, Math.max(1, Math.floor(width)));
  return Array.from({ length: count }, (_, i) => {
    const from = Math.floor(i * steps.length / count);
    const to = Math.floor((i + 1) * steps.length / count);
    const column = { tokens: 0, ms: STEP_PARTS.map(() => 0) };
    for (const step of steps.slice(from, to)) {
      column.tokens = Math.max(column.tokens, step[2].length);
      step[7].forEach((ms, part) => { column.ms[part] += ms; });
    }
    return column;
  });
}

/**
 * Indices of steps, the most instructive first: those with the most accepted drafts beside a rejected
 * one; of equals, the larger draft.
 * @param {Commit[]} steps
 */
export function ranked(steps) {
  const worth = steps.map(([, , , accepted, , , drafted]) =>
    [Number(accepted > 0 && drafted > accepted), accepted, drafted]);
  return steps.map((_, i) => i).sort((a, b) => compared(worth[b], worth[a]) || a - b);
}

/**
 * The most useless first: nothing or little accepted of the largest drafts.
 * @param {Commit[]} steps
 */
export function wasted(steps) {
  const worth = steps.map(([, , , accepted, , , drafted, ms]) => [drafted - accepted, total(ms)]);
  return steps.map((_, i) => i).sort((a, b) => compared(worth[b], worth[a]) || a - b);
}

/** @param {number[]} one @param {number[]} other */
function compared(one, other) {
  const at = one.findIndex((value, i) => value !== other[i]);
  return at < 0 ? 0 : one[at] - other[at];
}

export class Timeline {
  /**
   * @param {(index: number) => void} onPick
   * @param {import("./scrubber.js").Fetch["fetchSteps"]} fetchSteps
   * @param {(index: number) => Promise<string>} explain what was decided for a step, and why
   */
  constructor(onPick, fetchSteps, explain) {
    this.onPick = onPick;
    this.fetchSteps = fetchSteps;
    this.explain = explain;
    /** all steps added up, in words of the server */
    this.whole = "";
    this.told = "";
    /** @type {Track | null} */
    this.track = null;
    this.from = 0;
    /** @type {number | null} steps on show; null for all */
    this.shown = null;
    this.current = -1;
    /** @type {[number, number] | null} first and last step selected */
    this.selected = null;
    this.place = 0;
    this.drawing = false;
    this.canvas = h("canvas", { height: HEIGHT, role: "img", "aria-label": "steps of the run" });
    this.words = h("span", { class: "timeline-words" });
    this.card = h("div", { class: "tip timeline-card", hidden: true, role: "status" });
    this.key = h("div", { class: "legend timeline-key" }, h("span", {}, "A bar per step: height = tokens committed; "
      + "parts = share of its time:"),
    ...STEP_PARTS.map((name) => h("span", { class: "swatch" }, h("i", { class: `part ${name}` }), ` ${name}`)));
    /** @type {(text: string, name: string, work: () => void) => HTMLElement} */
    const button = (text, name, work) => h("button", { type: "button", class: "quiet",
      title: name, onclick: work }, text);
    this.tools = h("span", {});
    this.host = h("div", { class: "timeline" }, this.canvas, this.card, this.key, h("div", { class: "timeline-line" },
      this.words, h("span", { class: "spring" }), this.tools,
      button("best", "the most accepted drafts beside a rejected one; again: the next (B)", () => this.extreme(1)),
      button("worst", "the largest draft with the least accepted; again: the next (W)", () => this.extreme(-1)),
      button("zoom in", "show fewer steps, or those selected (+)", () => this.zoom(ZOOM)),
      button("zoom out", "show more steps (\u2212)", () => this.zoom(1 / ZOOM))));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get steps() { return this.track?.events.slice(1) ?? []; }

  get range() {
    const all = this.track?.numSteps ?? 0, count = Math.min(all, this.shown ?? all);
    return { from: Math.max(0, Math.min(this.from, all - count)), count };
  }

  listen() {
    /** @type {{ x: number, step: number } | null} */
    let pressed = null;
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      pressed = { x: event.offsetX, step: this.stepAt(event.offsetX) };
      canvas.setPointerCapture(event.pointerId);
    });
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let resting;
    canvas.addEventListener("pointermove", (event) => {
      const index = this.stepAt(event.offsetX);
      clearTimeout(resting);
      if (index >= 0) this.tip(index, event.offsetX, "");
      if (!pressed && index >= 0) {
        resting = setTimeout(async () => {
          const why = await this.explain(index);
          if (!this.card.hidden) this.tip(index, event.offsetX, why);
        }, REST_MS);
      }
      if (!pressed || Math.abs(event.offsetX - pressed.x) < CLICK_PX) return;
      this.select(pressed.step, this.stepAt(event.offsetX));
    });
    canvas.addEventListener("pointerleave", () => {
      clearTimeout(resting);
      this.card.hidden = true;
    });
    canvas.addEventListener("pointerup", (event) => {
      if (pressed && Math.abs(event.offsetX - pressed.x) < CLICK_PX) {
        this.select(null);
        this.onPick(this.stepAt(event.offsetX));
      }
      pressed = null;
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this.stepAt(event.offsetX));
    }, { passive: false });
  }

  /** A card over a step: what it did, where its time went, why. */
  tip(index, x, why) {
    const step = this.steps[index];
    this.card.hidden = !step;
    if (!step) return;
    const [, , pieces, accepted, , , drafted, ms] = step;
    const parts = STEP_PARTS.flatMap((name, i) => ms[i] >= 0.05 ? [`${name} ${duration(ms[i])}`] : []);
    this.card.replaceChildren(h("b", {}, `Step ${index + 1} of ${this.track?.numSteps}`),
      h("div", {}, `${accepted} of ${drafted} drafted accepted, ${plural(pieces.length, "token")} committed`),
      h("div", { class: "card-text" }, visible(pieces.join(""))),
      h("div", {}, `${duration(total(ms))}: ${parts.join(", ")}`), h("div", { class: "card-why" }, why));
    const most = this.canvas.clientWidth - this.card.offsetWidth;
    this.card.style.left = `${12 + Math.max(0, Math.min(x, most))}px`;
  }

  stepAt(x) {
    const { from, count } = this.range;
    const at = Math.floor(from + count * x / Math.max(1, this.canvas.clientWidth));
    return Math.max(from, Math.min(from + count - 1, at));
  }

  attach(track) {
    this.track = track;
    this.from = 0;
    this.shown = null;
    this.current = -1;
    this.select(null);
  }

  /** A step is on show elsewhere. */
  mark(index) {
    this.current = index;
    const { from, count } = this.range;
    if (index < from || index >= from + count) this.from = Math.max(0, index - Math.floor(count / 2));
    this.draw();
  }

  /** @param {number | null} first nothing is selected without it */
  select(first, last = first) {
    this.selected = first === null || last === null ? null
      : [Math.min(first, last), Math.max(first, last)];
    this.draw();
  }

  /** The best step, or the worst (-1); where it is on show already, the next after it. */
  extreme(sign) {
    const order = (sign < 0 ? wasted : ranked)(this.steps);
    if (!order.length) return;
    this.place = order[this.place % order.length] === this.current ? this.place + 1 : 0;
    this.onPick(order[this.place % order.length]);
  }

  /** @param {number} factor above 1 shows fewer steps */
  zoom(factor, around = this.current) {
    const { from, count } = this.range, all = this.track?.numSteps ?? 0;
    if (factor > 1 && this.selected && this.selected[1] > this.selected[0]) {
      [this.from] = this.selected;
      this.shown = Math.max(LEAST_SHOWN, this.selected[1] - this.selected[0] + 1);
    } else {
      const shown = Math.max(LEAST_SHOWN, Math.round(count / factor));
      const at = around >= from && around < from + count ? around : from + count / 2;
      this.from = Math.round(at - shown * (at - from) / Math.max(1, count));
      this.shown = shown >= all ? null : shown;
    }
    this.draw();
  }

  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.paint();
      this.tell();
    });
  }

  tell() {
    const { track, selected } = this, { from, count } = this.range;
    const [first, last] = selected ?? [from, from + count - 1];
    if (!track || !count || last - first + 1 === track.numSteps) {
      this.told = "";
      this.say(track && count ? this.whole : "");
    } else this.tellSome(track.meta.id, first, last, selected ? "selected, " : "");
  }

  // Asks for the figures of some steps, once for each choice of them.
  async tellSome(run, first, last, how) {
    const key = `${run}/${first}/${last}`;
    if (key === this.told) return;
    this.told = key;
    const { text, error } = await ask(this.fetchSteps(run, first, last));
    if (this.told === key) this.say(error ?? `${how}${first + 1} to ${last + 1}, ${text}`);
  }

  say(text) {
    this.words.textContent = text;
    this.canvas.setAttribute("aria-label", `steps of the run: ${text}`);
  }

  paint() {
    const width = this.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    if (!context || !width) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    context.scale(ratio, ratio);
    const { from, count } = this.range, style = getComputedStyle(this.canvas);
    const columns = columnsOf(this.steps.slice(from, from + count), width);
    if (!columns.length) return;
    const colours = COLOURS.map((name) => style.getPropertyValue(name));
    const most = Math.max(...columns.map((column) => column.tokens), 1), each = width / columns.length;
    const wide = each >= GAP_FROM ? Math.min(each - 1, 24) : Math.max(1, each);
    columns.forEach((column, i) => {
      let y = HEIGHT;
      const height = (HEIGHT - TOP) * column.tokens / most, ms = total(column.ms) || 1;
      column.ms.forEach((part, at) => {
        const high = height * part / ms;
        context.fillStyle = colours[at];
        context.fillRect(i * each, y -= high, wide, high);
      });
    });
    const perStep = width / count, accent = style.getPropertyValue("--color-accent");
    context.fillStyle = accent;
    if (this.selected) {
      const [first, last] = this.selected;
      context.globalAlpha = 0.2;
      context.fillRect((first - from) * perStep, 0, (last - first + 1) * perStep, HEIGHT);
      context.globalAlpha = 1;
    }
    if (this.current >= 0) context.fillRect((this.current - from) * perStep, 0, Math.max(2, wide), TOP);
  }
}
