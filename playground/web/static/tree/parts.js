// Building blocks of the editor: elements by name, menus, jobs, charts.
import { h, part, perFrame, progressBar, showProgress } from "../kit.js";

/**
 * The elements of a template by the value of their attribute `data-KIND`.
 * @returns {Record<string, any>}
 */
export function elementsBy(host, kind) {
  const nodes = [...host.querySelectorAll(`[data-${kind}]`)];
  return Object.fromEntries(nodes.map((node) => [node.dataset[kind], node]));
}

// rows: [value, title, group]; consecutive rows of a group become an optgroup.
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

// Awaits answers; null for one that a later question has superseded.
export function latest() {
  let last = 0;
  return async (answer) => {
    const ticket = last += 1;
    const value = await answer;
    return ticket === last ? value : null;
  };
}

const JOB_POLL_MS = 250;
// Owner of this tab's jobs: a new job of the same tab replaces the last one.
const TAB = `tree-${Math.random().toString(36).slice(2, 12)}`;

// A measurement on the server: a button that starts it, its progress, and Stop.
export class Job {
  // question() → the question for `measure`; onDone(end) gets the results of a finished job.
  constructor(editor, name, question, onDone) {
    this.editor = editor;
    this.question = question;
    this.onDone = onDone;
    this.id = null;
    this.host = part(editor.host, `[data-job=${name}]`);
    this.button = part(this.host, "button");
    this.progress = progressBar();
    this.stopper = h("button", { type: "button", class: "tool", hidden: true,
      onclick: () => this.stop() }, "Stop");
    this.text = h("span", { class: "job-text", role: "status" });
    this.host.append(this.progress, this.stopper, this.text);
    this.button.addEventListener("click", () => this.start());
  }

  get running() { return this.button.hidden; }

  // Clears the last job's final message.
  clear() {
    if (!this.running) this.text.textContent = "";
  }

  async start() {
    this.show({ text: "asking \u2026", over: false });
    const answer = await this.editor.ask("measure", { source: this.editor.source?.id ?? null,
      tab: TAB, ...this.question() });
    this.id = answer.job;
    if (answer.error) this.show(answer);
    else this.poll();
  }

  async poll() {
    const state = await this.editor.ask("job", { job: this.id });
    this.show(state);
    if (state.over === false) setTimeout(() => this.poll(), JOB_POLL_MS);
    else if (state.end) this.onDone(state.end);
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

// A small line chart, drawn here and not in Python so that it follows every edit without a round trip.
export class Chart {
  /** @type {any} */ content = null;
  /** @type {any} */ plotly = null;
  draw = perFrame(() => this.react());

  // onPick(x) gets the x of a clicked point.
  constructor(host, onPick) {
    this.host = host;
    this.plot = host.firstElementChild;
    this.note = host.lastElementChild;
    this.onPick = onPick;
    // A class of the body makes the page dark or light.
    new MutationObserver(() => this.draw()).observe(document.body, { attributeFilter: ["class"] });
    new ResizeObserver(() => {
      if (this.plotly && this.plot.clientWidth) this.plotly.Plots.resize(this.plot);
    }).observe(this.plot);
  }

  // lines: [{ name, x, y, colour, axis: 1 | 2, mode }], axes: { x, y, y2 } titles.
  show(lines, axes, note) {
    this.content = { lines, axes };
    this.note.textContent = note;
    this.draw();
  }

  // MAT over x, and tok/s if the machine was measured; points mark the current tree.
  showMatAndSpeed(rows, { at, now, speed, others = [] }, title, note) {
    const x = rows.map((row) => row.x), lines = [...others];
    const both = (name, figure, more) => lines.push(
      { name, x, y: rows.map((row) => row[figure]), ...more },
      { name: `${name} of this tree`, x: [at], y: [now[figure]], mode: "markers", ...more });
    both("MAT", "mat", { colour: "--pg-draft" });
    if (speed) both("tok/s", "tok_s", { colour: "--pg-target", axis: 2 });
    this.show(lines, { x: title, y: "MAT", y2: speed ? "predicted tok/s" : null }, note);
  }

  async react() {
    if (!this.content) return;
    try {
      await import(new URL("../plotly.min.js", import.meta.url).href);
      if (this.plot.isConnected) await this.update(Reflect.get(window, "Plotly"));
    } catch {
      this.note.textContent = "The chart could not be loaded; the text has all its figures.";
    }
  }

  async update(plotly) {
    const styles = getComputedStyle(this.host);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const { lines, axes } = this.content, line = colour("--pg-line");
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
      xaxis: axis(axes.x), yaxis: axis(axes.y, { rangemode: axes.y2 ? "normal" : "tozero" }),
      ...axes.y2 && { yaxis2: axis(axes.y2, { overlaying: "y", side: "right", showgrid: false,
        rangemode: "normal", tickmode: "auto", nticks: 5 }) } };
    await plotly.react(this.plot, data, layout, { displayModeBar: false, responsive: false });
    if (this.plotly) return;
    this.plotly = plotly;
    this.plot.on("plotly_click", ({ points }) => this.onPick(points[0].x));
  }
}
