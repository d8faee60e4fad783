// The table under the race: figures against plain decoding, verdicts, explanations.
// @ts-nocheck: the Compare page is about to draw it with Gradio's own table.
import { DASH, STEP_PARTS, clip, duration, h, milliseconds, number, percent, plural, visible }
  from "../kit.js";

const COMPARE_COLUMNS = [
  ["speedup", "speedup", "num wide"],
  ["tok_s", "tok/s", "num"],
  ["mat", "MAT", "num"],
  ["position_rates", "position rates", ""],
  ["split_ms", "time per step", "wide"],
  ["ttft_ms", "TTFT", "num"],
  ["itl_ms", "ITL", "num"],
  ["verdict", "lossless?", ""],
];
const MOST_BARS = 10;

function times(value, digits = 2) { return `${number(value, digits)}\u00d7`; }

export class ComparisonTable {
  // onDeploy(run) is told of which run the configuration is to be handed over.
  constructor(host, formulas, onDeploy) {
    this.host = host;
    this.onDeploy = onDeploy;
    this.formulas = formulas;
  }

  show(report) {
    if (!report) { this.host.replaceChildren(); return; }
    const rows = report.configurations;
    this.prompts = new Map(report.prompts);
    this.lastRun = new Map(report.runs.map(([, , name, run]) => [name, run]));
    this.numRepeats = report.num_repeats;
    const drafting = rows.filter((row) => !row.reference);
    const scale = Math.max(1.2, ...drafting.map((row) => row.overall.speedup?.high ?? 0));
    const best = Math.max(1, ...drafting.map((row) => row.overall.speedup?.ratio ?? 0));
    const heads = COMPARE_COLUMNS.map(([key, title, kind]) => h("th", { class: kind, scope: "col" },
      h("span", { class: "tipped", tabindex: "0", "aria-label": `${title}: ${this.formulas[key]}` },
        title, h("span", { class: "formula" }, this.formulas[key]))));
    this.host.replaceChildren(
      h("p", { class: "headline" }, report.headline),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "configuration"), ...heads)),
        ...rows.map((row) => this.body(row, scale, best > 1 && row.overall.speedup?.ratio === best))),
      ...this.remarks(report));
  }

  body(row, scale, best) {
    const { overall } = row;
    const cells = {
      speedup: this.speedup(row, scale),
      tok_s: number(overall.tok_s, 1),
      mat: number(overall.mat, 2),
      position_rates: this.rates(row.position_rates),
      split_ms: this.split(row.split_ms),
      ttft_ms: row.ttft_ms === null ? DASH : duration(row.ttft_ms),
      itl_ms: row.itl_ms === null ? DASH : duration(row.itl_ms),
      verdict: this.verdict(row.verdict),
    };
    const name = h("th", { scope: "row" }, h("span", { class: "name" }, row.name),
      h("span", { class: `badge ${row.badge}` }, row.badge),
      row.reference || !overall.num_requests ? null : h("button", { type: "button", class: "quiet",
        title: `${row.name} as a config for a serving engine`, "aria-label": `deploy ${row.name}`,
        onclick: () => this.onDeploy(this.lastRun.get(row.name)) }, "deploy"),
      row.settings ? h("span", { class: "settings" }, row.settings) : null);
    const line = h("tr", { class: best ? "best" : "", "data-name": row.name }, name,
      ...COMPARE_COLUMNS.map(([key, title, kind]) => h("td", { class: kind, "data-key": key,
        "data-title": title }, cells[key])));
    const said = this.said(row);
    const why = h("tr", { class: "why", hidden: !said.length }, h("td",
      { colspan: COMPARE_COLUMNS.length + 1 }, ...said));
    return h("tbody", {}, line, why);
  }

  speedup(row, scale) {
    if (row.reference) return h("span", { class: "speed" }, times(1));
    const speed = row.overall.speedup;
    if (!speed) return DASH;
    const at = (value) => `${Math.min(100, (100 * value) / scale)}%`;
    const bar = h("span", { class: "speed-bar" }, h("i", { class: "speed-fill" }),
      h("i", { class: "speed-one" }));
    bar.children[0].style.width = at(speed.ratio);
    bar.children[1].style.left = at(1);
    const words = h("span", { class: "spread" });
    if (speed.num_pairs > 1) {
      const spread = h("i", { class: "speed-spread" });
      spread.style.left = at(speed.low);
      spread.style.width = `calc(${at(speed.high)} - ${at(speed.low)})`;
      bar.append(spread);
      words.textContent = `${number(speed.low, 2)} \u2026 ${number(speed.high, 2)}`;
      words.title = speed.spread_over === "repeats"
        ? `lowest and highest of ${plural(this.numRepeats, "repeat")}`
        : "quartiles of the prompts; one repeat only";
    } else {
      words.textContent = "one run";
      words.title = "no spread: more repeats show the noise";
    }
    return h("span", { class: "speed-cell" }, h("b", { class: "speed" }, times(speed.ratio)), words,
      bar);
  }

  rates(rates) {
    const bars = rates.slice(0, MOST_BARS).map((rate, i) => {
      const bar = h("i", { class: "rate", title: `at least ${plural(i + 1, "draft token")} `
        + `accepted in ${percent(rate)} of steps` }, h("b"));
      bar.firstChild.style.height = `${Math.max(3, 100 * rate)}%`;
      return bar;
    });
    const words = rates.slice(0, 3).map((rate) => percent(rate)).join(", ");
    return h("span", { class: "rates-cell", "aria-label": words || "nothing drafted" },
      h("span", { class: "rates" }, ...bars), h("span", { class: "rate-words" }, words || DASH));
  }

  split(split) {
    if (!split) return DASH;
    const total = STEP_PARTS.reduce((sum, name) => sum + split[name], 0);
    const words = `${STEP_PARTS.map((name) => `${name} ${milliseconds(split[name])}`)
      .join(" \u00b7 ")} ms`;
    const bar = h("span", { class: "split" }, ...STEP_PARTS.map((name) => {
      const part = h("i", { class: `part ${name}`,
        title: `${name} ${milliseconds(split[name])} ms` });
      part.style.width = `${total > 0 ? (100 * split[name]) / total : 0}%`;
      return part;
    }));
    return h("span", { class: "split-cell", "aria-label": words },
      h("b", {}, duration(total)), bar, h("span", { class: "split-words" }, words));
  }

  verdict(verdict) {
    const steady = verdict.label === "baseline" ? "quiet-word" : "warn";
    const good = { identical: "good", baseline: steady, sampled: "quiet-word", none: "quiet-word",
      lossy: "warn", diverged: verdict.near_tie ? "warn" : "bad" };
    return h("span", { class: `verdict ${good[verdict.kind]}`, "data-kind": verdict.kind },
      verdict.label === "baseline" ? DASH : verdict.label);
  }

  // The sentences below a configuration's figures.
  said(row) {
    const said = [];
    if (row.fault) said.push(h("p", { class: "fault" }, row.fault));
    if (row.why) {
      said.push(h("p", { class: "because" }, row.why.because),
        h("p", { class: "terms" }, h("code", {}, row.why.terms)),
        h("p", { class: "differs" }, row.why.differs));
    }
    const verdict = row.verdict;
    if (row.overall.num_requests && verdict.label !== "baseline" && verdict.kind !== "none") {
      said.push(h("p", { class: "judged" }, verdict.sentence));
    }
    for (const sentence of verdict.gap) said.push(h("p", { class: "gap" }, sentence));
    if (verdict.parting) said.push(this.parting(verdict.parting));
    const prompts = row.by_prompt;
    if (prompts.length > 1) {
      said.push(h("p", { class: "by-prompt" }, "speedup by prompt: ",
        prompts.map(([name, value]) => `${clip(this.prompts.get(name) ?? name, 32)} ${times(value)}`)
          .join(" \u00b7 ")));
    }
    return said;
  }

  parting(parting) {
    const side = (name, text) => [h("dt", {}, name), h("dd", {},
      h("span", { class: "common" }, `\u2026${visible(parting.before)}`),
      h("mark", {}, visible(text)))];
    return h("dl", { class: "parting" }, ...side("plain decoding", parting.plain),
      ...side("this one", parting.own));
  }

  remarks(report) {
    return report.skipped.map(([name, why]) => h("p", { class: "skipped" },
      `Prompt ${name} was left out: ${why}`));
  }
}
