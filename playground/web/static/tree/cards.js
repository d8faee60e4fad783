// The cards beside the tree: draft length, dynamic tree, optimise, latency, runs, mask.
//
// drafted: { text, mat, rates, steps, tokens, nodes, counts: { nodes, depths: [[value, steps], …] },
// smaller: [[nodes, mat], …], paths: [[path, drafted, accepted], …] }
import { clip, h, milliseconds, number, onShown, part, plural, table } from "../kit.js";
import { MaskView } from "../mask.js";
import { Choices, pathText } from "./model.js";
import { Chart, Job, debounced, elementsBy, latest } from "./parts.js";
import { draftMs, interpolate, maxDepth, predict, verifyMs } from "./replay.js";
import { READABLE } from "./view.js";

const SETTLED_MS = 250;
/** Why there are no figures: none are measured, or none can be. */
const noTable = ({ pickers }) => pickers?.remark ? "No rank table is possible for this method; see above."
  : "Needs a rank table: pick or measure one above.";

export function makeCards(editor) {
  const cards = { length: new LengthCard(editor), dynamic: new DynamicCard(editor),
    optimise: new OptimiseCard(editor), latency: new LatencyCard(editor),
    runs: new RunsCard(editor), mask: new MaskCard(editor) };
  const all = Object.values(cards);
  return { ...cards, onContextChange: () => all.forEach((one) => one.onContextChange()),
    onTreeEdit: () => all.forEach((one) => one.onTreeEdit()) };
}

class Card {
  constructor(editor, name, onPick = (x) => {}) {
    this.editor = editor;
    this.host = part(editor.host, `[data-card=${name}]`);
    /** @type {any} */
    this.state = this.host.querySelector(".card-state");
    this.fields = elementsBy(this.host, "field");
    this.slides = elementsBy(this.host, "slide");
    const chart = this.host.querySelector(".chart");
    /** @type {any} */
    this.chart = chart && new Chart(chart, onPick);
    this.host.addEventListener("input", (event) => {
      const { dataset, value } = /** @type {HTMLInputElement} */ (event.target);
      const twin = this.slides[dataset.field ?? ""] ?? this.fields[dataset.slide ?? ""];
      if (twin) twin.value = value;
      if (dataset.field || dataset.slide) this.onFieldInput();
    });
  }

  set(name, value) {
    this.fields[name].value = value;
    if (name in this.slides) this.slides[name].value = value;
  }

  // Hooks: a field was edited; method, table or latency changed; the tree was edited.
  onFieldInput() {}
  onContextChange() {}
  onTreeEdit() {}
}

const fastest = (rows) => rows.reduce((a, b) => b.tok_s > a.tok_s ? b : a);
const fastestText = (best, noun) =>
  `Fastest here: ${plural(best.x, noun)}, ${number(best.tok_s, 1)} tok/s predicted`;

// Draft length of a chain; the slider covers the lengths in the table, so every position has figures.
class LengthCard extends Card {
  lengths = [];

  constructor(editor) {
    super(editor, "length", (length) => this.take(length));
    this.slide = editor.parts.lengths;
    this.slide.addEventListener("input", () => this.take(this.lengths[this.slide.value]));
  }

  onFieldInput() { this.take(Math.round(Number(this.fields.length.value))); }

  onContextChange() {
    const { method, table } = this.editor;
    this.host.hidden = method?.kind !== "chain";
    if (this.host.hidden) return;
    const most = this.fields.length.max = method.limits?.depth ?? 16;
    this.lengths = (table?.lengths ?? Array.from({ length: most }, (_, i) => i + 1))
      .filter((length) => length <= most);
    this.slide.max = this.lengths.length - 1;
    this.onTreeEdit();
  }

  onTreeEdit() {
    if (this.host.hidden) return;
    const { table, speed, tree: { depth }, now } = this.editor;
    this.fields.length.value = depth;
    this.slide.value = this.lengths.findLastIndex((length) => length <= depth);
    this.slide.setAttribute("aria-valuetext", plural(depth, "token"));
    this.chart.host.hidden = !table;
    if (!table) { this.state.textContent = noTable(this.editor); return; }
    const rows = this.lengths.map((x) => ({ x, ...this.editor.figuresOf(Choices.chain(x)) }));
    const best = speed && fastest(rows);
    this.state.textContent = !best ? "Measure the latency below to see which length is fastest."
      : fastestText(best, "token") + (best.speedup < 1 ? "; plain decoding is faster than any draft." : ".");
    this.chart.showMatAndSpeed(rows, { at: depth, now, speed }, "tokens drafted",
      `Green: MAT.${speed ? " Blue: predicted tok/s." : ""} Click a length to use it.`);
  }

