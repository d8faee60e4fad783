// The Tree page: edit a choice tree, see at every edit what it is worth.
//
// value: { rev, link: { tree, method, target, benchmark } | null }: what a link or another page opens;
// all of its parts may be empty.
// server: see playground/trees/editor.py; every answer is an object, { error } for a fault.
// @ts-nocheck
import { ask, h, number, part, plural } from "../kit.js";
import { makeCards } from "./cards.js";
import { NodeInfo, TreeFigures, draftedFacts, factsOf, worthOf } from "./figures.js";
import { TreeFiles } from "./files.js";
import {
  Choices, EDITS, EditHistory, MOST_DEPTH, depthOf, fromLink, isWithin, linkOf, pathText,
} from "./model.js";
import { debounced, tool } from "./parts.js";
import { TreePickers } from "./pickers.js";
import { levelsOf, predict, replayTree, stepsThrough } from "./replay.js";
import { READABLE, TreeView } from "./view.js";

const START_TREE = [[0], [0, 0], [1]];

export class TreeEditor {
  constructor(host, server, trigger) {
    Object.assign(this, { host, server, trigger });
    this.history = new EditHistory({ tree: Choices.closed(START_TREE), at: "" });
    this.collapsed = new Set();
    // The method, what it is replayed on, its latency; a proposal; the trees that a drafter grew.
    this.method = this.source = this.table = this.speed = this.category = null;
    this.ghost = this.drafted = null;
    // What the tree was worth when it was opened: edits are compared with it.
    this.opened = null;
    this.view = new TreeView({
      select: (key, byPointer) => this.select(key, byPointer),
      act: (name, key) => this.act(name, key),
      hover: (key) => this.hover(key),
    });
    this.figures = new TreeFigures();
    this.live = h("div", { class: "live", role: "status", "aria-live": "polite" });
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.hint = h("div", { class: "hint" });
    this.info = new NodeInfo((key) => this.exampleAt(key));
    this.pickers = new TreePickers(this);
    this.files = new TreeFiles(this);
    this.cards = makeCards(this);
    this.menu = this.makeMenu();
    this.writeLinkSoon = debounced(() => this.writeLink(), 400);
    this.build();
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

  build() {
    this.view.host.append(this.menu);
    const main = h("div", { class: "main" }, this.makeTools(), this.files.host,
      h("div", { class: "frame" }, this.view.host, this.hint), this.info.host);
    this.host.append(this.pickers.host, this.fault, this.figures.host,
      h("div", { class: "body" }, main, this.cards.host), this.live);
    // On the document: after a click beside the controls, nothing of the editor has the focus.
    document.addEventListener("keydown", (event) => this.shortcut(event));
  }

  makeTools() {
    const edit = (name, text, keys, title) =>
      tool(name, h("span", {}, text, h("kbd", {}, keys)), title, () => this.act(name, this.at));
    this.tools = h("div", { class: "tools", role: "toolbar", "aria-label": "edit the tree" },
      edit("child", "Child", "Enter", "add a child to the chosen node: its lowest free rank"),
      edit("next", "Next rank", "S", "add the next rank beside the chosen node"),
      edit("remove", "Remove", "Del", "remove the chosen node and all below it"),
      edit("fold", "Fold", "Space", "hide or show what is below the chosen node"),
      h("i", { class: "gap" }),
      tool("undo", "Undo", "undo (Ctrl+Z)", () => this.undo()),
      tool("redo", "Redo", "redo (Ctrl+Shift+Z)", () => this.redo()),
      h("i", { class: "gap" }),
      tool("root", "Root on top", "turn the tree: root left or on top", () => this.turn()),
      tool("out", "\u2212", "zoom out (Ctrl+wheel)", () => this.view.zoomBy(1 / 1.25)),
      tool("in", "+", "zoom in (Ctrl+wheel)", () => this.view.zoomBy(1.25)),
      tool("fit", "Fit", "show the whole tree", () => this.view.fit()),
      h("span", { class: "spring" }), this.files.buttons);
    return this.tools;
  }

  toolOf(name) { return this.tools.querySelector(`[data-tool=${name}]`); }

  // Buttons beside the node that the pointer chose, which keeps the focus.
  makeMenu() {
    const item = (name, text, title) => h("button", { type: "button", tabindex: "-1", title,
      onclick: () => this.act(name, this.at) }, text);
    return h("div", { class: "menu", "aria-hidden": "true", hidden: true,
      onmousedown: (event) => event.preventDefault() },
    item("child", "+ child", "add a child (Enter)"),
    item("next", "+ rank", "add the next rank beside it (S)"),
    item("remove", "\u00d7", "remove it and all below (Del)"));
  }

  shortcut(event) {
    if (!(event.ctrlKey || event.metaKey) || !this.hears(event.target)) return;
    const key = event.key.toLowerCase();
    if (key === "z" && !event.shiftKey) this.undo();
    else if (key === "y" || key === "z") this.redo();
    else return;
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
    this.menu.hidden = true;
    if (name === "fold") { this.fold(key); return; }
    const fault = this.grown ? "The drafter grows this tree itself; change its size on the right."
      : !this.tree.has(key) ? "This node is only proposed. Accept the proposal first." : null;
    const made = fault ? { fault } : EDITS[name](this.tree, key, this.method?.limits);
    if (made.fault) this.say(made.fault, true);
    else this.adopt(made.tree, made.at, made.words);
  }

  // A new tree, as one step of the history.
  adopt(tree, at, words) {
    this.history.push({ tree, at: tree.has(at) ? at : "" });
    this.after(words);
  }

  undo() {
    if (this.history.undo()) this.after("Undone");
    else this.say("There is nothing to undo.");
  }

  redo() {
    if (this.history.redo()) this.after("Redone");
    else this.say("There is nothing to redo.");
  }

  after(words) {
    const focused = this.view.svg.contains(document.activeElement);
    for (const key of this.collapsed) {
      if (isWithin(this.at, key) && this.at !== key) this.collapsed.delete(key);
    }
    this.draw();
    if (focused) this.keepFocus();
    this.view.reveal(this.at);
    this.say(`${words}. ${this.summary()}`);
    this.cards.edited();
    this.writeLinkSoon();
  }

  fold(key) {
    if (!this.tree.childrenOf(key).length) { this.say("Nothing is below this node."); return; }
    const closing = !this.collapsed.delete(key);
    if (closing) this.collapsed.add(key);
    this.draw();
    const count = this.tree.subtree(key).length - (key !== "");
    this.say(`${closing ? "Folded" : "Unfolded"} ${pathText(key)}: ${plural(count, "node")}`
      + ` below it ${closing ? "hidden" : "shown"}.`);
  }

  select(key, byPointer) {
    if (byPointer) this.showMenu(key);
    else if (key !== this.at) this.menu.hidden = true;
    if (key === this.at && this.info.key === key) return;
    this.at = key;
    this.draw();
    if (byPointer) this.view.focus(key);
  }

  showMenu(key) {
    const item = this.view.layout.items.get(key);
    if (!item) return;
    this.menu.hidden = false;
    const { zoom } = this.view, away = 14 * Math.max(1, zoom);
    const top = item.y * zoom - away - this.menu.offsetHeight;
    this.menu.style.left = `${Math.max(2, item.x * zoom - 20)}px`;
    this.menu.style.top = `${top < 2 ? item.y * zoom + away : top}px`;
    for (const button of this.menu.children) {
      button.hidden = key === "" && button !== this.menu.firstChild;
    }
  }

  turn() {
    const left = this.view.root !== "left";
    this.view.root = left ? "left" : "top";
    this.toolOf("root").textContent = left ? "Root on top" : "Root left";
    this.menu.hidden = true;
    this.draw();
    this.view.fit(READABLE);
    this.say(`Root ${left ? "left" : "on top"}.`);
  }

  // ---- what it is worth

  // Figures of any tree on the table at hand.
  worth(tree) {
    const replay = this.table ? replayTree(this.table, tree, this.category) : null;
    const mat = replay?.mat ?? null;
    return { replay, mat, nodes: tree.size, depth: tree.depth, rates: replay?.rates ?? null,
      steps: replay ? replay.numSteps : null,
      tokens: replay ? replay.numSteps + replay.numAccepted : null,
      ...predict(this.speed, mat, levelsOf(tree, this.speed?.levels), replay?.sizes ?? []) };
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
    this.hint.textContent = this.outside();
    this.showTools();
  }

  showTools() {
    const fixed = this.grown || this.at === "";
    const off = { undo: !this.history.past.length, redo: !this.history.future.length,
      child: this.grown, remove: fixed, next: fixed };
    for (const [name, disabled] of Object.entries(off)) {
      const button = this.toolOf(name);
      if (disabled && button === document.activeElement) this.keepFocus();
      button.disabled = disabled;
    }
    this.files.enable(!this.grown);
  }

  // Nodes that the drafter cannot draft, or that the table can say nothing about.
  outside() {
    const { table, tree, method } = this;
    if (this.grown && !this.drafted) {
      return "This drafter grows its own trees. They are drawn here once runs of it are picked above, "
        + "or texts are re-drafted.";
    }
    const beyond = (depth, ranks) => tree.paths.filter((path) =>
      path.length > depth || path.at(-1) >= ranks).length;
    const { depth, ranks, what } = method?.limits ?? {};
    const tooFar = method?.limits ? beyond(depth ?? MOST_DEPTH, ranks ?? Infinity) : 0;
    if (tooFar) {
      return `${what} cannot draft ${plural(tooFar, "node")} of this tree: `
        + [depth && `it drafts ${depth} deep`, ranks && `it offers ranks 0 to ${ranks - 1}`]
          .filter(Boolean).join(", ") + ".";
    }
    if (table?.chains) {
      return this.now.replay ? "" : `Measured for draft lengths ${table.lengths.join(", ")}; `
        + `not for ${tree.isChain ? tree.depth : "trees"}.`;
    }
    const unknown = table ? beyond(table.depths, table.numRanks) : 0;
    return unknown ? `${plural(unknown, "node")} beyond the table's ${table.depths} depths and `
      + `${table.numRanks} ranks: counted as never accepted.` : "";
  }

  // What a node is worth, in words.
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
    this.info.show(key, { words: this.facts(key).words, loss });
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
    const words = [`${plural(this.tree.size, "node")}, depth ${this.tree.depth}`];
    if (mat !== null) words.push(`MAT ${number(mat, 3)}`);
    if (tok_s !== null) words.push(`predicted ${number(tok_s, 1)} tokens per second`);
    return words.join(", ") + ".";
  }

