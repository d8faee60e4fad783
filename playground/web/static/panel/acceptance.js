// How long accepted paths are: a bar per position, and a bar per accepted length.
import { h, percent, plural } from "../kit.js";

const MOST_BARS = 16;

/**
 * Steps by how many drafts they accepted: 0, 1, 2, ….
 * @param {number[]} atLeast steps that accepted at least 1, 2, … drafts
 * @param {number} numSteps
 */
export function lengthCounts(atLeast, numSteps) {
  return [numSteps, ...atLeast].map((count, i) => count - (atLeast[i] ?? 0));
}

function bars(title, shares, name) {
  const most = Math.max(...shares, 0.01);
  return h("figure", { class: "bars" }, h("figcaption", {}, title),
    h("div", { class: "bars-row" }, ...shares.slice(0, MOST_BARS).map((share, i) => h("span", { class: "bar" },
      h("small", {}, percent(share)), h("i", { style: `height: ${Math.max(2, 56 * share / most)}px` }),
      h("small", {}, name(i))))));
}

export class Acceptance {
  constructor() {
    this.metrics = null;
    this.button = h("button", { type: "button", class: "quiet", "aria-expanded": "false",
      title: "acceptance by position, and how many drafts steps accepted",
      onclick: () => this.toggle() }, "acceptance");
    this.host = h("div", { class: "acceptance", hidden: true });
  }

  toggle() {
    this.host.hidden = !this.host.hidden;
    this.button.setAttribute("aria-expanded", String(!this.host.hidden));
    this.draw();
  }

  show(metrics) {
    this.metrics = metrics;
    this.draw();
  }

  draw() {
    const { metrics } = this;
    if (this.host.hidden || !metrics) return;
    const steps = metrics.num_steps, counts = lengthCounts(metrics.at_least ?? [], steps);
    this.host.replaceChildren(...!steps ? ["No steps yet."] : [
      bars("Steps that accepted at least so many drafts", metrics.position_rates ?? [], (i) => `${i + 1}`),
      bars(`Accepted drafts of a step, of ${plural(steps, "step")}`, counts.map((count) => count / steps),
        (i) => `${i}`)]);
  }
}
