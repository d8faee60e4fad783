// What the editor's bar, sheets and cards are built of: buttons, fields, menus, jobs, charts.
// @ts-nocheck
import { followTheme, h, loadPlotly } from "../kit.js";

export function tool(name, text, title, work) {
  return h("button", { type: "button", class: "tool", "data-tool": name, title, onclick: work }, text);
}

export function card(name, title, ...children) {
  return h("section", { class: "card", "data-card": name }, h("h4", {}, title), ...children);
}

// A number to type, and a slide of the same number for who wants to drag it.
export function numberField(name, title, help, attributes, work) {
  const box = h("input", { type: "number", class: "box", "data-field": name, "aria-label": help,
    title: help, ...attributes, oninput: () => { slide.value = box.value; work(); } });
  const slide = h("input", { type: "range", ...attributes, tabindex: "-1", "aria-hidden": "true",
    oninput: () => { box.value = slide.value; work(); } });
  return { box, slide, field: h("label", { class: "field" }, h("span", {}, title), box),
    set: (value) => { box.value = slide.value = value; } };
}

// rows: [value, title, group]; those of a group stand together under its name.
export function fillMenu(select, rows) {
  const groups = Map.groupBy(rows, ([, , group]) => group);
  select.replaceChildren(...[...groups].flatMap(([group, some]) => {
    const options = some.map(([value, title]) => h("option", { value }, title));
    return group ? [h("optgroup", { label: group }, ...options)] : options;
  }));
}

export function debounced(work, ms) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, ms);
  };
}

// Awaits answers of which only the last one asked for counts: null for all before it.
export function newest() {
  let last = 0;
  return async (answer) => {
    const mine = last += 1;
    const found = await answer;
    return mine === last ? found : null;
  };
}

const JOB_POLL_MS = 250;
// Whose jobs are whose: a new one of the same tab replaces the one before.
const TAB = `tree-${Math.random().toString(36).slice(2, 12)}`;

// A measurement of the server: a button, its progress in words, and Stop.
export class Job {
  // wanted() → what is asked of `measure`; done(end) is told the finished job's last state.
  constructor(editor, title, wanted, done) {
    Object.assign(this, { editor, wanted, done });
    this.button = h("button", { type: "button", class: "tool", onclick: () => this.start() }, title);
    this.bar = h("i");
    this.words = h("span", { class: "job-words", role: "status" });
    this.stopper = h("button", { type: "button", class: "tool", hidden: true,
      onclick: () => this.stop() }, "Stop");
    this.progress = h("span", { class: "progress", hidden: true, role: "progressbar",
      "aria-valuemin": 0, "aria-valuemax": 100 }, this.bar);
    this.host = h("div", { class: "job" }, this.button, this.progress, this.stopper, this.words);
  }

  get running() { return this.button.hidden; }

  // Forgets how the last one ended.
  clear() {
    if (!this.running) this.words.textContent = "";
  }

  async start() {
    this.show({ words: "asking \u2026", over: false });
    const { editor } = this;
    const answer = await editor.ask("measure", { source: editor.source?.id ?? null, tab: TAB,
      ...this.wanted() });
    this.id = answer.job;
    if (answer.error) this.show(answer);
    else this.poll();
  }

  async poll() {
    const state = await this.editor.ask("job", { job: this.id });
    this.show(state);
    if (state.over === false) setTimeout(() => this.poll(), JOB_POLL_MS);
    else if (state.end) this.done(state.end);
  }

  stop() {
    this.words.textContent = "stopping \u2026";
    this.editor.ask("stop", { job: this.id });
  }

  show({ words = "", error, progress = null, over = true }) {
    this.host.classList.toggle("running", !over);
    this.button.hidden = !over;
    this.stopper.hidden = this.progress.hidden = over;
    this.progress.classList.toggle("unknown", progress === null);
    this.bar.style.width = progress === null ? "" : `${100 * progress}%`;
    if (progress === null) this.progress.removeAttribute("aria-valuenow");
    else this.progress.setAttribute("aria-valuenow", Math.round(100 * progress));
    this.words.textContent = error ?? words;
  }
}

