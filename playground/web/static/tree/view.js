// A choice tree as SVG that redraws only what changed; pan by scrolling or dragging, zoom by scale.
import { percent, s } from "../kit.js";
import { ALONG, Choices, MARGIN, layoutChoices, neighbour, parentOf, rankOf } from "./model.js";

const SMALLEST = 4.5, LARGEST = 10.5;
const ZOOMS = { least: 0.15, most: 2.5 };
export const READABLE = 0.85;
const REVEALED = 36;
const KEYS = { Enter: "child", Insert: "child", s: "next", S: "next", Delete: "remove",
  Backspace: "remove", " ": "fold" };

export class TreeView {
  // on: { select(key, byPointer), act(name, key), hover(key or null) }; act is an edit or "fold".
  constructor(host, on) {
    this.host = host;
    this.on = on;
    this.root = "left";
    this.zoom = 1;
    this.dragged = false;
    this.shapes = new Map();
    this.layout = layoutChoices(new Choices([]), new Set(), "left");
    this.guides = s("g", { class: "guides", "aria-hidden": "true" });
    this.heads = s("g", { class: "heads" });
    this.band = s("rect", { class: "band" });
    this.titles = s("g", { "aria-hidden": "true" }, this.band, this.heads);
    this.edges = s("g", { "aria-hidden": "true" });
    this.nodes = s("g", { role: "none" });
    const withKey = (work) => (event) => {
      const key = keyAt(event);
      if (key !== null) work(key);
    };
    this.svg = s("svg", { role: "tree", "aria-label": "choice tree",
      onclick: withKey((key) => { if (!this.dragged) on.select(key, true); }),
      ondblclick: withKey((key) => on.act("child", key)),
      onfocusin: withKey((key) => on.select(key, false)),
      onpointerover: (event) => on.hover(keyAt(event)), onpointerleave: () => on.hover(null),
      onkeydown: (event) => this.press(event) }, this.guides, this.edges, this.nodes, this.titles);
    host.prepend(this.svg);
    host.addEventListener("scroll", () => this.stick());
    host.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.15 : 1 / 1.15, event);
    }, { passive: false });
    this.listenToDrags();
  }

  listenToDrags() {
    let from = null;
    this.host.addEventListener("pointerdown", (event) => {
      this.dragged = false;
      if (event.button !== 0 || event.pointerType === "touch" || keyAt(event) !== null) return;
      from = { x: event.clientX + this.host.scrollLeft, y: event.clientY + this.host.scrollTop };
    });
    this.host.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      this.dragged = true;
      this.host.scrollTo(from.x - event.clientX, from.y - event.clientY);
    });
    window.addEventListener("pointerup", () => { from = null; });
  }

  press(event) {
    const key = keyAt(event), isArrow = event.key.startsWith("Arrow");
    if (key === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const goal = event.key === "Home" ? "" : event.key === "End" ? this.layout.order.at(-1)?.key
      : isArrow ? neighbour(this.layout, key, event.key, this.root) : undefined;
    // An arrow that leads into a folded node unfolds it.
    const opens = event.key === (this.root === "left" ? "ArrowRight" : "ArrowDown")
      && this.layout.items.get(key).folded;
    if (event.key in KEYS) this.on.act(KEYS[event.key], key);
    else if (goal !== undefined) this.focus(goal);
    else if (opens) this.on.act("fold", key);
    else if (!isArrow) return;
    event.preventDefault();
    event.stopPropagation();
  }

  focus(key) { this.shapes.get(key)?.group.focus(); }

  // Scrolls the tree so that a node is in view; the page stays where it is.
  reveal(key) {
    const item = this.layout.items.get(key);
    if (!item) return;
    const nearest = (at, size, from) => Math.max(at + REVEALED - size, Math.min(at - REVEALED, from));
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.host;
    this.host.scrollTo(nearest(item.x * this.zoom, clientWidth, scrollLeft),
      nearest(item.y * this.zoom, clientHeight, scrollTop));
  }

  // Zooms and keeps what is under the pointer (or in the middle) where it is.
  zoomBy(factor, at) {
    const { left: x0, top: y0, width, height } = this.host.getBoundingClientRect();
    const x = at ? at.clientX - x0 : width / 2, y = at ? at.clientY - y0 : height / 2;
    const before = this.zoom;
    this.zoom = Math.min(ZOOMS.most, Math.max(ZOOMS.least, before * factor));
    const ratio = this.zoom / before;
    const left = (this.host.scrollLeft + x) * ratio - x, top = (this.host.scrollTop + y) * ratio - y;
    this.resize();
    this.host.scrollTo(left, top);
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

  // Draws only what changed. scene: { tree, mark(key), collapsed, selected, facts(key) → { size, share, label, text, known },
  // rates: of every depth, or null }
  render(scene) {
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
    this.drawHeads(scene.rates);
    this.resize();
  }

  make(key) {
    const shape = { circle: s("circle"), rank: s("text", { class: "rank", dy: "0.35em" }),
      label: s("text", { class: "label", dy: "0.35em" }), edge: key === "" ? null : s("path") };
    shape.group = s("g", { "data-key": key, role: "treeitem" },
      s("circle", { class: "hit", r: 12 }), shape.circle, shape.rank, shape.label);
    shape.rank.textContent = key === "" ? "" : String(rankOf(key));
    if (shape.edge) this.edges.append(shape.edge);
    this.shapes.set(key, shape);
    return shape;
  }

  place({ group, circle, label, edge }, item, { tree, mark, collapsed, selected, facts }) {
    const { key, x, y } = item, left = this.root === "left";
    const { size, share, known, text, label: written } = facts(key);
    const radius = key === "" ? 8 : SMALLEST + (LARGEST - SMALLEST) * size;
    const siblings = key === "" ? [""] : tree.childrenOf(parentOf(key));
    change(group, {
      class: `node ${key === "" ? "root" : "choice"} ${mark(key)} ${known ? "" : "unknown"} `
        + (key === selected ? "chosen" : ""),
      style: `--share:${share.toFixed(3)}`, transform: `translate(${x},${y})`,
      tabindex: key === selected ? "0" : "-1", "aria-level": item.depth + 1, "aria-label": text,
      "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(key) + 1,
      "aria-selected": key === selected,
      "aria-expanded": tree.childrenOf(key).length ? !collapsed.has(key) : null,
    });
    change(circle, { r: radius.toFixed(1) });
    // Beside the edge that comes in, so that the edges that go out stay free.
    const far = radius + 4;
    change(label, item.folded ? { x: far, y: 0, class: "label folded", text: `+${item.folded}` }
      : left ? { x: 1 - far, y: -7, class: "label end", text: written }
        : { x: 5, y: -3 - far, class: "label", text: written });
    if (!edge) return;
    const from = this.layout.items.get(parentOf(key)), half = ALONG[this.root] / 2;
    const bend = left ? `${from.x + half},${from.y} ${x - half},${y}`
      : `${from.x},${from.y + half} ${x},${y - half}`;
    change(edge, { d: `M${from.x},${from.y}C${bend} ${x},${y}`, class: `edge ${mark(key)}`,
      "stroke-width": (1 + 3 * share).toFixed(2) });
  }

  drawHeads(rates) {
    const { depth, width, height } = this.layout;
    const left = this.root === "left";
    change(this.band, left ? { width, height: 31 } : { width: 58, height });
    for (const group of [this.guides, this.heads]) {
      while (group.children.length > depth) group.lastElementChild?.remove();
    }
    for (let d = 1; d <= depth; d += 1) {
      const line = this.guides.children[d - 1] ?? this.guides.appendChild(s("line"));
      const head = this.heads.children[d - 1]
        ?? this.heads.appendChild(s("g", {}, s("text"), s("text")));
      const along = (left ? MARGIN.left.x : MARGIN.top.y) + d * ALONG[this.root];
      const at = (y, more) => left ? { x: along, y } : { x: 6, y: along + more };
      const mid = left ? "mid" : "";
      change(line, left ? { x1: along, x2: along, y1: 30, y2: height }
        : { x1: 60, x2: width, y1: along, y2: along });
      change(head.firstChild, { ...at(12, -2), class: mid, text: `depth ${d}` });
      change(head.lastChild, { ...at(25, 11), class: `rate ${mid}`,
        text: rates ? percent(rates[d - 1] ?? 0) : "" });
    }
  }
}

function keyAt(event) {
  return event.target.closest?.("[data-key]")?.getAttribute("data-key") ?? null;
}

// Sets attributes that differ from what stands, and the `text`; null takes one away.
function change(node, attributes) {
  const drawn = node.drawn ??= {};
  for (const [name, value] of Object.entries(attributes)) {
    if (drawn[name] === value) continue;
    drawn[name] = value;
    if (name === "text") node.textContent = value;
    else if (value === null) node.removeAttribute(name);
    else node.setAttribute(name, String(value));
  }
}