  take(length) {
    const { editor } = this;
    if (!(length >= 1 && length <= this.fields.length.max) || length === editor.tree.depth) return;
    editor.adopt(Choices.chain(length), "", `Draft length ${length}`);
  }
}

// Dynamic trees (EAGLE-2/3): the recorded trees, and what fewer of their nodes would have accepted.
class DynamicCard extends Card {
  /** @type {string | null} */ shownKey = null;
  /** @type {any} */ shown = null;

  constructor(editor) {
    super(editor, "dynamic", (nodes) => this.set("max_total_draft_tokens", nodes));
  }

  settings() {
    return this.editor.method?.kind !== "dynamic" ? null : Object.fromEntries(
      Object.entries(this.fields).map(([name, box]) => [name, Number(box.value)]));
  }

  onFieldInput() { this.editor.cards.runs.onTreeEdit(); }

  onContextChange() {
    const { method, source } = this.editor;
    this.host.hidden = method?.kind !== "dynamic";
    if (this.host.hidden) return;
    const now = `${method.key}/${source?.id}`;
    if (now === this.shownKey) { this.show(this.shown); return; }
    this.shownKey = now;
    for (const name of Object.keys(this.fields)) this.set(name, method.settings[name]);
    this.show(null);
  }

  take(drafted) {
    if (drafted && !this.host.hidden) this.show(drafted);
  }

  show(drafted) {
    const { editor } = this, { speed } = editor;
    this.shown = drafted;
    this.chart.host.hidden = !drafted;
    editor.showDrafted(drafted);
    if (!drafted) return;
    const depth = maxDepth(drafted.counts);
    const rows = drafted.smaller.map(([x, mat]) => ({ x, mat, ...predict(speed, mat, [[x, 1]], depth) }));
    const best = speed && fastest(rows);
    this.chart.showMatAndSpeed(rows, { at: editor.now.nodes, now: editor.now, speed }, "nodes kept",
      `${drafted.text} Green: MAT of their most probable nodes alone, at the steps of these runs.`
      + `${best ? ` ${fastestText(best, "node")}.` : ""} `
      + "The tree on the left shows the paths drafted most often, with the number of steps that drafted each.");
  }
}

const IDLE = "Draws the best tree over yours; nothing changes until you accept it.";

// The best tree of a size, and the best size for this machine, as a proposal over the current tree.
class OptimiseCard extends Card {
  /** @type {any} */ points = null;
  /** @type {any} */ bestSize = null;
  /** @type {string | null} the question that `points` answer */ curveKey = null;

  constructor(editor) {
    super(editor, "optimise", (nodes) => this.propose(nodes));
    this.newestTree = latest();
    this.settled = debounced(() => {
      if (editor.ghost) this.propose();
      this.fetchCurve();
    }, SETTLED_MS);
  }

  onFieldInput() {
    this.describeAlternatives();
    this.settled();
  }

  // MAT of chains by their length: up to the table's depth, and constant beyond.
  chain(most) {
    const { editor, editor: { table } } = this;
    const rows = Array.from({ length: Math.min(most, table?.depths ?? 0) }, (_, i) =>
      ({ x: i + 1, mat: editor.figuresOf(Choices.chain(i + 1)).mat }));
    return rows.length && most > rows.length ? [...rows, { x: most, mat: rows[rows.length - 1].mat }] : rows;
  }

  // What as many nodes accept as a chain, as this tree, and as the best tree.
  describeAlternatives() {
    const { editor, editor: { now, tree, table }, points } = this, { against } = editor.parts;
    const nodes = Number(this.fields.nodes.value);
    against.textContent = "";
    if (!points?.length || !table || !(nodes >= 1)) return;
    const best = points.findLast(({ size }) => size <= nodes) ?? points[0];
    const chain = editor.figuresOf(Choices.chain(Math.min(nodes, table.depths))).mat;
    const ends = nodes > table.depths ? `, of which the table knows ${table.depths}` : "";
    against.textContent = `${plural(nodes, "node")} as a chain accept ${number(chain - 1, 2)} drafts a step${ends}; `
      + `as the best tree ${number(best.mat - 1, 2)}. This tree of ${tree.size}: ${number(now.mat - 1, 2)}. A chain `
      + "ends at its first wrong token; a tree has second and third guesses.";
  }

  // What the best tree depends on besides its size.
  bounds() {
    const [max_depth, max_width] = [this.fields.max_depth, this.fields.max_width].map((box) =>
      box.value.trim() === "" ? null : Number(box.value));
    const { source, category } = this.editor;
    return { source: source?.id, category: category || null, max_depth, max_width };
  }

