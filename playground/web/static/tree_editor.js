// The Tree page: edit a choice tree, see at every edit what it is worth. Needs the other tree_*.js.
//
// value: { rev, link: { tree, method, target, benchmark } | null }: what a link or another page opens;
// all of its parts may be empty.
// server: see playground/trees/editor.py; every answer is an object, { error } for a fault.
const START_TREE = [[0], [0, 0], [1]];
const READABLE = 0.85;

class TreeEditor {
  constructor(host) {
    this.history = new EditHistory({ tree: Choices.closed(START_TREE), at: "" });
    this.collapsed = new Set();
    this.ghost = null;
    this.table = null;
    this.speed = null;
    this.category = null;
    this.method = null;
    this.source = null;
    this.opened = null;
    this.job = null;
    this.view = new TreeView({
      select: (key, focus) => this.select(key, focus),
      act: (name, key) => this.act(name, key),
      hover: (key) => this.hover(key),
    });
    this.figures = new TreeFigures();
    this.live = h("div", { class: "live", role: "status", "aria-live": "polite" });
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.hint = h("div", { class: "hint" });
    this.info = new NodeInfo((at) => this.exampleAt(at));
    this.pickers = new TreePickers(this);
    this.files = new TreeFiles(this);
    this.side = new TreeSide(this);
    this.menu = this.makeMenu();
    this.build(host);
    this.draw();
  }

  get tree() { return this.history.now.tree; }
  get at() { return this.history.now.at; }

  build(host) {
    this.view.host.append(this.menu);
    const main = h("div", { class: "main" }, this.makeTools(), this.files.host,
      h("div", { class: "frame" }, this.view.host, this.hint), this.info.host);
    host.append(this.pickers.host, this.fault, this.figures.host,
      h("div", { class: "body" }, main, this.side.host), this.live);
    // On the document: after a click beside the controls, nothing of the editor has the focus.
    document.addEventListener("keydown", (event) => this.shortcut(event));
    this.host = host;
  }

