// Optuna's plots, drawn by plotly, which is loaded when the first one is asked for. Needs dom.js.
const PLOTS = [["history", "History"], ["parallel", "Parallel coordinates"], ["slice", "Slices"],
  ["importance", "Importance"]];
let plotlyLoading = null;

function loadPlotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  plotlyLoading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: new URL(props.plotly, document.baseURI).href });
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

class SweepPlots {
  constructor() {
    this.tabs = PLOTS.map(([kind, title]) => h("button", { type: "button", role: "tab",
      "data-plot": kind, onclick: () => this.pick(kind) }, title));
    this.plot = h("div", { class: "plot" });
    this.note = h("p", { class: "note" });
    this.host = h("div", { class: "card plots" },
      h("div", { class: "tabs", role: "tablist", onkeydown: (event) => this.walk(event) },
        ...this.tabs), this.plot, this.note);
    this.kind = PLOTS[0][0];
    this.mark();
    new MutationObserver(() => this.draw())
      .observe(document.body, { attributes: true, attributeFilter: ["class"] });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // Show a sweep's plots; `version` says whether anything new was measured.
  show(name, version) {
    if (this.name === name && this.version === version) return;
    if (this.name !== name) this.clear("");
    this.name = name;
    this.version = version;
    this.load();
  }

  pick(kind) {
    this.kind = kind;
    this.mark();
    this.load();
  }

  walk(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = PLOTS.findIndex(([kind]) => kind === this.kind);
    const [kind] = PLOTS[(at + by + PLOTS.length) % PLOTS.length];
    this.pick(kind);
    this.tabs.find((tab) => tab.dataset.plot === kind).focus();
  }

  mark() {
    for (const tab of this.tabs) {
      const on = tab.dataset.plot === this.kind;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    }
  }

  async load() {
    if (!this.name) return;
    const ticket = this.ticket = (this.ticket ?? 0) + 1;
    const figure = await server.draw({ name: this.name, kind: this.kind });
    if (ticket !== this.ticket) return;
    if (!figure || figure.error) {
      this.clear(figure?.error ?? "The server did not answer. Try again.");
      return;
    }
    this.figure = figure;
    this.note.textContent = figure.note;
    await this.draw();
  }

  clear(words) {
    this.figure = null;
    if (window.Plotly && this.plot.data) window.Plotly.purge(this.plot);
    this.plot.replaceChildren();
    this.note.textContent = words;
  }

  async draw() {
    if (!this.figure || !this.plot.clientWidth || this.drawing) return;
    this.drawing = true;
    try {
      const plotly = await loadPlotly();
      if (this.figure) {
        await plotly.react(this.plot, this.figure.data, this.themed(this.figure.layout),
          { displayModeBar: false, responsive: false });
        this.plot.dataset.drawn = this.kind;
      }
    } catch (error) {
      this.note.textContent = "The plot could not be drawn; the table below has all its figures.";
    } finally {
      this.drawing = false;
    }
  }

  // The page's colours and sizes over Optuna's layout.
  themed(layout) {
    const colour = (name) => getComputedStyle(this.host).getPropertyValue(name).trim();
    const text = colour("--body-text-color-subdued"), grid = colour("--border-color-primary");
    const mine = { ...layout, width: this.plot.clientWidth, height: 300,
      margin: { l: 56, r: 20, t: this.kind === "parallel" ? 34 : 10, b: 44 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: colour("--font"), size: 11, color: text },
      legend: { ...layout.legend, orientation: "h", y: 1.02, yanchor: "bottom" } };
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      mine[key] = { ...layout[key], gridcolor: grid, linecolor: grid, zerolinecolor: grid,
        automargin: true };
    }
    if (this.kind === "history" && this.version < 12) mine.xaxis.dtick = 1;
    mine.annotations = layout.annotations?.map((one) => ({ ...one,
      font: { ...one.font, color: text } }));
    return mine;
  }
}
