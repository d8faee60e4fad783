// Where the nodes of a choice tree go: one column per depth (or row, with the root on top). Pure.
const ALONG = { left: 92, top: 76 };
const ACROSS = { left: 24, top: 52 };
const MARGIN = { left: { x: 26, y: 44 }, top: { x: 66, y: 24 } };

// marks: key → "add" | "drop" for nodes of a ghost; collapsed: keys whose subtree is folded away.
// Gives { items: key → { key, depth, x, y, hidden }, order, width, height, columns }.
function layoutChoices(tree, collapsed, root) {
  const items = new Map();
  let slot = 0;
  const place = (key, depth) => {
    const below = collapsed.has(key) ? [] : tree.childrenOf(key);
    const item = { key, depth, folded: below.length ? 0 : tree.subtree(key).length - (key !== "") };
    items.set(key, item);
    for (const child of below) place(child, depth + 1);
    item.slot = below.length
      ? (items.get(below[0]).slot + items.get(below[below.length - 1]).slot) / 2 : slot++;
  };
  place("", 0);
  const depth = Math.max(...[...items.values()].map((item) => item.depth));
  const { x: left, y: top } = MARGIN[root];
  for (const item of items.values()) {
    const along = item.depth * ALONG[root], across = item.slot * ACROSS[root];
    item.x = left + (root === "left" ? along : across);
    item.y = top + (root === "left" ? across : along);
  }
  const long = (depth + 1) * ALONG[root], wide = Math.max(1, slot) * ACROSS[root];
  return { items, depth,
    order: [...items.values()].sort((a, b) => a.depth - b.depth || a.slot - b.slot),
    width: root === "left" ? left + long : left + wide + 8,
    height: root === "left" ? top + wide : top + long - 20 };
}

// The node that an arrow key leads to, or undefined.
function neighbour(layout, key, arrow, root) {
  const turned = { ArrowUp: "ArrowLeft", ArrowLeft: "ArrowUp", ArrowDown: "ArrowRight",
    ArrowRight: "ArrowDown" };
  const item = layout.items.get(key);
  const level = layout.order.filter((other) => other.depth === item.depth);
  const at = level.indexOf(item);
  return {
    ArrowLeft: () => key === "" ? undefined : layout.items.get(parentOf(key)),
    ArrowRight: () => layout.order.find(
      (other) => other.depth === item.depth + 1 && parentOf(other.key) === key),
    ArrowUp: () => level[at - 1],
    ArrowDown: () => level[at + 1],
  }[root === "left" ? arrow : turned[arrow]]?.()?.key;
}
