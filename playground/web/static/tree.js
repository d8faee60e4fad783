// A tree of tokens as SVG, depth on x, leaves on y. Needs dom.js.
//
// tree: { labels, parents, accepted, draft_probs, target_probs, token_ids, ranks,
//         bonus: { label, token_id, recovered } | null }; node 0 is the root, parents come first.
const ROOMY = { row: 40, pill: 20, gap: 30, probs: true };
const COMPACT = { row: 22, pill: 18, gap: 22, probs: false };
const ROOMY_LEAVES = 9;
const CHAR_PX = 7.3;
const PROBS_PX = 66;

function childrenOf(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
  return children;
}

// One node more than the draft tree: the token that the target added after the accepted path.
function withBonus(tree) {
  const nodes = tree.labels.map((label, node) => ({
    label, node, parent: tree.parents[node], kind: node ? "draft" : "root",
    draft: tree.draft_probs[node], target: tree.target_probs[node],
    id: tree.token_ids[node], rank: tree.ranks[node],
  }));
  const accepted = new Set(tree.accepted);
  for (const item of nodes) item.accepted = item.node === 0 || accepted.has(item.node);
  if (tree.bonus) {
    const after = tree.accepted.length ? tree.accepted[tree.accepted.length - 1] : 0;
    nodes.push({
      label: tree.bonus.label, node: nodes.length, parent: after, id: tree.bonus.token_id,
      kind: tree.bonus.recovered ? "recovered" : "bonus", accepted: true,
      draft: null, target: null, rank: null,
    });
  }
  return nodes;
}

function layoutTree(nodes) {
  const children = childrenOf(nodes.map((item) => item.parent));
  let slot = 0;
  const place = (node, depth) => {
    const item = nodes[node];
    item.depth = depth;
    item.text = clip(visible(item.label), 14);
    item.width = Math.max(26, Array.from(item.text).length * CHAR_PX + 14);
    for (const child of children[node]) place(child, depth + 1);
    const below = children[node];
    item.slot = below.length
      ? (nodes[below[0]].slot + nodes[below[below.length - 1]].slot) / 2
      : slot++;
  };
  place(0, 0);
  const style = slot <= ROOMY_LEAVES ? ROOMY : COMPACT;
  const widths = [];
  for (const item of nodes) {
    if (style.probs && item.kind === "draft") item.width = Math.max(item.width, PROBS_PX);
    widths[item.depth] = Math.max(widths[item.depth] || 0, item.width);
  }
  const left = [8];
  widths.forEach((width, depth) => left.push(left[depth] + width + style.gap));
  for (const item of nodes) {
    item.x = left[item.depth];
    item.y = item.slot * style.row + style.row / 2;
  }
  return { style, width: left[left.length - 1], height: Math.max(1, slot) * style.row + 6 };
}

function describeNode(item) {
  const what = {
    root: "root, committed before this step", bonus: "bonus token of the target",
    recovered: "recovered token, drawn by the target after the rejection",
    draft: item.accepted ? "accepted draft" : "rejected draft",
  }[item.kind];
  const parts = [`\u201c${visible(item.label)}\u201d`, what, `id ${item.id}`];
  if (item.kind === "draft") {
    parts.push(`depth ${item.depth}`, `rank ${item.rank}`);
    parts.push(`draft probability ${probability(item.draft)}`);
    parts.push(`target probability ${probability(item.target)}`);
  }
  return parts.join(" \u00b7 ");
}

function nodePill(item, style) {
  const classes = ["node", item.kind, item.accepted ? "on" : "off"].join(" ");
  const group = s("g", {
    class: classes, transform: `translate(${item.x},${item.y})`, role: "treeitem",
    tabindex: item.node === 0 ? "0" : "-1", "aria-level": item.depth + 1,
    "aria-label": describeNode(item), "data-node": item.node,
  });
  const top = -style.pill / 2 - (style.probs ? 5 : 0);
  group.append(s("rect", { x: 0, y: top, width: item.width, height: style.pill, rx: 4 }));
  const middle = top + style.pill / 2;
  group.append(s("text", { x: item.width / 2, y: middle, dy: "0.34em" }, item.text));
  if (item.kind === "draft") appendProbs(group, item, style, top + style.pill);
  return group;
}

function appendProbs(group, item, style, y) {
  const inner = item.width - 6;
  const bars = [["p-draft", item.draft, y - 4.5], ["p-target", item.target, y - 2.5]];
  for (const [name, value, at] of bars) {
    if (value === null || value === undefined) continue;
    const width = Math.max(0.5, inner * Math.min(1, value));
    group.append(s("rect", { class: name, x: 3, y: at, width, height: 1.8 }));
  }
  if (!style.probs) return;
  const line = s("text", { class: "probs", x: item.width / 2, y: y + 10 });
  if (item.draft !== null && item.draft !== undefined) {
    line.append(s("tspan", { class: "t-draft" }, probability(item.draft)), " ");
  }
  line.append(s("tspan", { class: "t-target" }, probability(item.target)));
  group.append(line);
}

function edge(from, to, style) {
  const drop = style.probs ? 5 : 0;
  const x0 = from.x + from.width, x1 = to.x, bend = (x1 - x0) / 2;
  const y0 = from.y - drop, y1 = to.y - drop;
  const path = `M${x0},${y0} C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}`;
  return s("path", { class: `edge ${to.kind} ${to.accepted ? "on" : "off"}`, d: path });
}

function moveFocus(svg, nodes, event) {
  const current = event.target.closest("[data-node]");
  if (!current) return;
  const item = nodes[Number(current.dataset.node)];
  const siblings = nodes.filter((other) => other.depth === item.depth)
    .sort((a, b) => a.slot - b.slot);
  const at = siblings.indexOf(item);
  const next = {
    ArrowLeft: () => nodes[item.parent], ArrowUp: () => siblings[at - 1],
    ArrowRight: () => nodes.find((other) => other.parent === item.node),
    ArrowDown: () => siblings[at + 1],
  }[event.key]?.();
  if (!next) return;
  event.preventDefault();
  event.stopPropagation();
  current.setAttribute("tabindex", "-1");
  const node = svg.querySelector(`[data-node="${next.node}"]`);
  node.setAttribute("tabindex", "0");
  node.focus();
}

// Replaces what host shows. onNode(text) is told what the pointer or the focus is on ("" = nothing).
function drawTree(host, tree, onNode = () => {}) {
  const nodes = withBonus(tree);
  const { style, width, height } = layoutTree(nodes);
  const svg = s("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": "draft tree",
  });
  const ordered = nodes.slice(1).sort((a, b) => a.accepted - b.accepted);
  for (const item of ordered) svg.append(edge(nodes[item.parent], item, style));
  for (const item of nodes) svg.append(nodePill(item, style));
  const tell = (event) => {
    const group = event.target.closest?.("[data-node]");
    onNode(group ? describeNode(nodes[Number(group.dataset.node)]) : "");
  };
  svg.addEventListener("pointerover", tell);
  svg.addEventListener("focusin", tell);
  svg.addEventListener("pointerleave", () => onNode(""));
  svg.addEventListener("keydown", (event) => moveFocus(svg, nodes, event));
  host.replaceChildren(svg);
  const last = nodes[nodes.length - 1];
  host.scrollTop = Math.max(0, last.y - host.clientHeight / 2);
}
