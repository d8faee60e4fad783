// Beside the tree: latency of this machine, draft length, runs made with this tree.
// Needs dom.js, tree_model.js, tree_figures.js, tree_chart.js, tree_job.js, tree_optimise.js.
const FETCH_AFTER_MS = 250;

class TreeSide {
  constructor(editor) {
    this.editor = editor;
    this.optimise = new OptimiseCard(editor);
    this.latency = new LatencyCard(editor);
    this.length = new LengthCard(editor);
    this.dynamic = new DynamicCard(editor);
    this.runs = new RunsCard(editor);
    this.cards = [this.length, this.dynamic, this.optimise, this.latency, this.runs];
    this.host = h("aside", { class: "side", "aria-label": "tune the tree" },
      ...this.cards.map((one) => one.host));
  }

  settings() { return this.dynamic.settings(); }

  // Another method, table or latency curve.
  changed() { for (const one of this.cards) one.changed(); }
  edited() { for (const one of this.cards) one.edited(); }
}

// ---- how long a verify forward takes here

class LatencyCard {
  constructor(editor) {
    this.editor = editor;
    this.job = new TreeJob("Measure latency", () => server.measure({ kind: "latency",
      target: editor.pickers.target, method: editor.method?.key, source: editor.source?.id ?? null,
      tab: TAB }), (end) => editor.adoptSpeed(end.speed));
    this.chart = new TreeChart("", 140);
    this.host = card("latency", "Latency of this machine", this.job.host, this.chart.host);
  }

  changed() {
    if (!this.editor.speed) this.job.clear();
    this.edited();
  }

  edited() {
    const { speed, tree, now } = this.editor;
    this.chart.plot.hidden = !speed;
    if (!speed) {
      this.chart.words.textContent = "Not measured for this method here yet. It takes some seconds and "
        + "turns MAT into predicted tok/s.";
      return;
    }
    const rows = now.nodes + 1;
    const most = Math.max(rows, speed.verify[speed.verify.length - 1][0]);
    const points = [...speed.verify, ...(speed.verify.some(([n]) => n >= most) ? [] : [[most,
      curveAt(speed.verify, most)]])];
    const parts = now.parts ?? { draft: draftMs(speed.draft, levelsOf(tree, speed.levels)),
      verify: curveAt(speed.verify, rows), other: curveAt(speed.other, rows) };
    this.chart.show([
      { name: "ms", x: points.map(([n]) => n), y: points.map(([, ms]) => ms), colour: "--pg-target",
        mode: "lines+markers" },
      { name: "ms: this tree", x: [rows], y: [parts.verify], colour: "--pg-prob", mode: "markers" },
    ], { x: "rows of a verify forward", y: "ms" },
    `This tree: draft ${milliseconds(parts.draft)} ms + verify ${milliseconds(parts.verify)} ms `
      + `(${plural(Math.round(rows), "row")}) + other ${milliseconds(parts.other)} ms. ${speed.words}`);
  }
}

// ---- draft length of a chain

class LengthCard {
  constructor(editor) {
    this.editor = editor;
    this.box = numberField("length", "tokens drafted per step", "length of the chain",
      { min: 1, step: 1 }, () => this.take(Math.round(Number(this.box.box.value))));
    this.slide = h("input", { type: "range", min: 0, step: 1, "aria-label": "draft length",
      oninput: () => this.take(this.lengths[Number(this.slide.value)]) });
    this.state = h("div", { class: "card-state", role: "status" });
    this.chart = new TreeChart("", 150, (length) => this.take(length));
    this.host = card("length", "Draft length", this.box.field, this.slide, this.state, this.chart.host);
  }

  changed() {
    const { method, table } = this.editor;
    this.host.hidden = method?.kind !== "chain";
    if (this.host.hidden) return;
    const most = method.limits?.depth ?? 16;
    this.lengths = (table?.lengths ?? Array.from({ length: most }, (_, i) => i + 1))
      .filter((length) => length <= most);
    this.box.box.max = most;
    this.slide.max = this.lengths.length - 1;
    this.edited();
  }

  edited() {
    if (this.host.hidden) return;
    const { depth } = this.editor.tree;
    this.box.box.value = depth;
    this.slide.value = this.lengths.findLastIndex((length) => length <= depth);
    this.slide.setAttribute("aria-valuetext", plural(depth, "token"));
    this.drawCurve();
  }

