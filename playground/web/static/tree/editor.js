// The Tree page: edit a choice tree, see at every edit what it is worth.
//
// value: { rev, link: { tree, method, target, benchmark } | null }: what a link or another page opens;
// all of its parts may be empty.
// server: see playground/trees/editor.py; every answer is an object, { error } for a fault.
import { show } from "../address.js";
import { ask, number, part, plural, showAlert } from "../kit.js";
import { ZOOM } from "../trees.js";
import { makeCards } from "./cards.js";
import { NodeInfo, TreeFigures, draftedFacts, draftedFigures, factsOf } from "./figures.js";
import { TreeFiles } from "./files.js";
import {
  Choices, EDITS, EditHistory, MAX_DEPTH, depthOf, fromLink, isWithin, linkOf, pathText,
} from "./model.js";
import { debounced, elementsBy } from "./parts.js";
import { TreePickers } from "./pickers.js";
import { predict, replayTree, stepsThrough } from "./replay.js";
import { READABLE, TreeView } from "./view.js";

const START_TREE = [[0], [0, 0], [1]];
export class TreeEditor {
  // The method, what it is replayed on, and its latency; a proposed tree, recorded trees, and the figures
  // of the tree as it was opened, which edits are compared with.
  /** @type {any} */ method = null;
  /** @type {any} */ source = null;
  /** @type {import("./replay.js").RankTable | null} */ table = null;
  /** @type {import("./replay.js").Speed | null} */ speed = null;
  category = "";  // of the texts to replay on; empty = all texts
  /** @type {Choices | null} */ ghost = null;
  /** @type {any} */ drafted = null;
  /** @type {any} */ startFigures = null;
  /** @type {any} */ now = null;
  /** @type {any} */ facts = null;
  hovered = "";
  fitted = false;

  constructor(host, server, trigger, figures) {
    this.host = host;
    this.server = server;
    this.trigger = trigger;
    this.parts = elementsBy(host, "part");
    this.tools = elementsBy(host, "tool");
    this.menus = elementsBy(host, "picker");
    this.history = new EditHistory({ tree: Choices.closed(START_TREE), at: "" });
    this.collapsed = new Set();
    this.view = new TreeView(this.parts.canvas, {
      select: (key) => this.select(key), act: (name, key) => this.act(name, key),
      hover: (key) => this.hover(key),
    });
    this.figures = new TreeFigures(this.parts.figures, figures);
    this.info = new NodeInfo(this.parts, (key) => this.exampleAt(key));
    this.pickers = new TreePickers(this);
    this.files = new TreeFiles(this);
    this.cards = makeCards(this);
    this.writeLinkSoon = debounced(() => this.writeLink(), 400);
    this.listen();
    this.draw();
  }

  get tree() { return this.history.now.tree; }
  get at() { return this.history.now.at; }
  set at(key) { this.history.now = { ...this.history.now, at: key }; }
  get isDynamic() { return this.method?.kind === "dynamic"; }

  // The server's answer, always an object; the question has the picked target and method.
  ask(question, more = {}) {
    return ask(this.server[question]({ target: this.pickers.target, method: this.method?.key ?? null,
      ...more }));
  }

  listen() {
    const { files, pickers, menus } = this, { optimise } = this.cards;
    const commands = {
      undo: () => this.go(-1), redo: () => this.go(1),
      out: () => this.view.zoomBy(1 / ZOOM), in: () => this.view.zoomBy(ZOOM),
      fit: () => this.view.fit(), generate: () => pickers.use("generate"),
      compare: () => pickers.use("compare"), save: () => files.toggle("save"),
      import: () => files.toggle("import"), export: () => files.toggle("export"),
      close: () => files.toggle(files.opened), forget: () => files.store("forget"),
      read: () => files.readText(), copy: () => files.copy(), download: () => files.download(),
      best: () => optimise.propose(),
      "best-size": () => optimise.propose(optimise.bestSize.x), accept: () => optimise.accept(),
      dismiss: () => optimise.dismiss(),
    };
    this.host.addEventListener("click", ({ target }) => {
      const tool = target.closest("[data-tool]")?.dataset.tool;
      if (tool in commands) commands[tool](); else if (tool) this.act(tool, this.at);
    });
    const onPick = {
      target: (key) => pickers.pickTarget(key), method: (key) => pickers.pickMethod(key),
      source: (id) => pickers.pickSource(id),
      category: (name) => { this.category = name; this.changedTable(); },
      preset: (place) => files.openPreset(place), format: () => files.write(),
    };
    for (const [name, select] of Object.entries(menus)) {
      select.addEventListener("change", () => onPick[name](select.value));
    }
    // On the document, because after a click beside the controls nothing in the editor has the focus.
    document.addEventListener("keydown", (event) => this.shortcut(event));
  }

