// The cards beside the tree: draft length, dynamic tree, optimise, latency, runs made with it.
//
// drafted: { words, settings, mat, rates, steps, tokens, nodes, levels, counts: { nodes, depths,
// widths: [[value, steps], …] }, paths: [[path, drafted, accepted], …], redrafted }
// @ts-nocheck
import { clip, h, milliseconds, number, plural } from "../kit.js";
import { Choices } from "./model.js";
import { Chart, Job, card, debounced, newest, numberField, tool } from "./parts.js";
import { curveAt, draftMs, levelsOf, predict, predictDrafted } from "./replay.js";
import { READABLE } from "./view.js";

const SETTLED_MS = 250;
const NO_TABLE = "Needs a rank table: pick or measure one above.";

// Every card is told of another method, table or latency by changed(), of another tree by edited().
export function makeCards(editor) {
  const cards = { length: new LengthCard(editor), dynamic: new DynamicCard(editor),
    optimise: new OptimiseCard(editor), latency: new LatencyCard(editor), runs: new RunsCard(editor) };
  const all = Object.values(cards);
  return { ...cards, changed: () => all.forEach((one) => one.changed()),
    edited: () => all.forEach((one) => one.edited()),
    host: h("aside", { class: "side", "aria-label": "tune the tree" }, ...all.map((one) => one.host)) };
}

const stateLine = () => h("div", { class: "card-state", role: "status" });

function makeTable(titles, rows) {
  const row = (tag, cells) => cells.map((cell) => h(tag, {}, cell));
  return h("table", {}, h("thead", {}, h("tr", {}, ...row("th", titles))), h("tbody", {},
    ...rows.map(({ cells, on }) => h("tr", { class: on ? "on" : "" }, ...row("td", cells)))));
}

const fastest = (rows) => rows.reduce((a, b) => b.tok_s > a.tok_s ? b : a);

// ---- draft length of a chain

class LengthCard {
  constructor(editor) {
    this.editor = editor;
    this.number = numberField("length", "tokens drafted per step", "length of the chain",
      { min: 1, step: 1 }, () => this.take(Math.round(Number(this.number.box.value))));
    // Over the lengths that the table knows, so that every place of it has figures.
    this.slide = h("input", { type: "range", min: 0, step: 1, "aria-label": "draft length",
      oninput: () => this.take(this.lengths[Number(this.slide.value)]) });
    this.state = stateLine();
    this.chart = new Chart(150, (length) => this.take(length));
    this.host = card("length", "Draft length", this.number.field, this.slide, this.state,
      this.chart.host);
  }

  changed() {
    const { method, table } = this.editor;
    this.host.hidden = method?.kind !== "chain";
    if (this.host.hidden) return;
    const most = method.limits?.depth ?? 16;
    this.lengths = (table?.lengths ?? Array.from({ length: most }, (_, i) => i + 1))
      .filter((length) => length <= most);
    this.number.box.max = most;
    this.slide.max = this.lengths.length - 1;
    this.edited();
  }

  edited() {
    if (this.host.hidden) return;
    const { table, speed, tree: { depth }, now } = this.editor;
    this.number.box.value = depth;
    this.slide.value = this.lengths.findLastIndex((length) => length <= depth);
    this.slide.setAttribute("aria-valuetext", plural(depth, "token"));
    this.chart.host.hidden = !table;
    if (!table) { this.state.textContent = NO_TABLE; return; }
    const rows = this.lengths.map((x) => ({ x, ...this.editor.worth(Choices.chain(x)) }));
    const best = speed && fastest(rows);
    this.state.textContent = !best ? "Measure the latency below to see which length is fastest."
      : `Fastest here: ${plural(best.x, "token")}, ${number(best.tok_s, 1)} tok/s predicted`
        + (best.speedup < 1 ? "; plain decoding is faster than any draft." : ".");
    this.chart.showWorth(rows, { at: depth, now, speed }, "tokens drafted",
      `Green: MAT.${speed ? " Blue: predicted tok/s." : ""} Click a length to take it.`);
  }

