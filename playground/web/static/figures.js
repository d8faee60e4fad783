// Live figures of a run: numbers with their formulas, position rates, time split. Needs dom.js.
const FIGURES = [
  ["tok_s", "tok/s", (m) => number(m.tok_s, 1)],
  ["mat", "MAT", (m) => number(m.mat, 2)],
  ["draft_acceptance", "accepted", (m) => percent(m.draft_acceptance)],
  ["ttft_s", "TTFT", (m) => duration(1000 * (m.ttft_s ?? NaN))],
  ["itl_ms", "ITL", (m) => duration(m.itl_ms ?? NaN)],
  ["step_p95_ms", "step p50 / p95", (m) =>
    durations(m.step_p50_ms ?? NaN, m.step_p95_ms ?? NaN)],
  ["num_new_tokens", "tokens / steps", (m) => `${m.num_new_tokens} / ${m.num_steps}`],
];
const PARTS = [["draft", "draft_s"], ["verify", "verify_s"], ["accept", "accept_s"],
  ["other", "other_s"]];
const MOST_RATES = 16;
const EMPTY_METRICS = { num_new_tokens: 0, num_steps: 0, position_rates: [], ttft_s: null,
  itl_ms: null };

class Figures {
  constructor(host, formulas) {
    this.values = new Map();
    const cells = FIGURES.map(([key, title]) => {
      const value = h("span", { class: "value", "data-figure": key }, DASH);
      this.values.set(key, value);
      const formula = formulas[key] ?? "new tokens, counted after any cut / steps of the loop";
      return h("div", { class: "figure", tabindex: "0", "aria-label": `${title}: ${formula}` },
        value, h("span", { class: "name" }, title), h("span", { class: "formula" }, formula));
    });
    this.rates = h("div", { class: "rates" });
    this.split = h("div", { class: "split" });
    this.splitText = h("span", { class: "name" });
    const rates = h("div", { class: "figure wide", tabindex: "0" }, this.rates,
      h("span", { class: "name" }, "position rates"),
      h("span", { class: "formula" }, formulas.position_rates ?? ""));
    const split = h("div", { class: "figure wide", tabindex: "0" }, this.split,
      this.splitText,
      h("span", { class: "formula" }, formulas.time_split ?? ""));
    host.append(...cells, rates, split);
    this.parts = PARTS.map(([name]) => h("i", { class: `part ${name}` }));
    this.split.append(...this.parts);
    this.show(null);
  }

  show(metrics) {
    const m = { ...EMPTY_METRICS, ...(metrics ?? {}) };
    for (const [key, , format] of FIGURES) {
      const text = metrics ? format(m) : DASH;
      const cell = this.values.get(key);
      if (cell.textContent !== text) cell.textContent = text;
    }
    this.showRates(m.position_rates ?? []);
    this.showSplit(m.time_split);
  }

  showRates(rates) {
    const shown = rates.slice(0, MOST_RATES);
    while (this.rates.children.length > shown.length) this.rates.lastChild.remove();
    while (this.rates.children.length < shown.length) {
      this.rates.append(h("i", { class: "rate" }, h("b")));
    }
    shown.forEach((rate, i) => {
      const bar = this.rates.children[i];
      bar.firstChild.style.height = `${Math.max(3, 100 * rate)}%`;
      bar.title = `at least ${plural(i + 1, "draft token")} accepted in ${percent(rate)} of steps`;
    });
  }

  showSplit(split) {
    const total = split ? PARTS.reduce((sum, [, key]) => sum + split[key], 0) : 0;
    const words = [];
    PARTS.forEach(([name, key], i) => {
      const share = total > 0 ? split[key] / total : 0;
      this.parts[i].style.width = `${100 * share}%`;
      const text = total > 0 ? `${name} ${milliseconds(1000 * split[key])} ms` : name;
      this.parts[i].title = text;
      words.push(text);
    });
    this.split.parentElement.setAttribute("aria-label", `time per step: ${words.join(", ")}`);
    this.splitText.textContent = total > 0
      ? splitWords(split) : "time split";
  }
}
