// The Tree page: edit a choice tree, see at every edit what it is worth.
//
// value: { rev, link: { tree, method, target, benchmark } | null }: what a link or another page opens;
// all of its parts may be empty.
// server: see playground/trees/editor.py; every answer is an object, { error } for a fault.
import { show } from "../address.js";
import { ask, number, part, plural } from "../kit.js";
import { makeCards } from "./cards.js";
import { NodeInfo, TreeFigures, draftedFacts, factsOf, worthOf } from "./figures.js";
import { TreeFiles } from "./files.js";
import {
  Choices, EDITS, EditHistory, MOST_DEPTH, depthOf, fromLink, isWithin, linkOf, pathText,
} from "./model.js";
import { debounced, named } from "./parts.js";
import { TreePickers } from "./pickers.js";
import { predict, replayTree, stepsThrough } from "./replay.js";
import { READABLE, TreeView } from "./view.js";

const START_TREE = [[0], [0, 0], [1]];
export class TreeEditor {
  // The method, what it is replayed on, its latency; then a proposal, the trees that a drafter grew,
  // and what the tree was worth when it was opened: edits are compared with it.
  /** @type {any} */ method = null;
  /** @type {any} */ source = null;
  /** @type {import("./replay.js").RankTable | null} */ table = null;
  /** @type {import("./replay.js").Speed | null} */ speed = null;
  /** @type {string | null} */ category = null;
  /** @type {Choices | null} */ ghost = null;
  /** @type {any} */ drafted = null;
  /** @type {any} */ opened = null;
  /** @type {any} */ now = null;
  /** @type {any} */ facts = null;
  hovered = "";
  fitted = false;

