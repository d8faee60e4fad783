// A small picture of a tree that is larger than its space, with a frame around the visible part.
import { h, s } from "../kit.js";

const WIDTH = 150, MAX_HEIGHT = 90;

export class Minimap {
  /** @param {HTMLElement} view scrolls the picture */
  constructor(view) {
    this.view = view;
    this.frame = s("rect", { class: "frame" });
    this.host = h("div", { class: "tree-map", hidden: true, "aria-hidden": "true" });
    this.size = null;
    view.addEventListener("scroll", () => this.follow(), { passive: true });
    const go = ({ offsetX, offsetY, buttons }) => {
      if (!buttons || !this.size) return;
      const by = view.scrollWidth / this.host.clientWidth;
      view.scrollTo(offsetX * by - view.clientWidth / 2, offsetY * by - view.clientHeight / 2);
    };
    this.host.addEventListener("pointerdown", go);
    this.host.addEventListener("pointermove", go);
  }

  /** @param {{ placed: { x: number, y: number, width: number, kind: string, accepted: boolean }[],
   *   width: number, height: number } | null} layout */
  show(layout) {
    const { view } = this;
    const larger = view.scrollWidth > view.clientWidth + 4 || view.scrollHeight > view.clientHeight + 4;
    this.host.hidden = !layout || !larger;
    this.size = layout;
    if (!layout || !larger) return;
    const scale = Math.min(WIDTH / layout.width, MAX_HEIGHT / layout.height);
    this.host.replaceChildren(s("svg", { viewBox: `0 0 ${layout.width} ${layout.height}`,
      width: layout.width * scale, height: layout.height * scale },
    ...layout.placed.map(({ x, y, width, kind, accepted }) => s("rect", { x, y: y - 8, width, height: 16,
      class: `${kind} ${accepted ? "on" : "off"}` })), this.frame));
    this.follow();
  }

  follow() {
    if (!this.size || this.host.hidden) return;
    const { view } = this, by = this.size.width / view.scrollWidth;
    for (const [name, value] of Object.entries({ x: view.scrollLeft, y: view.scrollTop,
      width: view.clientWidth, height: view.clientHeight })) {
      this.frame.setAttribute(name, String(value * by));
    }
  }
}
