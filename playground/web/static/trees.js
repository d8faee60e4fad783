// What the pictures of draft trees and choice trees share: places of nodes, arrow keys, panning, zoom.

export const ZOOM = 1.25;

/**
 * Sets `depth` and `slot` of a tree's items: leaves take a slot each, a parent stands between its
 * first and its last child. An item has its children in `children`.
 * @returns {number} slots taken
 */
export function placeInSlots(root) {
  let slots = 0;
  const place = (item, depth) => {
    item.depth = depth;
    const { children } = item;
    for (const child of children) place(child, depth + 1);
    item.slot = children.length ? (children[0].slot + children[children.length - 1].slot) / 2 : slots++;
  };
  place(root, 0);
  return slots;
}

/** Arrow keys as if the root were on the left. */
const TURNED = { ArrowUp: "ArrowLeft", ArrowDown: "ArrowRight", ArrowLeft: "ArrowUp",
  ArrowRight: "ArrowDown" };

/** The item that an arrow key leads to from another one. */
export function neighbourOf(items, item, key, onTop = false) {
  const level = items.filter(({ depth }) => depth === item.depth).sort((a, b) => a.slot - b.slot);
  const at = level.indexOf(item);
  return { ArrowLeft: item.parentItem, ArrowRight: item.children[0], ArrowUp: level[at - 1],
    ArrowDown: level[at + 1] }[onTop ? TURNED[key] : key];
}

/** The path of an edge. */
export function curve(x0, y0, x1, y1, onTop = false) {
  const [bendX, bendY] = onTop ? [0, (y1 - y0) / 2] : [(x1 - x0) / 2, 0];
  return `M${x0},${y0} C${x0 + bendX},${y0 + bendY} ${x1 - bendX},${y1 - bendY} ${x1},${y1}`;
}

/**
 * Lets a scrolled picture be dragged by its background, and zoomed by Ctrl and the wheel.
 * @param {HTMLElement} view
 * @param {(factor: number, at: MouseEvent) => void} zoom
 * @param {() => boolean} wheelZooms whether the wheel zooms without Ctrl
 */
export function pannable(view, zoom, wheelZooms = () => false) {
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !wheelZooms()) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, event);
  }, { passive: false });
  let dragStart = null;
  view.addEventListener("pointerdown", ({ target, button, pointerType, clientX, clientY }) => {
    const onNode = /** @type {Element} */ (target).closest("[role=treeitem]");
    dragStart = button || pointerType === "touch" || onNode ? null
      : { x: clientX + view.scrollLeft, y: clientY + view.scrollTop };
  });
  view.addEventListener("pointermove", ({ clientX, clientY, buttons }) => {
    if (!buttons) dragStart = null;
    if (dragStart) view.scrollTo(dragStart.x - clientX, dragStart.y - clientY);
  });
}

/**
 * Changes the scale of a scrolled picture; what is under the pointer, or in the middle, stays there.
 * @param {() => number} rescale returns the new scale over the old one
 * @param {MouseEvent | null} at
 */
export function keepPlace(view, rescale, at = null) {
  const box = view.getBoundingClientRect();
  const x = at ? at.clientX - box.left : view.clientWidth / 2;
  const y = at ? at.clientY - box.top : view.clientHeight / 2;
  const left = view.scrollLeft + x, top = view.scrollTop + y, ratio = rescale();
  view.scrollTo(left * ratio - x, top * ratio - y);
}