  makeTools() {
    const tool = (name, text, title, work) => h("button", { type: "button", class: "tool",
      "data-tool": name, title, onclick: work }, text);
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

  // Buttons beside the node that the pointer chose; keys and the toolbar do the same.
  makeMenu() {
    const item = (name, text, title) => h("button", { type: "button", tabindex: "-1", title,
      onclick: () => this.act(name, this.at) }, text);
    // The node keeps the focus.
    const keep = (event) => event.preventDefault();
    return h("div", { class: "menu", "aria-hidden": "true", hidden: true, onmousedown: keep },
      item("child", "+ child", "add a child (Enter)"),
      item("next", "+ rank", "add the next rank beside it (S)"),
      item("remove", "\u00d7", "remove it and all below (Del)"));
  }

  shortcut(event) {
    if (!(event.ctrlKey || event.metaKey) || !this.hears(event.target)) return;
    const key = event.key.toLowerCase();
    const work = key === "z" && !event.shiftKey ? () => this.undo()
      : key === "y" || (key === "z" && event.shiftKey) ? () => this.redo() : null;
    if (!work) return;
    event.preventDefault();
    work();
  }

  hears(target) {
    if (!this.host.isConnected || !this.host.offsetParent) return false;
    return target === document.body
      || (this.host.contains(target) && !target.matches("input, textarea"));
  }

  // Where the focus goes when the control that had it goes away.
  keepFocus() {
    this.view.shapes.get(this.at)?.group.focus({ preventScroll: true });
  }

  // ---- edits

  act(name, key) {
    this.menu.hidden = true;
    if (name === "fold") { this.fold(key); return; }
    if (this.method?.kind === "dynamic") {
      this.say("The drafter grows this tree itself; change its size on the right.", true);
      return;
    }
    if (!this.tree.has(key)) {
      this.say("This node is only proposed. Accept the proposal first.", true);
      return;
    }
    const made = EDITS[name](this.tree, key, this.method?.limits);
    if (made.fault) { this.say(made.fault, true); return; }
    this.adopt(made.tree, made.at, made.words);
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
    for (const key of this.collapsed) if (isWithin(this.at, key) && this.at !== key) {
      this.collapsed.delete(key);
    }
    this.draw();
    if (focused) this.keepFocus();
    this.view.reveal(this.at);
    this.say(`${words}. ${this.summary()}`);
    this.side.edited();
    clearTimeout(this.linking);
    this.linking = setTimeout(() => this.writeLink(), 400);
  }

  fold(key) {
    if (!this.tree.childrenOf(key).length) { this.say("Nothing is below this node."); return; }
    const closing = !this.collapsed.has(key);
    if (closing) this.collapsed.add(key);
    else this.collapsed.delete(key);
    this.draw();
    const count = this.tree.subtree(key).length - (key !== "");
    this.say(`${closing ? "Folded" : "Unfolded"} ${pathWords(key)}: ${plural(count, "node")}`
      + ` below it ${closing ? "hidden" : "shown"}.`);
  }

  select(key, byPointer) {
    if (byPointer) this.showMenu(key);
    else if (key !== this.at) this.menu.hidden = true;
    if (key === this.at && this.info.key === key) return;
    this.history.now = { ...this.history.now, at: key };
    this.draw();
    if (byPointer) this.view.focus(key);
  }

  showMenu(key) {
    const item = this.view.layout.items.get(key);
    if (!item) return;
    this.menu.hidden = false;
    const { zoom } = this.view;
    const top = item.y * zoom - 14 * Math.max(1, zoom) - this.menu.offsetHeight;
    this.menu.style.left = `${Math.max(2, item.x * zoom - 20)}px`;
    this.menu.style.top = `${top < 2 ? item.y * zoom + 14 * Math.max(1, zoom) : top}px`;
    for (const button of this.menu.children) {
      button.hidden = key === "" && button !== this.menu.firstChild;
    }
  }

  turn() {
    this.view.root = this.view.root === "left" ? "top" : "left";
    const button = this.tools.querySelector("[data-tool=root]");
    button.textContent = this.view.root === "left" ? "Root on top" : "Root left";
    this.menu.hidden = true;
    this.draw();
    this.view.fit(READABLE);
    this.say(`Root ${this.view.root === "left" ? "left" : "on top"}.`);
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
    const began = performance.now();
    this.now = this.drafted ? worthOf(this.drafted, this.speed) : this.worth(this.tree);
    const shown = this.ghost ? Choices.closed([...this.tree.paths, ...this.ghost.paths]) : this.tree;
    if (!shown.has(this.at)) this.history.now = { ...this.history.now, at: "" };
    const marks = this.ghost ? this.marksOf(shown) : null;
    const facts = this.drafted ? draftedFacts(this.drafted)
      : factsOf(this.tree, this.now.replay, this.table);
    this.facts = facts;
    this.view.render({ tree: shown, marks, collapsed: this.collapsed, selected: this.at, facts },
      this.now.rates);
    this.figures.show(this.now, this.opened);
    const told = shown.has(this.hovered) ? this.hovered : this.at;
    this.info.show(told, this.describe(told));
    this.hint.textContent = this.outside();
    this.showTools();
    this.drawMs = performance.now() - began;
  }

  marksOf(shown) {
    return new Map(shown.keys.map((key) => [key,
      !this.tree.has(key) ? "add" : !this.ghost.has(key) ? "drop" : ""]));
  }

  showTools() {
    const off = (name, disabled) => {
      const button = this.tools.querySelector(`[data-tool=${name}]`);
      if (disabled && button === document.activeElement) this.keepFocus();
      button.disabled = disabled;
    };
    const grown = this.method?.kind === "dynamic";
    off("undo", !this.history.past.length);
    off("redo", !this.history.future.length);
    off("child", grown);
    off("remove", grown || this.at === "");
    off("next", grown || this.at === "");
    this.files.enable(!grown);
  }

  // Nodes that the table can say nothing about.
  outside() {
    if (this.method?.kind === "dynamic" && !this.drafted) {
      return "This drafter grows its own trees. They are drawn here once runs of it are picked above, "
        + "or texts are re-drafted.";
    }
    const limits = this.method?.limits;
    const tooFar = !limits ? 0 : this.tree.paths.filter((path) => path.length > (limits.depth ?? MOST_DEPTH)
      || path[path.length - 1] >= (limits.ranks ?? Infinity)).length;
    if (tooFar) {
      return `${limits.what} cannot draft ${plural(tooFar, "node")} of this tree: `
        + [limits.depth && `it drafts ${limits.depth} deep`,
          limits.ranks && `it offers ranks 0 to ${limits.ranks - 1}`].filter(Boolean).join(", ") + ".";
    }
    if (!this.table) return "";
    if (this.table.chains) {
      return this.now.replay ? "" : `Measured for draft lengths ${this.table.lengths.join(", ")}; `
        + `not for ${this.tree.isChain ? this.tree.depth : "trees"}.`;
    }
    const { depths, numRanks } = this.table;
    const out = this.tree.paths.filter(
      (path) => path.length > depths || path[path.length - 1] >= numRanks).length;
    return out ? `${plural(out, "node")} beyond the table's ${depths} depths and ${numRanks} ranks: `
      + "counted as never accepted." : "";
  }

  describe(key) {
    const lines = [this.facts(key).words];
    if (key === "" || !this.tree.has(key) || this.drafted) return { lines, loss: "" };
    const without = this.worth(this.tree.without(key));
    const gone = this.tree.subtree(key).length;
    if (without.mat === null) return { lines, loss: "" };
    const fewer = `Without ${gone > 1 ? `it and the ${gone - 1} below` : "it"}`;
    const speed = without.tok_s === null ? ""
      : `, ${number(this.now.tok_s, 1)} \u2192 ${number(without.tok_s, 1)} tok/s`;
    return { lines, loss: `${fewer}: MAT ${number(this.now.mat, 3)} \u2192 `
      + `${number(without.mat, 3)}${speed}` };
  }

  hover(key) {
    this.hovered = key;
    const shown = key ?? this.at;
    if (this.info.key === shown) return;
    this.info.show(shown, this.describe(shown));
  }

  // An example step from the log: text before the root, and the path's tokens.
  async exampleAt(key) {
    if (!this.table || !this.source?.examples || key === "" || !this.tree.has(key)) return null;
    const steps = stepsThrough(this.table, this.tree, key, 50, this.category);
    if (!steps.length) return null;
    const { at } = steps[Math.floor(steps.length / 2)];
    const answer = await server.example({ source: this.source.id, position: at,
      depth: depthOf(key) });
    return answer && !answer.error ? answer : null;
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
      const tree = method.kind === "dynamic" ? new Choices([]) : Choices.closed(method.tree);
      this.history.reset({ tree, at: "" });
      this.collapsed.clear();
    }
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
    this.side.changed();
  }