  take(length) {
    const { editor } = this;
    if (!(length >= 1 && length <= Number(this.number.box.max)) || length === editor.tree.depth) return;
    editor.adopt(Choices.chain(length), "", `Draft length ${length}`);
  }
}

// ---- dynamic trees (EAGLE-2/3): which trees were drafted, and what other sizes would have drafted

const DYNAMIC_SETTINGS = [
  ["max_total_draft_tokens", "nodes kept", 256],
  ["dynamic_tree_max_topK", "top K", 32],
  ["max_draft_len", "levels", 16],
];
const MOST_TRIES = 8;

class DynamicCard {
  constructor(editor) {
    this.editor = editor;
    this.tries = [];
    const draftAgain = debounced(() => this.job.start(), 400);
    // Once the texts are read, every change is drafted at once.
    const moved = () => { if (this.tries.some((one) => one.redrafted)) draftAgain(); };
    this.numbers = DYNAMIC_SETTINGS.map(([name, title, max]) => {
      const made = numberField(name, title, name, { min: 1, max, step: 1 }, moved);
      made.field.append(made.slide);
      return { name, ...made };
    });
    this.job = new Job(editor, "Re-draft the texts",
      () => ({ kind: "redraft", settings: this.settings() }), (end) => this.take(end.drafted));
    this.list = h("div", {});
    this.chart = new Chart(130);
    this.host = card("dynamic", "Dynamic tree",
      h("div", { class: "row fields" }, ...this.numbers.map(({ field }) => field)), this.job.host,
      h("p", { class: "note" }, "Other settings are drafted again over the same texts: the "
        + "drafter runs, the target does not. It read the texts once and its features are kept."),
      this.list, this.chart.host);
  }

  settings() {
    return this.editor.method?.kind !== "dynamic" ? null
      : Object.fromEntries(this.numbers.map(({ name, box }) => [name, Number(box.value)]));
  }

  changed() {
    const { method, source } = this.editor;
    this.host.hidden = method?.kind !== "dynamic";
    if (this.host.hidden) return;
    const now = `${method.key}/${source?.id}`;
    if (now === this.of) { this.show(this.shown); return; }
    this.of = now;
    this.job.clear();
    for (const { name, set } of this.numbers) set(method.settings[name]);
    this.tries = [];
    this.job.button.disabled = !source;
    this.show(null);
  }

  edited() {}

  // What was drafted, by the runs themselves or just now.
  take(drafted) {
    if (!drafted || this.host.hidden) return;
    this.tries = [drafted, ...this.tries].slice(0, MOST_TRIES);
    this.show(drafted);
  }

  show(drafted) {
    this.shown = drafted;
    this.chart.host.hidden = !drafted;
    this.list.replaceChildren(...(this.tries.length ? [this.table()] : []));
    this.editor.showDrafted(drafted);
    if (!drafted) return;
    const line = (what, colour) => {
      const counts = drafted.counts[what];
      return { name: `% of the trees by ${what}`, colour, x: counts.map(([n]) => n),
        y: counts.map(([, count]) => 100 * count / drafted.steps),
        mode: counts.length > 1 ? "lines+markers" : "markers" };
    };
    this.chart.show([line("nodes", "--pg-target"), line("depths", "--pg-draft")],
      { x: "drafted nodes (blue), depth (green)", y: "% of the steps" },
      `${drafted.words} The tree on the left: the paths drafted most, by how many steps drafted them.`);
  }

  table() {
    return makeTable(["kept / K / levels", "MAT", "nodes", "tok/s"], this.tries.map((one) => ({
      on: one === this.shown,
      cells: [h("button", { type: "button", class: "quiet", onclick: () => this.show(one) },
        DYNAMIC_SETTINGS.map(([name]) => one.settings[name]).join(" / ")
          + (one.redrafted ? "" : " recorded")),
      number(one.mat, 3), number(one.nodes, 1),
      number(predictDrafted(this.editor.speed, one).tok_s, 1)] })));
  }
}

// ---- the best tree of a size, and the best size for this machine, as a ghost over the current tree

const IDLE = "Draws the best tree over yours; nothing changes until you accept it.";

