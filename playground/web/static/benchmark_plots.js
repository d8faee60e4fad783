// The plots of a report, drawn by plotly, which is loaded when the first one is drawn. Needs dom.js.
const HUES = {
  light: ["#2563eb", "#16a34a", "#d97706", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#65a30d",
    "#7c3aed", "#0d9488", "#b45309", "#475569"],
  dark: ["#60a5fa", "#4ade80", "#fbbf24", "#c084fc", "#f87171", "#22d3ee", "#f472b6", "#a3e635",
    "#a78bfa", "#2dd4bf", "#fdba74", "#94a3b8"],
};
const LEVELS = [1, 2, 4];
let plotlyLoading = null;

function loadPlotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  plotlyLoading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: new URL(PLOTLY_URL, document.baseURI).href });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => {
      plotlyLoading = null;
      script.remove();
      reject(new Error("plotly did not load"));
    });
    document.head.append(script);
  });
  return plotlyLoading;
}

function isDark() { return document.body.classList.contains("dark"); }

class BenchPlots {
  constructor() {
    const plots = [["speedup", "Speedup over plain decoding",
      "bars: speedup; whiskers: its spread"],
    ["cost", "MAT against step time", "lines: speedup = MAT \u00d7 plain step / step"],
    ["rates", "Acceptance by position", "share of steps that accepted at least so many drafts"],
    ["context", "tok/s over context length", "requests binned by prompt + half of the answer"]];
    this.cells = plots.map(([kind, title, hint]) => {
      const plot = h("div", { class: "plot", "data-plot": kind });
      return { kind, plot, host: h("figure", {}, h("figcaption", {}, h("b", {}, title),
        h("span", {}, hint)), plot) };
    });
    this.note = h("p", { class: "note" });
    this.host = h("div", { class: "card plots" }, ...this.cells.map((cell) => cell.host), this.note);
    this.report = null;
    new MutationObserver(() => this.draw())
      .observe(document.body, { attributes: true, attributeFilter: ["class"] });
    new ResizeObserver(() => this.draw()).observe(this.host);
  }

  // Which colour a configuration has, in tables and plots; plain decoding is grey.
  colour(name) {
    const at = (this.report?.configurations ?? []).findIndex((s) => s.name === name) - 1;
    const hues = HUES[isDark() ? "dark" : "light"];
    return at < 0 ? (isDark() ? "#a1a1aa" : "#71717a") : hues[at % hues.length];
  }

  show(report, titles) {
    this.report = report;
    this.titles = titles;
    this.draw();
  }

  async draw() {
    if (!this.report || !this.host.clientWidth) return;
    if (this.drawing) { this.again = true; return; }
    this.drawing = true;
    try {
      const plotly = await loadPlotly();
      for (const { kind, plot } of this.cells) {
        const { data, layout } = this[kind]();
        await plotly.react(plot, data, this.themed(layout, plot),
          { displayModeBar: false, responsive: false });
        plot.dataset.drawn = "true";
      }
      this.note.textContent = "";
    } catch (error) {
      this.note.textContent = "The plots could not be drawn; the tables have all their figures.";
    } finally {
      this.drawing = false;
    }
    if (this.again) { this.again = false; this.draw(); }
  }

  get drafting() { return this.report.configurations.filter((s) => !s.reference); }