  shortcut(event) {
    const { target } = event, key = event.key.toLowerCase();
    if (!(event.ctrlKey || event.metaKey) || key !== "z" && key !== "y") return;
    const isHere = target === document.body
      || this.host.contains(target) && !target.matches("input, textarea");
    if (!isHere || !this.host.offsetParent) return;
    this.go(key === "z" && !event.shiftKey ? -1 : 1);
    event.preventDefault();
  }

  // Moves the focus to the selected node when the control that has it disappears.
  keepFocus() {
    this.view.shapes.get(this.at)?.group.focus({ preventScroll: true });
  }

  // ---- edits

  act(name, key) {
    if (name === "fold") { this.fold(key); return; }
    const { tree, text, at, fault } = this.isDynamic
      ? { fault: "The drafter grows this tree itself; change its size on the right." }
      : !this.tree.has(key) ? { fault: "This node is only a proposal. Accept the proposal first." }
        : EDITS[name](this.tree, key, this.method?.limits);
    if (fault) this.announce(fault, true); else this.adopt(tree, at, text);
  }

  // A new tree as one step of the edit history.
  adopt(tree, at, text) {
    this.history.push({ tree, at: tree.has(at) ? at : "" });
    this.afterEdit(text);
  }

  go(by) {
    if (this.history.go(by)) this.afterEdit(by < 0 ? "Undone" : "Redone");
    else this.announce(`There is nothing to ${by < 0 ? "undo" : "redo"}.`);
  }

  afterEdit(text) {
    const focused = this.view.svg.contains(document.activeElement);
    for (const key of this.collapsed) {
      if (isWithin(this.at, key) && this.at !== key) this.collapsed.delete(key);
    }
    this.draw();
    if (focused) this.keepFocus();
    this.view.reveal(this.at);
    this.announce(`${text}. ${this.summary()}`);
    this.cards.onTreeEdit();
    this.writeLinkSoon();
  }

  fold(key) {
    if (!this.tree.childrenOf(key).length) { this.announce("Nothing is below this node."); return; }
    const closing = !this.collapsed.delete(key);
    if (closing) this.collapsed.add(key);
    this.draw();
    const count = this.tree.subtree(key).length - Number(key !== "");
    this.announce(`${closing ? "Folded" : "Unfolded"} ${pathText(key)}: ${plural(count, "node")}`
      + ` below it ${closing ? "hidden" : "shown"}.`);
  }

  select(key) {
    if (key === this.at && this.info.key === key) return;
    this.at = key;
    this.draw();
  }

  // ---- figures

  // The figures of any tree, replayed on the current table.
  figuresOf(tree) {
    const replay = this.table ? replayTree(this.table, tree, this.category) : null;
    const { mat = null, rates = null, numSteps: steps = null, numAccepted = 0, sizes = [] } = replay ?? {};
    return { replay, mat, nodes: tree.size, depth: tree.depth, rates, steps,
      tokens: steps === null ? null : steps + numAccepted,
      ...predict(this.speed, mat, sizes, tree.depth) };
  }

