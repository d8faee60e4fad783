// Small line charts by plotly, loaded when the first one is drawn; colours follow the theme.
// Needs dom.js. The server says where plotly is.
let plotlyAddress = null;
let plotlyLoading = null;

function loadPlotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  if (!plotlyAddress) return Promise.reject(new Error("plotly is not offered"));
  plotlyLoading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: new URL(plotlyAddress, document.baseURI).href });
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

class TreeChart {
  // onPick(x) is told the x of a point that was clicked.
  constructor(words, height, onPick = null) {
    this.plot = h("div", { class: "plot", style: `height:${height}px` });
    this.words = h("p", { class: "note" }, words);
    this.host = h("figure", { class: "chart" }, this.plot, this.words);
    this.onPick = onPick;
    new MutationObserver(() => this.draw())
      .observe(document.body, { attributes: true, attributeFilter: ["class"] });
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  // lines: [{ name, x, y, colour, axis: 1 | 2, mode, dash }], axes: { x, y, y2 } titles.
  show(lines, axes, words) {
    this.what = { lines, axes };
    this.words.textContent = words;
    this.draw();
  }

  draw() {
    if (!this.what || this.waiting) return;
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
    const colour = (name) => getComputedStyle(this.host).getPropertyValue(name).trim();
    const { lines, axes } = this.what;
    const axis = (title, more = {}) => ({ title: { text: title, standoff: 6 }, zeroline: false,
      gridcolor: colour("--pg-line"), linecolor: colour("--pg-line"), tickfont: { size: 10 },
      rangemode: "tozero", automargin: true, ...more });
    const data = lines.map((line) => ({ type: "scatter", mode: line.mode ?? "lines", name: line.name,
      x: line.x, y: line.y, yaxis: line.axis === 2 ? "y2" : "y",
      hovertemplate: `%{x}: %{y:.2f} ${line.name}<extra></extra>`,
      line: { color: colour(line.colour), width: 2, dash: line.dash ?? "solid" },
      marker: { color: colour(line.colour), size: line.mode === "markers" ? 9 : 5 } }));
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

  resize() {
    if (window.Plotly && this.plot.data && this.plot.clientWidth) window.Plotly.Plots.resize(this.plot);
  }
}
