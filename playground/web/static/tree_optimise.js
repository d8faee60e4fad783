// The best tree of a size, and the best size for this machine, drawn as a ghost over the current tree.
// Needs dom.js, tree_model.js, tree_figures.js, tree_chart.js, tree_card.js.
const CURVE_AFTER_MS = 250;
const IDLE = "Draws the best tree over yours; nothing changes until you accept it.";

class OptimiseCard {
  constructor(editor) {
    this.editor = editor;
    const later = () => this.later();
    this.nodes = numberField("nodes", "nodes", "how many nodes the best tree may have",
      { min: 1, max: 256, step: 1, value: 24 }, () => this.nodesMoved());
    this.slide = h("input", { type: "range", min: 1, max: 128, step: 1, value: 24, tabindex: "-1",
      "aria-hidden": "true", oninput: () => { this.nodes.box.value = this.slide.value; later(); } });
    this.depth = numberField("max_depth", "max depth", "deepest node allowed; empty = the table's depth",
      { min: 1, placeholder: "any" }, later);
    this.width = numberField("max_width", "ranks used", "ranks that may be used, 0 up to one less; empty = any",
      { min: 1, placeholder: "any" }, later);
    const button = (name, text, title, work) => h("button", { type: "button", class: "tool",
      "data-tool": name, title, onclick: work }, text);
    this.accept = button("accept", "Accept", "make the proposed tree the current one",
      () => this.take());
    this.dismiss = button("dismiss", "Dismiss", "keep the current tree", () => this.drop(IDLE));
    this.accept.disabled = this.dismiss.disabled = true;
    this.state = h("div", { class: "card-state", role: "status" });
    this.chart = new TreeChart("", 168, (nodes) => this.propose(nodes));
    this.host = card("optimise", "Optimise",
      h("div", { class: "row fields" }, this.nodes.field, this.depth.field, this.width.field),
      this.slide,
      h("div", { class: "row" },
        button("best", "Best of this size", "the tree of so many nodes that accepts most",
          () => this.propose(Number(this.nodes.box.value))),
        button("best-size", "Best for this machine",
          "the size whose predicted tok/s is highest, by the measured latency curve",
          () => this.proposeBestSize())),
      this.state, h("div", { class: "row" }, this.accept, this.dismiss), this.chart.host);
  }

  nodesMoved() {
    this.slide.value = this.nodes.box.value;
    this.later();
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.editor.ghost) this.propose(Number(this.nodes.box.value));
      this.fetchCurve();
    }, CURVE_AFTER_MS);
  }

  bounds() {
    const read = (box) => box.value.trim() === "" ? null : Number(box.value);
    const { editor } = this;
    return { source: editor.source?.id, method: editor.method?.key, target: editor.pickers.target,
      category: editor.category, max_depth: read(this.depth.box), max_width: read(this.width.box) };
  }

  changed() {
    const { table, method } = this.editor;
    this.host.hidden = method?.kind !== "tree";
    this.drop("");
    if (!table) this.points = this.best = this.key = null;
    for (const box of this.host.querySelectorAll("input, [data-tool^=best]")) box.disabled = !table;
    this.state.textContent = table ? IDLE : "Needs a rank table: pick or measure one above.";
    this.chart.host.hidden = !table;
    if (table) this.fetchCurve();
  }

  edited() {
    if (this.editor.ghost) this.tell();
    this.drawCurve();
  }

  async propose(nodes) {
    if (!Number.isFinite(nodes)) return;
    this.nodes.box.value = this.slide.value = nodes;
    this.wanted = false;
    const ticket = this.asking = Symbol("asking");
    const answer = await server.optimise({ ...this.bounds(), nodes });
    if (ticket !== this.asking) return;
    if (!answer || answer.error) {
      this.drop(answer?.error ?? "The server did not answer. Try again.");
      return;
    }
    this.editor.showGhost(Choices.closed(answer.tree));
    this.tell();
  }

  proposeBestSize() {
    if (!this.best) {
      this.wanted = this.editor.speed !== null;
      this.state.textContent = this.wanted ? "Computing the best tree of every size first \u2026"
        : "Measure the latency of this machine first: without it no size is better than another.";
      return;
    }
    this.propose(this.best.nodes);
  }

  tell() {
    const { editor } = this, { ghost } = editor;
    const then = editor.worth(ghost), { now } = editor;
    const same = ghost.equals(editor.tree);
    const speed = then.tok_s === null ? ""
      : `, ${number(now.tok_s, 1)} \u2192 ${number(then.tok_s, 1)} tok/s`;
    this.state.textContent = same ? `This is the best tree of ${plural(ghost.size, "node")} already.`
      : `${plural(ghost.size, "node")}: MAT ${number(now.mat, 3)} \u2192 ${number(then.mat, 3)}${speed}.`
        + " Green nodes would come, red ones go.";
    this.accept.disabled = same;
    this.dismiss.disabled = false;
  }

  take() {
    const { ghost } = this.editor;
    this.drop(IDLE);
    this.editor.adopt(ghost, "", `Took the best tree of ${plural(ghost.size, "node")}`);
    this.editor.view.fit(READABLE);
  }

  drop(words) {
    this.wanted = false;
    if ([this.accept, this.dismiss].includes(document.activeElement)) this.editor.keepFocus();
    this.accept.disabled = this.dismiss.disabled = true;
    this.state.textContent = words;
    this.asking = null;
    if (this.editor.ghost) this.editor.showGhost(null);
  }

  // ---- MAT(n) and tok/s(n)

  async fetchCurve() {
    if (!this.editor.table || this.host.hidden) return;
    const asked = this.bounds(), key = JSON.stringify(asked);
    if (key === this.key) { this.drawCurve(); return; }
    this.key = key;
    this.points = this.best = null;
    this.chart.words.textContent = "Computing the best tree of every size \u2026";
    const answer = await server.curve(asked);
    if (key !== this.key) return;
    if (!answer || answer.error) {
      this.chart.words.textContent = answer?.error ?? "The server did not answer. Try again.";
      return;
    }
    this.points = answer.points;
    this.drawCurve();
    if (this.wanted) this.proposeBestSize();
  }

  drawCurve() {
    const { speed, now, tree } = this.editor;
    if (!this.points?.length) return;
    const rows = this.points.map(({ nodes, mat, levels, size }) =>
      ({ nodes, mat, tok_s: predict(speed, mat, levels, [[size, 1]]).tok_s }));
    this.best = speed ? rows.reduce((a, b) => b.tok_s > a.tok_s ? b : a) : null;
    const x = rows.map((row) => row.nodes);
    const lines = [{ name: "MAT", x, y: rows.map((row) => row.mat), colour: "--pg-draft" },
      { name: "MAT of this tree", x: [tree.size], y: [now.mat], colour: "--pg-draft", mode: "markers" }];
    if (speed) {
      lines.push(
        { name: "tok/s", x, y: rows.map((row) => row.tok_s), colour: "--pg-target", axis: 2 },
        { name: "tok/s of this tree", x: [tree.size], y: [now.tok_s], colour: "--pg-target", axis: 2,
          mode: "markers" });
    }
    const best = this.best ? ` Best for this machine: ${plural(this.best.nodes, "node")}, MAT `
      + `${number(this.best.mat, 2)}, ${number(this.best.tok_s, 1)} tok/s.` : "";
    this.chart.show(lines, { x: "nodes", y: "MAT", y2: speed ? "predicted tok/s" : null },
      `Green: MAT of the best tree of n nodes.${speed ? " Blue: its predicted tok/s." : ""} Points: `
      + `this tree; click a size to see its best tree.${best}`);
  }
}