  draw() {
    const { tree, ghost, drafted } = this;
    this.now = drafted ? draftedFigures(drafted, this.speed) : this.figuresOf(tree);
    this.facts = drafted ? draftedFacts(drafted) : factsOf(tree, this.now.replay, this.table);
    const shownTree = ghost ? Choices.closed([...tree.paths, ...ghost.paths]) : tree;
    if (!shownTree.has(this.at)) this.at = "";
    const mark = (key) => !ghost ? "" : !tree.has(key) ? "add" : !ghost.has(key) ? "drop" : "";
    this.view.render({ tree: shownTree, mark, collapsed: this.collapsed, selected: this.at,
      facts: this.facts, rates: this.now.rates });
    this.figures.show(this.now, this.startFigures);
    this.describe(shownTree.has(this.hovered) ? this.hovered : this.at);
    this.parts.hint.textContent = this.limitsHint();
    const fixed = this.isDynamic || this.at === "";
    const off = { undo: !this.history.can(-1), redo: !this.history.can(1), child: this.isDynamic,
      remove: fixed, next: fixed };
    for (const [name, disabled] of Object.entries(off)) {
      if (disabled && this.tools[name] === document.activeElement) this.keepFocus();
      this.tools[name].disabled = disabled;
    }
    this.parts.files.disabled = this.isDynamic;
  }

  // A sentence on nodes that the drafter cannot draft, or that the table does not cover.
  limitsHint() {
    const { table, tree, method } = this;
    if (this.isDynamic) {
      return this.drafted ? "" : "This drafter grows its own trees. Pick runs of it above, or run it "
        + "here, to see them.";
    }
    const beyond = (depth, ranks) => tree.paths.filter((path) =>
      path.length > depth || path.at(-1) >= ranks).length;
    const { depth, ranks, what } = method?.limits ?? {};
    const tooFar = beyond(depth ?? MAX_DEPTH, ranks ?? Infinity);
    if (what && tooFar) {
      return `${what} cannot draft ${plural(tooFar, "node")} of this tree: it drafts ${depth ?? MAX_DEPTH} deep`
        + (ranks ? ` and offers ranks 0 to ${ranks - 1}.` : ".");
    }
    if (table?.chains) {
      return this.now.replay ? "" : `Measured for draft lengths ${table.lengths.join(", ")}; `
        + `not for ${tree.isChain ? tree.depth : "trees"}.`;
    }
    const unknown = table ? beyond(table.depths, table.numRanks) : 0;
    return unknown ? `${plural(unknown, "node")} beyond the table's ${table?.depths} depths and `
      + `${table?.numRanks} ranks: counted as never accepted.` : "";
  }

  // Shows a node's figures, and those of the tree without it.
  describe(key) {
    let loss = "";
    if (key !== "" && this.tree.has(key) && !this.drafted) {
      const without = this.figuresOf(this.tree.without(key)), below = this.tree.subtree(key).length - 1;
      const change = (name, digits) =>
        `${number(this.now[name], digits)} \u2192 ${number(without[name], digits)}`;
      if (without.mat !== null) {
        loss = `Without ${below ? `it and the ${below} below` : "it"}: MAT ${change("mat", 3)}`
          + (without.tok_s === null ? "" : `, ${change("tok_s", 1)} tok/s`);
      }
    }
    this.info.show(key, this.facts(key).text, loss);
  }

  hover(key) {
    this.hovered = key;
    if (this.info.key !== (key ?? this.at)) this.describe(key ?? this.at);
  }

  // An example step from the log: the text before the root, and the path's tokens.
  async exampleAt(key) {
    if (!this.table || !this.source?.examples || key === "" || !this.tree.has(key)) return null;
    const steps = stepsThrough(this.table, this.tree, key, 50, this.category);
    if (!steps.length) return null;
    const answer = await this.ask("example", { source: this.source.id, depth: depthOf(key),
      position: steps[Math.floor(steps.length / 2)] });
    return answer.error ? null : answer;
  }

  summary() {
    const { mat, tok_s } = this.now;
    return `${plural(this.tree.size, "node")}, depth ${this.tree.depth}`
      + (mat === null ? "" : `, MAT ${number(mat, 3)}`)
      + (tok_s === null ? "." : `, predicted ${number(tok_s, 1)} tokens per second.`);
  }

