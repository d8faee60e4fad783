// What the editor's template is brought to life with: named elements, menus, jobs, charts.
import { followTheme, h, loadPlotly, showProgress } from "../kit.js";

/**
 * The elements of a template by the name that their attribute `data-KIND` gives them.
 * @returns {Record<string, any>}
 */
export function named(host, kind) {
  const found = [...host.querySelectorAll(`[data-${kind}]`)];
  return Object.fromEntries(found.map((node) => [node.dataset[kind], node]));
}

// rows: [value, title, group]; those of a group, which follow each other, stand under its name.
export function fillMenu(select, rows) {
  select.replaceChildren();
  let holder = select;
  for (const [value, title, group] of rows) {
    if (group && holder.label !== group) {
      holder = h("optgroup", { label: group });
      select.append(holder);
    }
    holder.append(h("option", { value }, title));
  }
}

export function debounced(work, ms) {
  let timer = 0;
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

// A measurement of the server: a button, how far it is, and Stop.
export class Job {
  // wanted() → what is asked of `measure`; done(end) is told what the finished job brought.
  constructor(editor, name, wanted, done) {
    this.editor = editor;
    this.wanted = wanted;
    this.done = done;
    this.id = null;
    this.host = editor.host.querySelector(`[data-job=${name}]`);
    const [button, progress, stopper, text] = this.host.children;
    this.button = button;
    this.progress = progress;
    this.stopper = stopper;
    this.text = text;
    this.button.addEventListener("click", () => this.start());
    this.stopper.addEventListener("click", () => this.stop());
  }

  get running() { return this.button.hidden; }

  // Forgets how the last one ended.
  clear() {
    if (!this.running) this.text.textContent = "";
  }

  async start() {
    this.show({ text: "asking \u2026", over: false });
    const answer = await this.editor.ask("measure", { source: this.editor.source?.id ?? null,
      tab: TAB, ...this.wanted() });
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
    this.text.textContent = "stopping \u2026";
    this.editor.ask("stop", { job: this.id });
  }

  /** @param {{ text?: string, error?: string, progress?: number | null, over?: boolean }} state */
  show({ text = "", error, progress = null, over = true }) {
    this.button.hidden = !over;
    this.stopper.hidden = this.progress.hidden = over;
    showProgress(this.progress, progress);
    this.text.textContent = error ?? text;
  }
}

// A small line chart. Drawn here, not in Python: it follows every edit without a round trip.
export class Chart {
  /** @type {any} */ drawn = null;
  /** @type {any} */ plotly = null;
  waiting = false;

  // onPick(x) is told the x of a point that was clicked.
  constructor(host, onPick = (x) => {}) {
    this.host = host;
    this.plot = host.firstElementChild;
    this.note = host.lastElementChild;
    this.onPick = onPick;
    followTheme(() => this.draw());
    new ResizeObserver(() => {
      if (this.plotly && this.plot.clientWidth) this.plotly.Plots.resize(this.plot);
    }).observe(this.plot);
  }

  // lines: [{ name, x, y, colour, axis: 1 | 2, mode }], axes: { x, y, y2 } titles, and `steps`: the
  // only x, each about twice the one before.
  show(lines, axes, note) {
    this.drawn = { lines, axes };
    this.note.textContent = note;
    this.draw();
  }

  // MAT over x, and tok/s where the machine was measured; points mark the tree at hand.
  showWorth(rows, { at, now, speed, others = [] }, title, note) {
    const x = rows.map((row) => row.x), lines = [...others];
    const both = (name, figure, more) => lines.push(
      { name, x, y: rows.map((row) => row[figure]), ...more },
      { name: `${name} of this tree`, x: [at], y: [now[figure]], mode: "markers", ...more });
    both("MAT", "mat", { colour: "--pg-draft" });
    if (speed) both("tok/s", "tok_s", { colour: "--pg-target", axis: 2 });
    this.show(lines, { x: title, y: "MAT", y2: speed ? "predicted tok/s" : null }, note);
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
        this.note.textContent = "The chart could not be loaded; the text has all its figures.";
      }
    });
  }

  async react(plotly) {
    const styles = getComputedStyle(this.host);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const { lines, axes } = this.drawn, line = colour("--pg-line");
    const axis = (title, more) => ({ title: { text: title, standoff: 6 }, zeroline: false,
      gridcolor: line, linecolor: line, tickfont: { size: 10 }, rangemode: "tozero",
      automargin: true, ...more });
    const data = lines.map(({ axis = 1, mode = "lines", colour: name, ...more }) => ({ ...more,
      type: "scatter", mode, yaxis: axis === 2 ? "y2" : "y",
      hovertemplate: `%{x}: %{y:.2f} ${more.name}<extra></extra>`,
      line: { color: colour(name), width: 2 },
      marker: { color: colour(name), size: mode === "markers" ? 9 : 5 } }));
    const layout = { margin: { l: 34, r: axes.y2 ? 36 : 8, t: 6, b: 30 }, showlegend: false,
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest",
      font: { family: colour("--font"), size: 11, color: colour("--body-text-color-subdued") },
      xaxis: axis(axes.x, axes.steps ? { type: "log", tickvals: axes.steps, ticktext: axes.steps } : {}), yaxis: axis(axes.y, { rangemode: axes.y2 ? "normal" : "tozero" }),
      ...axes.y2 && { yaxis2: axis(axes.y2, { overlaying: "y", side: "right", showgrid: false,
        rangemode: "normal", tickmode: "auto", nticks: 5 }) } };
    await plotly.react(this.plot, data, layout, { displayModeBar: false, responsive: false });
    if (this.plotly) return;
    this.plotly = plotly;
    this.plot.on("plotly_click", ({ points }) => this.onPick(points[0].x));
  }
}