  // The trees that a drafter grew, drawn as one; null goes back to the tree being edited.
  showDrafted(drafted) {
    this.drafted = drafted;
    if (drafted) {
      this.history.reset({ tree: Choices.closed(drafted.paths.map(([path]) => path)), at: "" });
    }
    this.draw();
    this.side.latency.edited();
    this.side.runs.edited();
    if (drafted) this.view.fit(READABLE);
  }

  // A proposal drawn over the current tree; null takes it away.
  showGhost(tree) {
    this.ghost = tree;
    this.draw();
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

  // Another tree as the one to start from; edits after it are compared with it.
  open(tree, words) {
    const kind = this.method?.kind;
    if (kind === "dynamic" || (kind === "chain" && !tree.isChain)) {
      this.say(`${this.method.title} ${kind === "chain" ? "drafts one chain" : "grows its own tree"}; `
        + "pick a method with a choice tree to open this one.", true);
      this.complain(this.live.textContent);
      return;
    }
    this.complain(null);
    if (this.ghost) this.side.optimise.drop(IDLE);
    this.collapsed.clear();
    this.adopt(tree, "", words);
    this.opened = this.worth(tree);
    this.draw();
    this.view.fit(READABLE);
  }

  writeLink() {
    const url = new URL(location.href);
    if (this.tree.size) url.searchParams.set("tree", linkOf(this.tree));
    else url.searchParams.delete("tree");
    if (this.method) url.searchParams.set("method", this.method.key);
    if (this.pickers.target) url.searchParams.set("target", this.pickers.target);
    for (const other of ["run", "runs", "compare"]) url.searchParams.delete(other);
    history.replaceState(null, "", url);
    return url.href;
  }
}
