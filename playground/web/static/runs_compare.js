// The ticked runs side by side: only the settings that differ, figures with their spread, charts.
// Needs dom.js, runs_columns.js, runs_table.js, runs_charts.js.
const COMPARED = [["tok_s", "tok/s", (v) => number(v, 1), true], ["speedup", "speedup", (v) =>
  `${number(v, 2)}\u00d7`, true], ["mat", "MAT", (v) => number(v, 2), true],
["draft_acceptance", "acceptance", percent, true],
["ttft_s", "TTFT ms", milliseconds, false],
["itl_ms", "ITL ms", milliseconds, false], ["step_p50_ms", "step p50 ms", milliseconds, false],
["step_p95_ms", "step p95 ms", milliseconds, false], ["num_new_tokens", "tokens", (v) => number(v, 0), null]];
const DRAWN = ["tok_s", "speedup", "mat", "ttft_s", "step_p50_ms"];
const ON_AXES = ["draft_acceptance", "mat", "step_p50_ms", "ttft_s", "tok_s"];

class Compare {
  // calls: ask(name, asked), baseline(), pin(setup), open(id), close(), formula(column)
  constructor(calls) {
    this.calls = calls;
    this.title = h("h3", {});
    this.table = h("div", { class: "frame tall" });
    this.charts = h("div", { class: "charts" });
    this.parallel = new ParallelLines((id) => calls.open(id));
    this.note = h("p", { class: "hint" },
      "A line per run. Drag along an axis to keep a part of it; click a line to open its run.");
    this.host = h("section", { class: "compare", hidden: true, "aria-label": "comparison" },
      h("div", { class: "bar" }, this.title, h("span", { class: "spring" }),
        h("button", { type: "button", onclick: () => calls.close() }, "close")),
      this.table, this.charts, h("div", { class: "all-lines" }, this.parallel.host, this.note));
    new ResizeObserver(() => this.drawCharts()).observe(this.charts);
  }

  async show(ids) {
    this.ids = ids;
    if (!ids) { this.host.hidden = true; this.found = null; return; }
    const found = await this.calls.ask("compare", { ids, baseline: this.calls.baseline()?.setup_id });
    if (this.ids !== ids) return;
    this.found = found && inMilliseconds(found);
    this.host.hidden = !found;
    if (!found) return;
    const runs = found.lines.runs.length;
    this.title.textContent = `${plural(runs, "run")} in ${plural(found.setups.length, "configuration")}`;
    this.drawTable();
    this.width = 0;
    this.drawCharts();
    this.drawLines();
  }

  drawTable() {
    const { setups, differences, surroundings } = this.found;
    const heads = setups.map((setup, place) => this.head(setup, place));
    const wide = setups.length + 1;
    const part = (words) => h("tr", { class: "part" }, h("th", { colspan: wide }, words));
    const rows = (list) => list.map(({ name, values }) => h("tr", { "data-name": name },
      h("th", {}, name), ...values.map((value) => h("td", { title: value }, value))));
    this.table.replaceChildren(h("table", { class: "differences" },
      h("thead", {}, h("tr", {}, h("th", {}), ...heads)),
      h("tbody", {},
        part(differences.length ? "settings that differ" : "all settings are the same"),
        ...rows(differences),
        ...(surroundings.length ? [part("machine and versions that differ"), ...rows(surroundings)] : []),
        part("figures: mean \u00b1 standard deviation over the runs"), ...this.figures())));
  }

  head(setup, place) {
    const runs = plural(setup.runs.length, "run");
    const prompts = setup.num_prompts > 1 ? ` on ${setup.num_prompts} prompts` : "";
    const pin = h("button", { type: "button", class: "quiet", onclick: () =>
      this.calls.pin(setup.baseline ? null : { setup_id: setup.id, method_title: setup.title,
        settings: setup.settings }) }, setup.baseline ? "unpin baseline" : "pin as baseline");
    return h("th", { class: "setup" }, h("span", { class: `swatch ${hue(place)}` }),
      setup.baseline ? h("span", { class: "star" }, "\u2605 ") : null, setup.title,
      setup.lossless ? null : h("span", { class: "lossy" }, "lossy"),
      h("span", { class: "remark" }, setup.settings), h("span", { class: "remark" }, runs + prompts), pin);
  }

  figures() {
    const { setups } = this.found;
    return COMPARED.filter(([key]) => setups.some((setup) => setup.figures[key].values))
      .map(([key, title, show, more]) => {
        const means = setups.map((setup) => setup.figures[key].mean ?? null);
        const known = means.filter((mean) => mean !== null);
        const best = more === null || known.length < 2 ? null
          : Math[more ? "max" : "min"](...known);
        return h("tr", { "data-name": key }, h("th", { title: this.calls.formula({ key }) }, title),
          ...setups.map((setup, i) => h("td", { class: means[i] !== null && means[i] === best ? "num best" : "num" },
            setup.figures[key].values ? spreadWords(setup.figures[key], show) : DASH)));
      });
  }

  drawCharts() {
    const room = this.charts.clientWidth;
    if (!this.found || !room || room === this.width) return;
    this.width = room;
    const columns = Math.max(1, Math.floor((room + 12) / (330 + 12)));
    const width = Math.floor((room - 12 * (columns - 1)) / columns) - 22;
    const { setups } = this.found;
    const name = (setup) => [setup.title, setup.settings].filter(Boolean).join(" \u00b7 ");
    const charts = DRAWN.filter((key) => setups.some((setup) => setup.figures[key].values)).map((key) => {
      const [, title, show] = COMPARED.find(([other]) => other === key);
      const rows = setups.map((setup, place) => ({ place, name: name(setup), figure: setup.figures[key] }));
      return spreadChart(title, this.calls.formula({ key }), rows, show, width);
    });
    const splits = setups.map((setup) => ({ name: name(setup), split: setup.split }));
    if (splits.some(({ split }) => split.verify_s !== null)) {
      charts.push(splitChart(this.calls.formula({ key: "time_split" }), splits, width));
    }
    this.charts.replaceChildren(...charts);
  }

  drawLines() {
    const { lines, setups } = this.found;
    const short = (name) => name.replace(/^(method|sampling|limits)\./, "");
    const figures = ON_AXES.map((key) => lines.figures.find((figure) => figure.name === key)).filter(Boolean);
    const axes = [...lines.axes.map((axis) => ({ ...axis, title: short(axis.name) })),
      ...figures.map(({ name, values }) => {
        const [, title] = COMPARED.find(([key]) => key === name);
        return { title, values, words: null, help: this.calls.formula({ key: name }) };
      })];
    this.parallel.show(lines, axes, setups.map((setup) => setup.title));
  }
}

// TTFT is stored in seconds, and shown beside the other latencies.
function inMilliseconds(found) {
  const scaled = (v) => (v === null || v === undefined ? v : 1000 * v);
  for (const { figures } of found.setups) {
    const { ttft_s: one } = figures;
    if (one.values) Object.assign(one, { mean: scaled(one.mean), std: scaled(one.std), values: one.values.map(scaled) });
  }
  for (const figure of found.lines.figures) {
    if (figure.name === "ttft_s") figure.values = figure.values.map(scaled);
  }
  return found;
}