class OptimiseCard {
  constructor(editor) {
    this.editor = editor;
    this.newestTree = newest();
    this.newestCurve = newest();
    const moved = debounced(() => {
      if (editor.ghost) this.propose(Number(this.nodes.box.value));
      this.fetchCurve();
    }, SETTLED_MS);
    this.nodes = numberField("nodes", "nodes", "how many nodes the best tree may have",
      { min: 1, max: 256, step: 1, value: 24 }, moved);
    this.nodes.slide.max = 128;
    this.depth = numberField("max_depth", "max depth", "deepest node allowed; empty = the table's depth",
      { min: 1, placeholder: "any" }, moved);
    this.width = numberField("max_width", "ranks used", "ranks that may be used, 0 up to one less; empty = any",
      { min: 1, placeholder: "any" }, moved);
    this.accept = tool("accept", "Accept", "make the proposed tree the current one", () => this.take());
    this.dismiss = tool("dismiss", "Dismiss", "keep the current tree", () => this.drop());
    this.best = [tool("best", "Best of this size", "the tree of so many nodes that accepts most",
      () => this.propose(Number(this.nodes.box.value))),
    tool("best-size", "Best for this machine",
      "the size whose predicted tok/s is highest, by the measured latency curve",
      () => this.proposeBestSize())];
    this.state = stateLine();
    this.chart = new Chart(168, (nodes) => this.propose(nodes));
    this.host = card("optimise", "Optimise",
      h("div", { class: "row fields" }, this.nodes.field, this.depth.field, this.width.field),
      this.nodes.slide, h("div", { class: "row" }, ...this.best), this.state,
      h("div", { class: "row" }, this.accept, this.dismiss), this.chart.host);
  }

  // What the best tree hangs on besides its size.
  bounds() {
    const read = ({ box }) => box.value.trim() === "" ? null : Number(box.value);
    const { source, category } = this.editor;
    return { source: source?.id, category, max_depth: read(this.depth), max_width: read(this.width) };
  }

  changed() {
    const { table, method } = this.editor;
    this.host.hidden = method?.kind !== "tree";
    this.drop("");
    if (!table) this.points = this.bestSize = this.asked = null;
    for (const box of [...this.host.querySelectorAll("input"), ...this.best]) box.disabled = !table;
    this.state.textContent = table ? IDLE : NO_TABLE;
    this.chart.host.hidden = !table;
    if (table) this.fetchCurve();
  }

  edited() {
    if (this.editor.ghost) this.tell();
    this.drawCurve();
  }

  async propose(nodes) {
    if (!Number.isFinite(nodes)) return;
    this.nodes.set(nodes);
    this.wanted = false;
    const answer = await this.newestTree(this.editor.ask("optimise", { ...this.bounds(), nodes }));
    if (answer?.error) this.drop(answer.error);
    if (!answer?.tree) return;
    this.editor.showGhost(Choices.closed(answer.tree));
    this.tell();
  }

  proposeBestSize() {
    if (this.bestSize) { this.propose(this.bestSize.x); return; }
    this.wanted = this.editor.speed !== null;
    this.state.textContent = this.wanted ? "Computing the best tree of every size first \u2026"
      : "Measure the latency of this machine first: without it no size is better than another.";
  }

  tell() {
    const { tree, ghost, now } = this.editor;
    const then = this.editor.worth(ghost), same = ghost.equals(tree);
    const speed = then.tok_s === null ? ""
      : `, ${number(now.tok_s, 1)} \u2192 ${number(then.tok_s, 1)} tok/s`;
    this.state.textContent = same ? `This is the best tree of ${plural(ghost.size, "node")} already.`
      : `${plural(ghost.size, "node")}: MAT ${number(now.mat, 3)} \u2192 ${number(then.mat, 3)}${speed}.`
        + " Green nodes would come, red ones go.";
    this.accept.disabled = same;
    this.dismiss.disabled = false;
  }

  take() {
    const { editor, editor: { ghost } } = this;
    this.drop();
    editor.adopt(ghost, "", `Took the best tree of ${plural(ghost.size, "node")}`);
    editor.view.fit(READABLE);
  }

