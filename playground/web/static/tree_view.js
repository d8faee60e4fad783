// A choice tree as SVG that redraws only what changed; pan by scrolling or dragging, zoom by scale.
// Needs dom.js, tree_model.js, tree_layout.js.
const SMALLEST = 4.5, LARGEST = 10.5;
const ZOOMS = { least: 0.15, most: 2.5 };
const REVEALED = 36;

class TreeView {
  // on: { select(key), act(name, key) }; act is an edit, "fold", "menu".
  constructor(on) {
    this.on = on;
    this.root = "left";
    this.zoom = 1;
    this.shapes = new Map();
    this.guides = s("g", { class: "guides", "aria-hidden": "true" });
    this.heads = s("g", { class: "heads" });
    this.band = s("rect", { class: "band" });
    this.titles = s("g", { "aria-hidden": "true" }, this.band, this.heads);
    this.edges = s("g", { "aria-hidden": "true" });
    this.nodes = s("g", { role: "none" });
    this.svg = s("svg", { role: "tree", "aria-label": "choice tree" },
      this.guides, this.edges, this.nodes, this.titles);
    this.host = h("div", { class: "canvas" }, this.svg);
    this.listen();
  }

  listen() {
    this.svg.addEventListener("click", (event) => {
      const key = this.keyAt(event);
      if (key !== null && !this.dragged) this.on.select(key, true);
    });
    this.svg.addEventListener("dblclick", (event) => {
      const key = this.keyAt(event);
      if (key !== null) this.on.act("child", key);
    });
    this.svg.addEventListener("focusin", (event) => {
      const key = this.keyAt(event);
      if (key !== null) this.on.select(key, false);
    });
    this.svg.addEventListener("pointerover", (event) => this.on.hover(this.keyAt(event)));
    this.svg.addEventListener("pointerleave", () => this.on.hover(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.host.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.15 : 1 / 1.15, event);
    }, { passive: false });
    this.host.addEventListener("scroll", () => this.stick());
    this.listenToDrags();
  }

  listenToDrags() {
    let from = null;
    this.host.addEventListener("pointerdown", (event) => {
      this.dragged = false;
      if (event.button !== 0 || event.pointerType === "touch" || this.keyAt(event) !== null) return;
      from = { x: event.clientX, y: event.clientY, left: this.host.scrollLeft,
        top: this.host.scrollTop };
    });
    this.host.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      this.dragged = true;
      this.host.scrollLeft = from.left - (event.clientX - from.x);
      this.host.scrollTop = from.top - (event.clientY - from.y);
    });
    window.addEventListener("pointerup", () => { from = null; });
  }

  keyAt(event) {
    return event.target.closest?.("[data-key]")?.getAttribute("data-key") ?? null;
  }

  press(event) {
    const key = this.keyAt(event);
    if (key === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const act = { Enter: "child", Insert: "child", s: "next", S: "next", Delete: "remove",
      Backspace: "remove", " ": "fold" }[event.key];
    const goal = event.key === "Home" ? "" : event.key === "End" ? this.layout.order.at(-1).key
      : event.key.startsWith("Arrow") ? neighbour(this.layout, key, event.key, this.root) : null;
    if (act) this.on.act(act, key);
    else if (typeof goal === "string") this.focus(goal);
    else if (this.opens(event.key, key)) this.on.act("fold", key);
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
  }

  // An arrow that leads into a folded node unfolds it.
  opens(arrow, key) {
    const item = this.layout.items.get(key);
    return item.folded > 0 && arrow === (this.root === "left" ? "ArrowRight" : "ArrowDown");
  }

  focus(key) {
    this.shapes.get(key)?.group.focus();
  }

  // Scrolls the tree so that a node is in view; the page stays where it is.
  reveal(key) {
    const item = this.layout.items.get(key);
    if (!item) return;
    const nearest = (at, size, from) => Math.max(at + REVEALED - size, Math.min(at - REVEALED, from));
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.host;
    this.host.scrollLeft = nearest(item.x * this.zoom, clientWidth, scrollLeft);
    this.host.scrollTop = nearest(item.y * this.zoom, clientHeight, scrollTop);
  }

  // Zooms and keeps what is under the pointer (or in the middle) where it is.
  zoomBy(factor, event = null) {
    const box = this.host.getBoundingClientRect();
    const x = event ? event.clientX - box.left : box.width / 2;
    const y = event ? event.clientY - box.top : box.height / 2;
    const before = this.zoom;
    this.zoom = Math.min(ZOOMS.most, Math.max(ZOOMS.least, before * factor));
    const ratio = this.zoom / before;
    const left = (this.host.scrollLeft + x) * ratio - x, top = (this.host.scrollTop + y) * ratio - y;
    this.resize();
    this.host.scrollLeft = left;
    this.host.scrollTop = top;
  }

  // Shows the whole tree, or no smaller than `least`: then the root is in view.
  fit(least = ZOOMS.least) {
    const { width, height, items } = this.layout;
    const { clientWidth, clientHeight } = this.host;
    if (!clientWidth) return;
    this.zoom = Math.min(1.2, Math.max(least, Math.min((clientWidth - 2) / width,
      (clientHeight - 2) / height)));
    this.resize();
    const { x, y } = items.get("");
    const left = this.root === "left";
    this.host.scrollTo(left ? 0 : x * this.zoom - clientWidth / 2,
      left ? y * this.zoom - clientHeight / 2 : 0);
  }

  // The titles of the depths stay in view.
  stick() {
    const { scrollLeft, scrollTop } = this.host;
    change(this.titles, { transform: this.root === "left" ? `translate(0,${scrollTop / this.zoom})`
      : `translate(${scrollLeft / this.zoom},0)` });
  }

  resize() {
    const { width, height } = this.layout;
    change(this.svg, { viewBox: `0 0 ${width} ${height}`, width: Math.ceil(width * this.zoom),
      height: Math.ceil(height * this.zoom) });
    this.stick();
  }

  // scene: { tree, marks, collapsed, selected, facts(key) → { size, share, label, words, known } }
  render(scene, rates) {
    this.layout = layoutChoices(scene.tree, scene.collapsed, this.root);
    for (const [key, shape] of this.shapes) {
      if (this.layout.items.has(key)) continue;
      shape.group.remove();
      shape.edge?.remove();
      this.shapes.delete(key);
    }
    let before = null;
    for (const item of this.layout.order) {
      const shape = this.shapes.get(item.key) ?? this.make(item.key);
      if (!shape.group.parentNode || shape.group.previousSibling !== before) {
        this.nodes.insertBefore(shape.group, before ? before.nextSibling : this.nodes.firstChild);
      }
      before = shape.group;
      this.place(shape, item, scene);
    }
    this.drawHeads(rates);
    this.resize();
  }

  make(key) {
    const shape = { circle: s("circle"), rank: s("text", { class: "rank", dy: "0.35em" }),
      label: s("text", { class: "label", dy: "0.35em" }), edge: null };
    shape.group = s("g", { "data-key": key, role: "treeitem" },
      s("circle", { class: "hit", r: 12 }), shape.circle, shape.rank, shape.label);
    shape.rank.textContent = key === "" ? "" : String(rankOf(key));
    if (key !== "") {
      shape.edge = s("path");
      this.edges.append(shape.edge);
    }
    this.shapes.set(key, shape);
    return shape;
  }

  place(shape, item, scene) {
    const facts = scene.facts(item.key);
    const radius = item.key === "" ? 8 : SMALLEST + (LARGEST - SMALLEST) * facts.size;
    const siblings = item.key === "" ? [""] : scene.tree.childrenOf(parentOf(item.key));
    const mark = scene.marks?.get(item.key) ?? "";
    const chosen = item.key === scene.selected;
    const many = scene.tree.childrenOf(item.key).length > 0;
    change(shape.group, {
      class: `node ${item.key === "" ? "root" : "choice"} ${mark} ${facts.known ? "" : "unknown"} `
        + (chosen ? "chosen" : ""),
      style: `--share:${facts.share.toFixed(3)}`, transform: `translate(${item.x},${item.y})`,
      tabindex: chosen ? "0" : "-1", "aria-level": item.depth + 1, "aria-label": facts.words,
      "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(item.key) + 1,
      "aria-selected": chosen, "aria-expanded": many ? !scene.collapsed.has(item.key) : null,
    });
    change(shape.circle, { r: radius.toFixed(1) });
    const label = item.folded ? `+${item.folded}` : facts.label;
    retext(shape.label, label);
    this.placeLabel(shape.label, item, radius);
    if (shape.edge) this.placeEdge(shape.edge, item, mark, facts);
  }

  // Beside the edge that comes in, so that the edges that go out stay free.
  placeLabel(label, item, radius) {
    const left = this.root === "left";
    const at = item.folded ? { x: (radius + 4).toFixed(1), y: 0, class: "label folded" }
      : left ? { x: -(radius + 3).toFixed(1), y: -7, class: "label end" }
        : { x: 5, y: -(radius + 7).toFixed(1), class: "label" };
    change(label, at);
  }

  placeEdge(path, item, mark, facts) {
    const from = this.layout.items.get(parentOf(item.key));
    const half = ALONG[this.root] / 2;
    const d = this.root === "left"
      ? `M${from.x},${from.y}C${from.x + half},${from.y} ${item.x - half},${item.y} ${item.x},${item.y}`
      : `M${from.x},${from.y}C${from.x},${from.y + half} ${item.x},${item.y - half} ${item.x},${item.y}`;
    change(path, { d, class: `edge ${mark}`, "stroke-width": (1 + 3 * facts.share).toFixed(2) });
  }

  drawHeads(rates) {
    const { depth, width, height } = this.layout;
    const left = this.root === "left";
    change(this.band, left ? { width, height: 31 } : { width: 58, height });
    for (const group of [this.guides, this.heads]) {
      while (group.children.length > depth) group.lastChild.remove();
    }
    for (let d = 1; d <= depth; d += 1) {
      const line = this.guides.children[d - 1] ?? this.guides.appendChild(s("line"));
      const head = this.heads.children[d - 1]
        ?? this.heads.appendChild(s("g", {}, s("text"), s("text", { class: "rate" })));
      const along = (left ? MARGIN.left.x : MARGIN.top.y) + d * ALONG[this.root];
      change(line, left ? { x1: along, x2: along, y1: 30, y2: height }
        : { x1: 60, x2: width, y1: along, y2: along });
      const [title, rate] = head.children;
      change(title, left ? { x: along, y: 12, class: "mid" } : { x: 6, y: along - 2, class: "" });
      change(rate, left ? { x: along, y: 25, class: "rate mid" }
        : { x: 6, y: along + 11, class: "rate" });
      retext(title, `depth ${d}`);
      retext(rate, rates ? percent(rates[d - 1] ?? 0) : "");
    }
  }
}

function retext(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Sets attributes that differ from what stands; null takes one away.
function change(node, attributes) {
  const known = node.drawn ??= {};
  for (const [name, value] of Object.entries(attributes)) {
    if (known[name] === value) continue;
    known[name] = value;
    if (value === null) node.removeAttribute(name);
    else node.setAttribute(name, String(value));
  }
}