  // ---- method, table and latency

  adoptMethod(method) {
    if (method && method.key !== this.method?.key) {
      const paths = method.kind === "dynamic" ? [] : method.tree;
      this.history.reset({ tree: Choices.closed(paths), at: "" });
      this.collapsed.clear();
    }
    this.method = method;
    this.view.host.classList.toggle("low", method?.kind === "chain");
    this.drafted = null;
    this.adoptTable(null, null, null);
  }

  adoptTable(source, table, speed) {
    this.source = source;
    this.table = table;
    this.speed = speed;
    this.category = "";
    this.pickers.showCategories(table);
    this.changedTable();
    if (!this.fitted) this.view.fit(READABLE);
    this.fitted = true;
  }

  adoptSpeed(speed) {
    this.speed = speed;
    this.changedTable();
    this.announce(this.summary());
  }

  changedTable() {
    this.startFigures = this.figuresOf(this.tree);
    this.draw();
    this.cards.onContextChange();
  }

  // Shows recorded trees as one tree; null returns to the tree being edited.
  showDrafted(drafted) {
    this.drafted = drafted;
    if (drafted) {
      this.history.reset({ tree: Choices.closed(drafted.paths.map(([path]) => path)), at: "" });
    }
    this.draw();
    this.cards.onTreeEdit();
    if (drafted) this.view.fit(READABLE);
  }

  // Draws a proposed tree over the current one; null removes it.
  showGhost(tree) {
    this.ghost = tree;
    this.draw();
  }

  // Opens another tree; later edits are compared with it.
  open(tree, text) {
    if (this.isDynamic || (this.method?.kind === "chain" && !tree.isChain)) {
      const drafts = this.isDynamic ? "grows its own tree" : "drafts one chain";
      this.showAlert(`${this.method.title} ${drafts}; pick a method with a choice tree to open this one.`);
      return;
    }
    this.showAlert(null);
    if (this.ghost) this.cards.optimise.dismiss();
    this.collapsed.clear();
    this.adopt(tree, "", text);
    this.startFigures = this.figuresOf(tree);
    this.draw();
    this.view.fit(READABLE);
  }

  // ---- messages and the link

  announce(text, isFault = false) {
    this.parts.live.textContent = text;
    if (isFault) this.parts.hint.textContent = text;
  }

  showAlert(sentence) { showAlert(this.parts.fault, sentence); }

  writeLink() {
    const { key } = this.method ?? {}, { target } = this.pickers;
    show("tree", { tree: linkOf(this.tree), method: key, target }, true);
  }

  // A link has the leaves in short form, or the tree in any format that import reads.
  async openLink(link) {
    if (!link?.tree) return;
    const short = fromLink(link.tree);
    const answer = short ? {} : await this.ask("read", { text: link.tree, method: null });
    if (answer.error) this.showAlert(`The link's tree cannot be read. ${answer.error}`);
    else this.open(short ?? Choices.closed(answer.tree), "Opened the link's tree");
  }
}

// Mounts the editor on the page, and opens the tree of a link.
export function mount({ element, props, server, trigger, watch }, { figures }) {
  const editor = new TreeEditor(part(element, ".editor"), server, trigger, figures);
  const { pickers } = editor;
  let openedRev = null;

  const openNew = (isFirst = false) => pickers.whileBusy(async () => {
    const { rev = null, link = null } = props.value ?? {};
    if (!isFirst && (rev === openedRev || !link || !pickers.choices.targets.length)) return;
    openedRev = rev;
    await pickers.pickTarget(link?.target || pickers.target, link);
    await editor.openLink(link);
  });

  watch("value", () => openNew());
  pickers.whileBusy(async () => {
    const menus = await editor.ask("start");
    if (menus.error) { editor.showAlert(menus.error); return; }
    editor.files.fill(menus);
    pickers.fill(menus);
    await openNew(true);
  }).finally(() => { editor.host.dataset.ready = ""; });
}
