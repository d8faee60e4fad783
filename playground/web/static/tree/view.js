// A choice tree as SVG that redraws only what changed; scroll or drag to pan.
import { percent, s } from "../kit.js";
import { curve, keepPlace, neighbourOf, pannable } from "../trees.js";
import { COLUMN, Choices, MARGIN, layoutChoices, parentOf, rankOf } from "./model.js";

const MIN_RADIUS = 4.5, MAX_RADIUS = 10.5;
const MIN_ZOOM = 0.15, MAX_ZOOM = 2.5;
export const READABLE = 0.85;
const REVEALED = 36;
const KEYS = { Enter: "child", Insert: "child", s: "next", S: "next", Delete: "remove",
  Backspace: "remove", " ": "fold" };

export class TreeView {
  // on: { select(key), act(name, key), hover(key or null) }; `name` is an edit or "fold".
  constructor(host, on) {
    this.host = host;
    this.on = on;
    this.zoom = 1;
    this.shapes = new Map();
    this.layout = layoutChoices(new Choices([]), new Set());
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
      ondblclick: withKey((key) => on.act("child", key)), onfocusin: withKey(on.select),
      onpointerover: (event) => on.hover(keyAt(event)), onpointerleave: () => on.hover(null),
      onkeydown: (event) => this.press(event) }, this.guides, this.edges, this.nodes, this.titles);
    host.prepend(this.svg);
    host.addEventListener("scroll", () => this.stick());
    pannable(host, (factor, at) => this.zoomBy(factor, at));
  }

  press(event) {
    const key = keyAt(event), isArrow = event.key.startsWith("Arrow");
    if (key === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const { order, items } = this.layout;
    const goal = event.key === "Home" ? "" : event.key === "End" ? order.at(-1)?.key
      : neighbourOf(order, items.get(key), event.key)?.key;
    // An arrow that leads into a folded node unfolds it.
    const opens = event.key === "ArrowRight" && items.get(key).folded;
    if (event.key in KEYS) this.on.act(KEYS[event.key], key);
    else if (goal !== undefined) this.shapes.get(goal)?.group.focus();
    else if (opens) this.on.act("fold", key);
    else if (!isArrow) return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Scrolls the tree, not the page, so that a node is in view.
  reveal(key) {
    const item = this.layout.items.get(key);
    if (!item) return;
    const nearest = (at, size, from) => Math.max(at + REVEALED - size, Math.min(at - REVEALED, from));
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.host;
    this.host.scrollTo(nearest(item.x * this.zoom, clientWidth, scrollLeft),
      nearest(item.y * this.zoom, clientHeight, scrollTop));
  }

  zoomBy(factor, /** @type {MouseEvent | null} */ at = null) {
    keepPlace(this.host, () => {
      const before = this.zoom;
      this.zoom = Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, before * factor));
      this.resize();
      return this.zoom / before;
    }, at);
  }

  // Shows the whole tree, but at least at scale `least`; then the root is in view.
  fit(least = MIN_ZOOM) {
    const { width, height, items } = this.layout, { clientWidth, clientHeight } = this.host;
    if (!clientWidth) return;
    this.zoom = Math.min(1.2, Math.max(least, Math.min((clientWidth - 2) / width,
      (clientHeight - 2) / height)));
    this.resize();
    this.host.scrollTo(0, items.get("").y * this.zoom - clientHeight / 2);
  }

  // Keeps the titles of the depths in view.
  stick() {
    change(this.titles, { transform: `translate(0,${this.host.scrollTop / this.zoom})` });
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
    this.layout = layoutChoices(scene.tree, scene.collapsed);
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
    const { key, x, y } = item;
    const { size, share, known, text, label: caption } = facts(key);
    const radius = key === "" ? 8 : MIN_RADIUS + (MAX_RADIUS - MIN_RADIUS) * size;
    const siblings = key === "" ? [""] : tree.childrenOf(parentOf(key));
    change(group, {
      class: `node ${key === "" ? "root" : ""} ${mark(key)} ${known ? "" : "unknown"} `
        + (key === selected ? "chosen" : ""),
      style: `--share:${share.toFixed(3)}`, transform: `translate(${x},${y})`,
      tabindex: key === selected ? "0" : "-1", "aria-level": item.depth + 1, "aria-label": text,
      "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(key) + 1,
      "aria-selected": key === selected,
      "aria-expanded": tree.childrenOf(key).length ? !collapsed.has(key) : null,
    });
    change(circle, { r: radius.toFixed(1) });
    // Beside the incoming edge, so that outgoing edges stay visible.
    const far = radius + 4;
    change(label, item.folded ? { x: far, y: 0, class: "label folded", text: `+${item.folded}` }
      : { x: 1 - far, y: -7, class: "label end", text: caption });
    if (!edge) return;
    const from = this.layout.items.get(parentOf(key));
    change(edge, { d: curve(from.x, from.y, x, y), class: `edge ${mark(key)}`,
      "stroke-width": (1 + 3 * share).toFixed(2) });
  }

  drawHeads(rates) {
    const { depth, width, height } = this.layout;
    change(this.band, { width, height: 31 });
    for (const group of [this.guides, this.heads]) {
      while (group.children.length > depth) group.lastElementChild?.remove();
    }
    for (let d = 1; d <= depth; d += 1) {
      const line = this.guides.children[d - 1] ?? this.guides.appendChild(s("line", { y1: 30 }));
      const head = this.heads.children[d - 1] ?? this.heads.appendChild(
        s("g", {}, s("text", { y: 12 }, `depth ${d}`), s("text", { class: "rate", y: 25 })));
      const x = MARGIN.x + d * COLUMN;
      change(line, { x1: x, x2: x, y2: height });
      change(head.firstChild, { x });
      change(head.lastChild, { x, text: rates ? percent(rates[d - 1] ?? 0) : "" });
    }
  }
}

function keyAt(event) {
  return event.target.closest?.("[data-key]")?.getAttribute("data-key") ?? null;
}

// Sets attributes and the `text` if they have changed; null removes an attribute.
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