  onContextChange() {
    const { table, method, tools } = this.editor;
    this.host.hidden = method?.kind !== "tree";
    this.dismiss("");
    this.set("nodes", this.editor.tree.size);
    if (!table) this.points = this.bestSize = this.curveKey = null;
    for (const control of [...this.host.querySelectorAll("input"), tools.best]) control.disabled = !table;
    tools["best-size"].disabled = !this.bestSize;
    this.state.textContent = table ? IDLE : noTable(this.editor);
    this.chart.host.hidden = !table;
    this.describeAlternatives();
    if (table) this.fetchCurve();
  }

  onTreeEdit() {
    if (this.editor.ghost) this.describeGhost();
    else this.set("nodes", this.editor.tree.size);
    this.drawCurve();
  }

  async propose(nodes = Number(this.fields.nodes.value)) {
    if (!Number.isFinite(nodes)) return;
    this.set("nodes", nodes);
    const answer = await this.newestTree(this.editor.ask("optimise", { ...this.bounds(), nodes }));
    if (answer?.error) this.dismiss(answer.error);
    if (!answer?.tree) return;
    this.editor.showGhost(Choices.closed(answer.tree));
    this.describeGhost();
  }

  describeGhost() {
    const { tree, ghost, now, tools } = this.editor;
    const then = this.editor.figuresOf(ghost), same = ghost.equals(tree);
    const speed = then.tok_s === null ? ""
      : `, ${number(now.tok_s, 1)} \u2192 ${number(then.tok_s, 1)} tok/s`;
    this.state.textContent = same ? `This is already the best tree of ${plural(ghost.size, "node")}.`
      : `${plural(ghost.size, "node")}: MAT ${number(now.mat, 3)} \u2192 ${number(then.mat, 3)}${speed}.`
        + " Green nodes would be added, red ones removed.";
    tools.accept.disabled = same;
    tools.dismiss.disabled = false;
  }

  accept() {
    const { editor, editor: { ghost } } = this;
    this.dismiss();
    editor.adopt(ghost, "", `Now the best tree of ${plural(ghost.size, "node")}`);
    editor.view.fit(READABLE);
  }

  dismiss(text = IDLE) {
    const { editor, editor: { tools: { accept, dismiss } } } = this;
    this.newestTree(null);
    if ([accept, dismiss].includes(document.activeElement)) editor.keepFocus();
    accept.disabled = dismiss.disabled = true;
    this.state.textContent = text;
    if (editor.ghost) editor.showGhost(null);
  }

  // MAT(n) and tok/s(n).
  async fetchCurve() {
    const { editor } = this;
    if (!editor.table || this.host.hidden) return;
    const bounds = this.bounds();
    const curveKey = JSON.stringify([editor.method.key, bounds, editor.speed?.verify.trees ?? null]);
    if (curveKey === this.curveKey) { this.drawCurve(); return; }
    this.curveKey = curveKey;
    this.points = this.bestSize = null;
    this.chart.note.textContent = "Computing the best tree of every size \u2026";
    const answer = await editor.ask("curve", bounds);
    if (curveKey !== this.curveKey) return;
    if (answer.error) this.chart.note.textContent = answer.error;
    this.points = answer.points;
    this.drawCurve();
  }

  drawCurve() {
    const { speed, now, tree, tools } = this.editor;
    this.describeAlternatives();
    if (!this.points?.length) return;
    const chain = this.chain(this.points[this.points.length - 1].size);
    const rows = this.points.map(({ mat, size, depth }) =>
      ({ x: size, depth, mat, tok_s: predict(speed, mat, [[size, 1]], depth).tok_s }));
    const best = this.bestSize = speed && fastest(rows);
    tools["best-size"].disabled = !best;
    const others = [{ name: "MAT of a chain", x: chain.map(({ x }) => x), y: chain.map(({ mat }) => mat),
      colour: "--pg-prob" }];
    this.chart.showMatAndSpeed(rows, { at: tree.size, now, speed, others }, "nodes",
      `Green: MAT of the ${speed?.verify.trees ? "fastest" : "best"} tree of n nodes; orange: of a chain of n.`
      + `${speed ? " Blue: its predicted tok/s." : ""} Dots: the tree as it is now. Click a size to see its best `
      + "tree." + (best ? ` Best for this machine: ${plural(best.x, "node")}`
        + `${best.depth === best.x ? " in a row" : ""}, MAT ${number(best.mat, 2)}, ${number(best.tok_s, 1)} tok/s.` : ""));
  }
}

// How long a verify forward takes here.
class LatencyCard extends Card {
  constructor(editor) {
    super(editor, "latency");
    this.job = new Job(editor, "latency", () => ({ kind: "latency" }),
      (end) => editor.adoptSpeed(end.speed));
  }