  take(length) {
    const { editor } = this;
    if (!(length >= 1 && length <= Number(this.box.box.max)) || length === editor.tree.depth) return;
    editor.adopt(Choices.chain(length), "", `Draft length ${length}`);
  }

  drawCurve() {
    const { table, speed, tree, now } = this.editor;
    this.chart.host.hidden = !table;
    if (!table) { this.state.textContent = "Needs a rank table: pick or measure one above."; return; }
    const rows = this.lengths.map((length) => ({ length, ...this.editor.worth(Choices.chain(length)) }));
    const best = speed ? rows.reduce((a, b) => b.tok_s > a.tok_s ? b : a) : null;
    this.state.textContent = !best ? "Measure the latency below to see which length is fastest."
      : `Fastest here: ${plural(best.length, "token")}, ${number(best.tok_s, 1)} tok/s predicted`
        + (best.speedup < 1 ? "; plain decoding is faster than any draft." : ".");
    const x = rows.map((row) => row.length);
    const lines = [{ name: "MAT", x, y: rows.map((row) => row.mat), colour: "--pg-draft" }];
    if (speed) lines.push({ name: "tok/s", x, y: rows.map((row) => row.tok_s), colour: "--pg-target",
      axis: 2 });
    if (now.mat !== null) lines.push({ name: "MAT now", x: [tree.depth], y: [now.mat],
      colour: "--pg-draft", mode: "markers" });
    if (now.tok_s !== null) lines.push({ name: "tok/s now", x: [tree.depth], y: [now.tok_s],
      colour: "--pg-target", axis: 2, mode: "markers" });
    this.chart.show(lines, { x: "tokens drafted", y: "MAT", y2: speed ? "predicted tok/s" : null },
      "Green: MAT." + (speed ? " Blue: predicted tok/s." : "") + " Click a length to take it.");
  }
}

// ---- what runs with this very tree measured

function stepMs(run) { return run.tok_s ? 1000 * run.mat / run.tok_s : NaN; }

class RunsCard {
  constructor(editor) {
    this.editor = editor;
    this.list = h("div", { class: "card-state" });
    this.host = card("runs", "Predicted against measured", this.list);
    new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) this.edited();
    }).observe(this.host);
  }

  changed() { this.edited(); }

  edited() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch(), FETCH_AFTER_MS);
  }

  async fetch() {
    const { editor } = this;
    if (!editor.method || !this.host.isConnected) return;
    const ticket = this.asking = Symbol("asking");
    const answer = await server.measured({ target: editor.pickers.target, method: editor.method.key,
      tree: editor.tree.paths, settings: editor.side.settings() });
    if (ticket !== this.asking) return;
    if (!answer || answer.error) { this.list.textContent = answer?.error ?? ""; return; }
    if (!answer.runs.length) {
      this.list.textContent = "No greedy run with this tree is in the log yet. Use it in Generate, then "
        + "come back.";
      return;
    }
    this.list.replaceChildren(this.table(answer.runs));
  }

  table(runs) {
    const { now } = this.editor;
    const off = (measured, predicted) => Number.isFinite(measured) && Number.isFinite(predicted)
      ? ` (${measured >= predicted ? "+" : "\u2212"}`
        + `${Math.abs(100 * (measured / predicted - 1)).toFixed(0)} %)` : "";
    const row = (cells, tag) => h("tr", {}, ...cells.map((cell) => h(tag, {}, cell)));
    // MAT hangs on the prompt, the time of a step on the machine: so it shows which was off.
    return h("table", {}, h("thead", {}, row(["", "MAT", "ms a step", "tok/s"], "th")), h("tbody", {},
      row(["predicted", number(now.mat, 2), number(now.step_ms, 1), number(now.tok_s, 1)], "td"),
      ...runs.map((run) => row([
        h("a", { href: `?run=${encodeURIComponent(run.id)}`, target: "_blank", rel: "noopener",
          title: run.prompt }, clip(run.prompt, 28) || "run"),
        number(run.mat, 2) + off(run.mat, now.mat),
        number(stepMs(run), 1) + off(stepMs(run), now.step_ms),
        number(run.tok_s, 1) + off(run.tok_s, now.tok_s)], "td"))));
  }
}