// A small line chart. Drawn here, not in Python: it follows every edit without a round trip.
export class Chart {
  // onPick(x) is told the x of a point that was clicked.
  constructor(height, onPick = null) {
    this.plot = h("div", { class: "plot", style: `height:${height}px` });
    this.words = h("p", { class: "note" });
    this.host = h("figure", { class: "chart" }, this.plot, this.words);
    this.onPick = onPick;
    followTheme(() => this.draw());
    new ResizeObserver(() => {
      if (this.plot.data && this.plot.clientWidth) window.Plotly.Plots.resize(this.plot);
    }).observe(this.plot);
  }

  // lines: [{ name, x, y, colour, axis: 1 | 2, mode }], axes: { x, y, y2 } titles.
  show(lines, axes, words) {
    this.drawn = { lines, axes };
    this.words.textContent = words;
    this.draw();
  }

  // MAT over x, and tok/s where the machine was measured; points mark the tree at hand.
  showWorth(rows, { at, now, speed }, title, words) {
    const x = rows.map((row) => row.x), mark = { x: [at], mode: "markers" };
    const mat = { colour: "--pg-draft" }, tok_s = { colour: "--pg-target", axis: 2 };
    const lines = [{ ...mat, name: "MAT", x, y: rows.map((row) => row.mat) },
      { ...mat, ...mark, name: "MAT of this tree", y: [now.mat] }];
    if (speed) {
      lines.push({ ...tok_s, name: "tok/s", x, y: rows.map((row) => row.tok_s) },
        { ...tok_s, ...mark, name: "tok/s of this tree", y: [now.tok_s] });
    }
    this.show(lines, { x: title, y: "MAT", y2: speed ? "predicted tok/s" : null }, words);
  }

  draw() {
    if (!this.drawn || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(async () => {
      try {
        const plotly = await loadPlotly();
        this.waiting = false;
        if (this.plot.isConnected) await this.react(plotly);
      } catch {
        this.waiting = false;
        this.words.textContent = "The chart could not be loaded; the figures are all in the text.";
      }
    });
  }

  async react(plotly) {
    const styles = getComputedStyle(this.host);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const { lines, axes } = this.drawn;
    const axis = (title, more) => ({ title: { text: title, standoff: 6 }, zeroline: false,
      gridcolor: colour("--pg-line"), linecolor: colour("--pg-line"), tickfont: { size: 10 },
      rangemode: "tozero", automargin: true, ...more });
    const data = lines.map(({ name, x, y, axis = 1, mode = "lines", colour: line }) => ({
      type: "scatter", mode, name, x, y, yaxis: axis === 2 ? "y2" : "y",
      hovertemplate: `%{x}: %{y:.2f} ${name}<extra></extra>`, line: { color: colour(line), width: 2 },
      marker: { color: colour(line), size: mode === "markers" ? 9 : 5 } }));
    const layout = { margin: { l: 34, r: axes.y2 ? 36 : 8, t: 6, b: 30 }, showlegend: false,
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest",
      font: { family: colour("--font"), size: 11, color: colour("--body-text-color-subdued") },
      xaxis: axis(axes.x), yaxis: axis(axes.y, { rangemode: axes.y2 ? "normal" : "tozero" }) };
    if (axes.y2) layout.yaxis2 = axis(axes.y2, { overlaying: "y", side: "right", showgrid: false,
      rangemode: "normal", tickmode: "auto", nticks: 5 });
    await plotly.react(this.plot, data, layout, { displayModeBar: false, responsive: false });
    if (this.onPick && !this.listening) {
      this.listening = true;
      this.plot.on("plotly_click", ({ points }) => this.onPick(points[0].x));
    }
  }
}