  constructor(host, server, trigger) {
    this.host = host;
    this.server = server;
    this.trigger = trigger;
    this.parts = named(host, "part");
    this.tools = named(host, "tool");
    this.menus = named(host, "picker");
    this.history = new EditHistory({ tree: Choices.closed(START_TREE), at: "" });
    this.collapsed = new Set();
    this.view = new TreeView(this.parts.canvas, {
      select: (key, byPointer) => this.select(key, byPointer),
      act: (name, key) => this.act(name, key),
      hover: (key) => this.hover(key),
    });
    this.figures = new TreeFigures(this.parts.figures);
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
  get grown() { return this.method?.kind === "dynamic"; }

  // The server's answer, always an object; it is told which target and method are picked.
  ask(question, more = {}) {
    return ask(this.server[question]({ target: this.pickers.target, method: this.method?.key ?? null,
      ...more }));
  }

  listen() {
    const { files, pickers, menus, parts: { menu } } = this, { optimise } = this.cards;
    const commands = {
      undo: () => this.go(-1), redo: () => this.go(1), root: () => this.turn(),
      out: () => this.view.zoomBy(1 / 1.25), in: () => this.view.zoomBy(1.25),
      fit: () => this.view.fit(), generate: () => pickers.use("generate"),
      compare: () => pickers.use("compare"), save: () => files.toggle("save"),
      import: () => files.toggle("import"), export: () => files.toggle("export"),
      close: () => files.toggle(files.opened), forget: () => files.keep("forget"),
      read: () => files.readText(), copy: () => files.copy(), download: () => files.download(),
      link: () => files.copyLink(), best: () => optimise.propose(),
      "best-size": () => optimise.proposeBestSize(), accept: () => optimise.accept(),
      dismiss: () => optimise.drop(),
    };
    this.host.addEventListener("click", ({ target }) => {
      const { tool, act = tool } = target.closest("[data-tool], [data-act]")?.dataset ?? {};
      if (act in commands) commands[act](); else if (act) this.act(act, this.at);
    });
    const picked = {
      target: (key) => pickers.pickTarget(key), method: (key) => pickers.pickMethod(key),
      source: (id) => pickers.pickSource(id), category: (name) => this.pickCategory(name),
      preset: (place) => files.openPreset(place), format: () => files.write(),
    };
    for (const [name, select] of Object.entries(menus)) {
      select.addEventListener("change", () => picked[name](select.value));
    }
    // The node that the pointer chose keeps the focus.
    menu.addEventListener("mousedown", (event) => event.preventDefault());
    // On the document: after a click beside the controls, nothing of the editor has the focus.
    document.addEventListener("keydown", (event) => this.shortcut(event));
  }

  shortcut(event) {
    if (!(event.ctrlKey || event.metaKey) || !this.hears(event.target)) return;
    const key = event.key.toLowerCase();
    if (key !== "z" && key !== "y") return;
    this.go(key === "z" && !event.shiftKey ? -1 : 1);
    event.preventDefault();
  }

  hears(target) {
    return this.host.isConnected && this.host.offsetParent && (target === document.body
      || (this.host.contains(target) && !target.matches("input, textarea")));
  }

  // Where the focus goes when the control that had it goes away.
  keepFocus() {
    this.view.shapes.get(this.at)?.group.focus({ preventScroll: true });
  }

  // ---- edits

  act(name, key) {
    this.parts.menu.hidden = true;
    if (name === "fold") { this.fold(key); return; }
    const { tree, text, at, fault } = this.grown
      ? { fault: "The drafter grows this tree itself; change its size on the right." }
      : !this.tree.has(key) ? { fault: "This node is only a proposal. Accept the proposal first." }
        : EDITS[name](this.tree, key, this.method?.limits);
    if (fault) this.say(fault, true); else this.adopt(tree, at, text);
  }

  // A new tree, as one step of the history.
  adopt(tree, at, text) {
    this.history.push({ tree, at: tree.has(at) ? at : "" });
    this.after(text);
  }

  go(by) {
    if (this.history.go(by)) this.after(by < 0 ? "Undone" : "Redone");
    else this.say(`There is nothing to ${by < 0 ? "undo" : "redo"}.`);
  }

  after(text) {
    const focused = this.view.svg.contains(document.activeElement);
    for (const key of this.collapsed) {
      if (isWithin(this.at, key) && this.at !== key) this.collapsed.delete(key);
    }
    this.draw();
    if (focused) this.keepFocus();
    this.view.reveal(this.at);
    this.say(`${text}. ${this.summary()}`);
    this.cards.edited();
    this.writeLinkSoon();
  }

  fold(key) {
    if (!this.tree.childrenOf(key).length) { this.say("Nothing is below this node."); return; }
    const closing = !this.collapsed.delete(key);
    if (closing) this.collapsed.add(key);
    this.draw();
    const count = this.tree.subtree(key).length - Number(key !== "");
    this.say(`${closing ? "Folded" : "Unfolded"} ${pathText(key)}: ${plural(count, "node")}`
      + ` below it ${closing ? "hidden" : "shown"}.`);
  }

  select(key, byPointer) {
    if (byPointer) this.showMenu(key);
    else if (key !== this.at) this.parts.menu.hidden = true;
    if (key === this.at && this.info.key === key) return;
    this.at = key;
    this.draw();
    if (byPointer) this.view.focus(key);
  }

  showMenu(key) {
    const item = this.view.layout.items.get(key), { menu } = this.parts;
    if (!item) return;
    menu.hidden = false;
    const { zoom } = this.view, away = 14 * Math.max(1, zoom);
    const top = item.y * zoom - away - menu.offsetHeight;
    menu.style.left = `${Math.max(2, item.x * zoom - 20)}px`;
    menu.style.top = `${top < 2 ? item.y * zoom + away : top}px`;
    for (const button of menu.children) {
      button.hidden = key === "" && button !== menu.firstElementChild;
    }
  }

  turn() {
    const left = this.view.root !== "left";
    this.view.root = left ? "left" : "top";
    this.parts.menu.hidden = true;
    this.tools.root.textContent = left ? "Root on top" : "Root left";
    this.draw();
    this.view.fit(READABLE);
    this.say(`Root ${left ? "left" : "on top"}.`);
  }

  // ---- what it is worth

  // Figures of any tree on the table at hand.
  worth(tree) {
    const replay = this.table ? replayTree(this.table, tree, this.category) : null;
    return { replay, mat: replay?.mat ?? null, nodes: tree.size, depth: tree.depth,
      rates: replay?.rates ?? null, steps: replay ? replay.numSteps : null,
      tokens: replay ? replay.numSteps + replay.numAccepted : null,
      ...predict(this.speed, replay?.mat ?? null, replay?.sizes ?? [],
        tree.depth) };
  }

  draw() {
    const { tree, ghost, drafted } = this;
    this.now = drafted ? worthOf(drafted, this.speed) : this.worth(tree);
    this.facts = drafted ? draftedFacts(drafted) : factsOf(tree, this.now.replay, this.table);
    const drawn = ghost ? Choices.closed([...tree.paths, ...ghost.paths]) : tree;
    if (!drawn.has(this.at)) this.at = "";
    const mark = (key) => !ghost ? "" : !tree.has(key) ? "add" : !ghost.has(key) ? "drop" : "";
    this.view.render({ tree: drawn, mark, collapsed: this.collapsed, selected: this.at,
      facts: this.facts, rates: this.now.rates });
    this.figures.show(this.now, this.opened);
    this.describe(drawn.has(this.hovered) ? this.hovered : this.at);
    this.parts.hint.textContent = this.outside();
    const fixed = this.grown || this.at === "";
    const off = { undo: !this.history.can(-1), redo: !this.history.can(1), child: this.grown,
      remove: fixed, next: fixed };
    for (const [name, disabled] of Object.entries(off)) {
      if (disabled && this.tools[name] === document.activeElement) this.keepFocus();
      this.tools[name].disabled = disabled;
    }
    this.parts.files.disabled = this.grown;
  }

  // Nodes that the drafter cannot draft, or that the table can say nothing about.
  outside() {
    const { table, tree, method } = this;
    if (this.grown) {
      return this.drafted ? "" : "This drafter grows its own trees. Pick runs of it above, or run it "
        + "here, to see them.";
    }
    const beyond = (depth, ranks) => tree.paths.filter((path) =>
      path.length > depth || path.at(-1) >= ranks).length;
    const { depth, ranks, what } = method?.limits ?? {};
    const tooFar = beyond(depth ?? MOST_DEPTH, ranks ?? Infinity);
    if (what && tooFar) {
      return `${what} cannot draft ${plural(tooFar, "node")} of this tree: `
        + [depth && `it drafts ${depth} deep`, ranks && `it offers ranks 0 to ${ranks - 1}`]
          .filter(Boolean).join(", ") + ".";
    }
    if (table?.chains) {
      return this.now.replay ? "" : `Measured for draft lengths ${table.lengths.join(", ")}; `
        + `not for ${tree.isChain ? tree.depth : "trees"}.`;
    }
    const unknown = table ? beyond(table.depths, table.numRanks) : 0;
    return unknown ? `${plural(unknown, "node")} beyond the table's ${table?.depths} depths and `
      + `${table?.numRanks} ranks: counted as never accepted.` : "";
  }

  // Says of a node what it is worth.
  describe(key) {
    let loss = "";
    if (key !== "" && this.tree.has(key) && !this.drafted) {
      const without = this.worth(this.tree.without(key)), below = this.tree.subtree(key).length - 1;
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

  // An example step from the log: text before the root, and the path's tokens.
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
    return [`${plural(this.tree.size, "node")}, depth ${this.tree.depth}`,
      mat !== null && `MAT ${number(mat, 3)}`,
      tok_s !== null && `predicted ${number(tok_s, 1)} tokens per second`]
      .filter(Boolean).join(", ") + ".";
  }

  // ---- what it is replayed on

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
    this.category = null;
    this.pickers.showCategories(table);
    this.changedTable();
    if (!this.fitted) this.view.fit(READABLE);
    this.fitted = true;
  }

  adoptSpeed(speed) {
    this.speed = speed;
    this.changedTable();
    this.say(this.summary());
  }

  pickCategory(name) {
    this.category = name || null;
    this.changedTable();
  }

  changedTable() {
    this.opened = this.worth(this.tree);
    this.draw();
    this.cards.changed();
  }

  // The trees that a drafter grew, drawn as one; null goes back to the tree being edited.
  showDrafted(drafted) {
    this.drafted = drafted;
    if (drafted) {
      this.history.reset({ tree: Choices.closed(drafted.paths.map(([path]) => path)), at: "" });
    }
    this.draw();
    this.cards.edited();
    if (drafted) this.view.fit(READABLE);
  }

  // A proposal drawn over the current tree; null takes it away.
  showGhost(tree) {
    this.ghost = tree;
    this.draw();
  }

  // Another tree as the one to start from; edits after it are compared with it.
  open(tree, text) {
    if (this.grown || (this.method?.kind === "chain" && !tree.isChain)) {
      const drafts = this.grown ? "grows its own tree" : "drafts one chain";
      const fault = `${this.method.title} ${drafts}; pick a method with a choice tree to open this one.`;
      this.complain(fault);
      this.say(fault, true);
      return;
    }
    this.complain(null);
    if (this.ghost) this.cards.optimise.drop();
    this.collapsed.clear();
    this.adopt(tree, "", text);
    this.opened = this.worth(tree);
    this.draw();
    this.view.fit(READABLE);
  }

  // ---- what is said

  say(text, isFault = false) {
    this.parts.live.textContent = text;
    if (isFault) this.parts.hint.textContent = text;
  }

  complain(sentence) {
    this.parts.fault.hidden = !sentence;
    this.parts.fault.textContent = sentence ?? "";
  }

  writeLink() {
    const { key } = this.method ?? {}, { target } = this.pickers;
    return show("tree", { tree: linkOf(this.tree), method: key, target }, true);
  }

  // A link has the leaves in short, or the tree in any format that import reads.
  async openLink(link) {
    if (!link?.tree) return;
    const short = fromLink(link.tree);
    const answer = short ? {} : await this.ask("read", { text: link.tree, method: null });
    if (answer.error) this.complain(`The link's tree cannot be read. ${answer.error}`);
    else this.open(short ?? Choices.closed(answer.tree), "Opened the link's tree");
  }
}

// Puts the editor on the page and opens what a link carries.
export function mount({ element, props, server, trigger, watch }) {
  const editor = new TreeEditor(part(element, ".editor"), server, trigger), { pickers } = editor;
  let openedRev = null;

  const openNew = () => pickers.during(async () => {
    const { rev = null, link = null } = props.value ?? {};
    if (rev === openedRev || !pickers.offered.targets.length) return;
    openedRev = rev;
    if (!link) return;
    await pickers.pickTarget(link.target || pickers.target, link);
    await editor.openLink(link);
  });

  watch("value", openNew);
  pickers.during(async () => {
    const menus = await editor.ask("start");
    if (menus.error) { editor.complain(menus.error); return; }
    const { rev = null, link = null } = props.value ?? {};
    openedRev = rev;
    editor.files.fill(menus);
    await pickers.fill(menus, link);
    await editor.openLink(link);
    await openNew();
  }).finally(() => { editor.host.dataset.ready = ""; });
}