  speedup() {
    const groups = this.report.groups;
    const x = [...groups, "overall"];
    const data = this.drafting.map((section) => {
      const cells = [...groups.map((group) => section.groups[group]), section.overall];
      const fast = cells.map((cell) => cell?.speedup ?? null);
      return { type: "bar", name: section.name, x, y: fast.map((f) => f?.ratio ?? null),
        marker: { color: this.colour(section.name) },
        error_y: { type: "data", symmetric: false, thickness: 1, width: 3,
          color: isDark() ? "#d4d4d8" : "#52525b",
          array: fast.map((f) => (f ? f.high - f.ratio : 0)),
          arrayminus: fast.map((f) => (f ? f.ratio - f.low : 0)) },
        hovertemplate: `${section.name} %{x}: %{y:.2f}\u00d7<extra></extra>` };
    });
    const layout = { barmode: "group", bargap: 0.25, yaxis: { rangemode: "tozero" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1,
        line: { width: 1, dash: "dot", color: this.colour(null) } }] };
    return { data, layout };
  }

  cost() {
    const points = this.report.configurations.filter((s) => s.overall.mat && s.overall.step_ms);
    const plain = points.find((s) => s.reference)?.overall.step_ms;
    const longest = 1.12 * Math.max(1, ...points.map((s) => s.overall.step_ms));
    const highest = 1.15 * Math.max(1.5, ...points.map((s) => s.overall.mat));
    const data = points.map((section) => ({ type: "scatter", mode: "markers",
      name: section.name, x: [section.overall.step_ms], y: [section.overall.mat],
      marker: { size: 11, color: this.colour(section.name) },
      hovertemplate: `${section.name}: MAT %{y:.2f}, %{x:.2f} ms a step<extra></extra>` }));
    const shapes = [], annotations = [];
    for (const level of plain ? LEVELS : []) {
      const x1 = Math.min(longest, highest * plain / level);
      shapes.push({ type: "line", x0: 0, y0: 0, x1, y1: level * x1 / plain, layer: "below",
        line: { width: 1, dash: "dot", color: this.colour(null) } });
      annotations.push({ x: x1, y: level * x1 / plain, text: `${level}\u00d7`, showarrow: false,
        xanchor: "right", yanchor: "top", xshift: x1 < longest ? -4 : 0 });
    }
    return { data, layout: { shapes, annotations,
      xaxis: { title: { text: "ms per step" }, range: [0, longest] },
      yaxis: { title: { text: "MAT" }, range: [0, highest] } } };
  }

  rates() {
    const data = this.drafting.filter((s) => s.position_rates.length).map((section) => ({
      type: "scatter", mode: "lines+markers", name: section.name,
      x: section.position_rates.map((_, i) => i + 1),
      y: section.position_rates.map((rate) => 100 * rate),
      line: { color: this.colour(section.name), width: 2 }, marker: { size: 5 },
      hovertemplate: `${section.name}: at least %{x} in %{y:.0f} % of steps<extra></extra>` }));
    return { data, layout: { xaxis: { title: { text: "draft tokens accepted, at least" },
      dtick: data.some((trace) => trace.x.length > 12) ? undefined : 1 },
    yaxis: { title: { text: "% of steps" }, rangemode: "tozero" } } };
  }

  context() {
    const data = this.report.configurations.map((section) => ({
      type: "scatter", mode: "lines+markers", name: section.name,
      x: section.by_context.map((bin) => bin.context_len),
      y: section.by_context.map((bin) => bin.tok_s),
      customdata: section.by_context.map((bin) => bin.num_requests),
      line: { color: this.colour(section.name), width: 2 }, marker: { size: 5 },
      hovertemplate: `${section.name}: %{y:.1f} tok/s at %{x:.0f} tokens, `
        + "%{customdata} requests<extra></extra>" }));
    return { data, layout: { xaxis: { title: { text: "tokens of context" }, rangemode: "tozero" },
      yaxis: { title: { text: "tok/s" }, rangemode: "tozero" } } };
  }

  // The page's colours and sizes over a layout.
  themed(layout, plot) {
    const css = getComputedStyle(this.host);
    const colour = (name) => css.getPropertyValue(name).trim();
    const text = colour("--body-text-color-subdued"), grid = colour("--border-color-primary");
    const axis = (own = {}) => ({ gridcolor: grid, linecolor: grid, zerolinecolor: grid,
      automargin: true, fixedrange: true, ...own,
      title: { font: { size: 11 }, standoff: 6, ...own.title } });
    return { ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      width: plot.clientWidth, height: plot.clientHeight, showlegend: false,
      margin: { l: 44, r: 10, t: 8, b: 36 }, paper_bgcolor: "transparent",
      plot_bgcolor: "transparent", hovermode: "closest",
      font: { family: colour("--font"), size: 11, color: text } };
  }
}