  drop(words = IDLE) {
    this.wanted = false;
    this.newestTree(null);
    if ([this.accept, this.dismiss].includes(document.activeElement)) this.editor.keepFocus();
    this.accept.disabled = this.dismiss.disabled = true;
    this.state.textContent = words;
    if (this.editor.ghost) this.editor.showGhost(null);
  }

  // MAT(n) and tok/s(n).
  async fetchCurve() {
    const { editor } = this;
    if (!editor.table || this.host.hidden) return;
    const bounds = this.bounds(), asked = JSON.stringify([editor.method.key, bounds]);
    if (asked === this.asked) { this.drawCurve(); return; }
    this.asked = asked;
    this.points = this.bestSize = null;
    this.chart.words.textContent = "Computing the best tree of every size \u2026";
    const answer = await this.newestCurve(editor.ask("curve", bounds));
    if (!answer || asked !== this.asked) return;
    if (answer.error) this.chart.words.textContent = answer.error;
    this.points = answer.points;
    this.drawCurve();
    if (this.wanted) this.proposeBestSize();
  }

  drawCurve() {
    const { speed, now, tree } = this.editor;
    if (!this.points?.length) return;
    const rows = this.points.map(({ nodes, mat, levels, size }) =>
      ({ x: nodes, mat, tok_s: predict(speed, mat, levels, [[size, 1]]).tok_s }));
    const best = this.bestSize = speed && fastest(rows);
    this.chart.showWorth(rows, { at: tree.size, now, speed }, "nodes",
      `Green: MAT of the best tree of n nodes.${speed ? " Blue: its predicted tok/s." : ""} Points: `
      + "this tree; click a size to see its best tree." + (best ? ` Best for this machine: `
      + `${plural(best.x, "node")}, MAT ${number(best.mat, 2)}, ${number(best.tok_s, 1)} tok/s.` : ""));
  }
}

// ---- how long a verify forward takes here

class LatencyCard {
  constructor(editor) {
    this.editor = editor;
    this.job = new Job(editor, "Measure latency", () => ({ kind: "latency" }),
      (end) => editor.adoptSpeed(end.speed));
    this.chart = new Chart(140);
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
    const rows = now.nodes + 1, points = [...speed.verify];
    if (points.at(-1)[0] < rows) points.push([rows, curveAt(points, rows)]);
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

// ---- what runs with this very tree measured

class RunsCard {
  constructor(editor) {
    this.editor = editor;
    this.newest = newest();
    this.edited = this.changed = debounced(() => this.fetch(), SETTLED_MS);
    this.list = h("div", { class: "card-state" });
    this.host = card("runs", "Predicted against measured", this.list);
    new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) this.edited();
    }).observe(this.host);
  }

  async fetch() {
    const { editor } = this;
    if (!editor.method || !this.host.isConnected) return;
    const answer = await this.newest(editor.ask("measured", { tree: editor.tree.paths,
      settings: editor.cards.dynamic.settings() }));
    if (!answer) return;
    this.list.replaceChildren(answer.error ?? (answer.runs.length ? this.table(answer.runs)
      : "No greedy run with this tree is in the log yet. Use it in Generate, then come back."));
  }

  table(runs) {
    const { mat, step_ms, tok_s } = this.editor.now;
    const against = (measured, predicted, digits) => {
      const by = 100 * (measured / predicted - 1);
      return number(measured, digits) + (Number.isFinite(by)
        ? ` (${by >= 0 ? "+" : "\u2212"}${Math.abs(by).toFixed(0)} %)` : "");
    };
    // MAT hangs on the prompt, the time of a step on the machine: so it shows which was off.
    return makeTable(["", "MAT", "ms a step", "tok/s"], [
      { cells: ["predicted", number(mat, 2), number(step_ms, 1), number(tok_s, 1)] },
      ...runs.map((run) => ({ cells: [
        h("a", { href: `?run=${encodeURIComponent(run.id)}`, target: "_blank", rel: "noopener",
          title: run.prompt }, clip(run.prompt, 28) || "run"),
        against(run.mat, mat, 2), against(1000 * run.mat / run.tok_s, step_ms, 1),
        against(run.tok_s, tok_s, 1)] }))]);
  }
}
