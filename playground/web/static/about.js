// Tooltips: an element's definition, `data-about`, on hover and on keyboard focus, or other content.
import { h } from "./kit.js";

const GAP = 4, MARGIN = 8;
let tip;
/** @type {Element | null} the element whose definition is shown */
let owner = null;

/**
 * Shows content beside a rectangle of the screen; null hides the tooltip.
 * @param {{ left: number, top: number, bottom: number } | null | undefined} place
 * @param {(Node | string)[]} content
 */
export function showTip(place, ...content) {
  owner?.removeAttribute("aria-describedby");
  owner = null;
  tip.hidePopover();
  if (!place) return;
  tip.replaceChildren(...content);
  tip.showPopover();
  const box = tip.getBoundingClientRect();
  const below = place.bottom + GAP, above = place.top - GAP - box.height;
  tip.style.top = `${below + box.height > innerHeight && above > 0 ? above : below}px`;
  tip.style.left = `${Math.max(MARGIN, Math.min(place.left, innerWidth - box.width - MARGIN))}px`;
}

function explain(/** @type {Element | null} */ next) {
  if (next === owner) return;
  showTip(next?.getBoundingClientRect(), next?.getAttribute("data-about") ?? "");
  owner = next;
  next?.setAttribute("aria-describedby", tip.id);
}

const termOf = (target) => target instanceof Element ? target.closest("[data-about]") : null;

export function explainTerms() {
  tip = h("div", { id: "pg-about", role: "tooltip", popover: "manual" });
  document.body.append(tip);
  document.addEventListener("pointerover", ({ target }) => explain(termOf(target)));
  document.addEventListener("focusin", ({ target }) => {
    if (target instanceof Element && target.matches(":focus-visible")) explain(termOf(target));
  });
  document.addEventListener("focusout", () => explain(null));
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape") showTip(null); });
  addEventListener("scroll", () => explain(null), { capture: true, passive: true });
}
