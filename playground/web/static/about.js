// Definitions: an element shows its `data-about` beside itself, on hover and on keyboard focus.
import { h } from "./kit.js";

const GAP = 4, MARGIN = 8;
/** @type {HTMLElement} */
let tip;
/** @type {Element | null} */
let owner = null;

function show(next) {
  if (next === owner) return;
  owner?.removeAttribute("aria-describedby");
  owner = next;
  tip.hidePopover();
  if (!next) return;
  tip.textContent = next.getAttribute("data-about");
  next.setAttribute("aria-describedby", tip.id);
  tip.showPopover();
  const box = next.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = box.bottom + GAP, above = box.top - GAP - own.height;
  tip.style.top = `${below + own.height > innerHeight && above > 0 ? above : below}px`;
  tip.style.left = `${Math.max(MARGIN, Math.min(box.left, innerWidth - own.width - MARGIN))}px`;
}

const termOf = (target) => target instanceof Element ? target.closest("[data-about]") : null;

export function explainTerms() {
  tip = h("div", { id: "pg-about", role: "tooltip", popover: "manual" });
  document.body.append(tip);
  document.addEventListener("pointerover", ({ target }) => show(termOf(target)));
  document.addEventListener("focusin", ({ target }) => {
    if (target instanceof Element && target.matches(":focus-visible")) show(termOf(target));
  });
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape") show(null); });
  addEventListener("scroll", () => show(null), { capture: true, passive: true });
}