  onContextChange() {
    if (!this.editor.speed) this.job.clear();
    this.onTreeEdit();
  }

  onTreeEdit() {
    const { speed, now } = this.editor, { chart } = this;
    chart.plot.hidden = !speed;
    if (!speed) {
      chart.note.textContent = "Not measured for this method on this machine yet. Measuring takes up "
        + "to half a minute and turns MAT into predicted tok/s.";
      return;
    }
    const rows = now.nodes + 1, { verify, verify: { trees } } = speed;
    const chain = [...verify.rows, ...verify.rows.at(-1) < rows ? [rows] : []];
    const parts = now.parts ?? { draft: draftMs(speed, now.depth),
      verify: verifyMs(speed, now.nodes, now.depth) };
    const shape = plural(Math.round(rows), "row")
      + (trees ? `, ${plural(now.depth + 1, "level")}` : "");
    chart.show([
      { name: trees ? "ms: chain" : "ms", x: chain, colour: "--pg-target", mode: "lines+markers",
        y: chain.map((n) => interpolate(verify.rows, verify.ms, n)) },
      ...!trees ? [] : [{ name: "ms: 3 levels", x: trees.rows, colour: "--pg-reject", mode: "lines+markers",
        y: trees.rows.map((n) => verifyMs(speed, n - 1, 2)) }],
      { name: "ms: this tree", x: [rows], y: [parts.verify], colour: "--pg-prob", mode: "markers" },
    ], { x: "rows of a verify forward", y: "ms" },
    `This tree: draft ${milliseconds(parts.draft)} ms + verify ${milliseconds(parts.verify)} ms `
      + `(${shape}). With about ${verify.context_len} tokens of context, as measured on this machine and kept `
      + "up to date by runs.");
  }
}

// What an engine computes from the tree, and receives at every step.
class MaskCard extends Card {
  constructor(editor) {
    super(editor, "mask");
    this.latest = latest();
    this.onTreeEdit = this.onContextChange = debounced(() => this.fetch(), SETTLED_MS);
    this.view = new MaskView();
    this.view.host.addEventListener("toggle", this.onTreeEdit);  // `fetch` does nothing while it is closed
    this.host.append(this.view.host);
  }

  async fetch() {
    const { editor, view } = this, { keys, paths } = editor.tree;
    this.host.hidden = editor.isDynamic;  // the drafter grows another tree at every step
    if (editor.isDynamic || !view.isOpen) return;
    const { text, error } = await this.latest(editor.ask("write",
      { tree: paths, format: "buffers" })) ?? {};
    this.state.textContent = error ?? "";
    if (text) view.show(JSON.parse(text), ["root", ...keys.map(pathText)]);
  }
}

// What runs with exactly this tree measured.
class RunsCard extends Card {
  constructor(editor) {
    super(editor, "runs");
    this.job = new Job(editor, "runs", () => ({ kind: "runs", ...this.request() }), ({ drafted }) => {
      editor.cards.dynamic.take(drafted);
      this.onTreeEdit();
    });
    this.latest = latest();
    this.onTreeEdit = this.onContextChange = debounced(() => this.fetch(), SETTLED_MS);
    onShown(this.host, this.onTreeEdit);
  }

  request() {
    const { editor } = this;
    return { tree: editor.tree.paths, settings: editor.cards.dynamic.settings() };
  }

  async fetch() {
    const { editor } = this;
    if (!editor.method || !this.host.isConnected) return;
    const answer = await this.latest(editor.ask("measured", this.request()));
    if (!answer) return;
    this.state.replaceChildren(answer.error ?? (answer.runs.length ? this.table(answer.runs)
      : answer.text));
  }

  // MAT depends on the prompt, a step's time on the machine: the table shows which prediction was off.
  table(runs) {
    const { mat, step_ms, tok_s } = this.editor.now;
    const against = (measured, predicted, digits) => {
      const by = 100 * (measured / predicted - 1);
      return number(measured, digits) + (Number.isFinite(by)
        ? ` (${by >= 0 ? "+" : "\u2212"}${number(Math.abs(by), 0)}%)` : "");
    };
    return table(["", "MAT", "ms a step", "tok/s"], [
      { cells: ["predicted", number(mat, 2), number(step_ms, 1), number(tok_s, 1)] },
      ...runs.map((run) => ({ cells: [
        h("a", { href: `?run=${encodeURIComponent(run.id)}`, target: "_blank", rel: "noopener",
          title: run.prompt }, `${clip(run.prompt, 28) || "run"} (${run.how})`),
        against(run.mat, mat, 2), against(run.step_ms, step_ms, 1),
        against(run.tok_s, tok_s, 1)] }))]);
  }
}