  // ---- what it is replayed on

  adoptMethod(method) {
    const changed = method?.key !== this.method?.key;
    this.method = method;
    if (method && changed) {
      this.history.reset({ tree: Choices.closed(this.grown ? [] : method.tree), at: "" });
      this.collapsed.clear();
    }
    this.view.host.classList.toggle("low", method?.kind === "chain");
    this.drafted = null;
    this.adoptTable(null, null, null);
  }

  adoptTable(source, table, speed) {
    Object.assign(this, { source, table, speed, category: null });
    this.pickers.showCategories(table);
    this.changedTable();
    if (!this.fitted) {
      this.fitted = true;
      this.view.fit(READABLE);
    }
  }

  adoptSpeed(speed) {
    this.speed = speed;
    this.changedTable();
    this.say(this.summary());
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
  open(tree, words) {
    if (this.grown || (this.method?.kind === "chain" && !tree.isChain)) {
      const drafts = this.grown ? "grows its own tree" : "drafts one chain";
      this.complain(`${this.method.title} ${drafts}; pick a method with a choice tree to open this one.`);
      this.say(this.fault.textContent, true);
      return;
    }
    this.complain(null);
    if (this.ghost) this.cards.optimise.drop();
    this.collapsed.clear();
    this.adopt(tree, "", words);
    this.opened = this.worth(tree);
    this.draw();
    this.view.fit(READABLE);
  }

  // ---- words

  say(words, isFault = false) {
    this.live.textContent = words;
    if (isFault) this.hint.textContent = words;
  }

  complain(sentence) {
    this.fault.hidden = !sentence;
    this.fault.textContent = sentence ?? "";
  }

  writeLink() {
    const url = new URL(location.href), { searchParams } = url;
    const told = { tree: linkOf(this.tree), method: this.method?.key, target: this.pickers.target };
    for (const [name, value] of Object.entries(told)) if (value) searchParams.set(name, value);
    if (!told.tree) searchParams.delete("tree");
    for (const other of ["run", "runs", "compare"]) searchParams.delete(other);
    history.replaceState(null, "", url);
    return url.href;
  }
}

// Puts the editor on the page and opens what a link carries.
export function mount({ element, props, server, trigger, watch }) {
  const editor = new TreeEditor(part(element, ".editor"), server, trigger);
  const { pickers } = editor;
  let openedRev = null;

  // A link has the leaves in short, or the tree in any format that import reads.
  async function openTree(link) {
    if (!link?.tree) return;
    const short = fromLink(link.tree);
    const answer = short ? {} : await editor.ask("read", { text: link.tree, method: null });
    if (answer.error) editor.complain(`The link's tree cannot be read. ${answer.error}`);
    else editor.open(short ?? Choices.closed(answer.tree), "Opened the link's tree");
  }

  const openLink = () => pickers.during(async () => {
    const { rev = null, link = null } = props.value ?? {};
    if (rev === openedRev || !pickers.menus.targets.length) return;
    openedRev = rev;
    if (!link) return;
    await pickers.pickTarget(link.target || pickers.target, link);
    await openTree(link);
  });

  watch("value", openLink);
  pickers.during(async () => {
    const menus = await editor.ask("start");
    if (menus.error) { editor.complain(menus.error); return; }
    const { rev = null, link = null } = props.value ?? {};
    openedRev = rev;
    editor.files.fill(menus);
    await pickers.fill(menus, link);
    await openTree(link);
    await openLink();
  });
}
