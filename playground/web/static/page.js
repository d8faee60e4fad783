// Shortcuts and URL of the page: Ctrl+Enter presses the main button of the selected tab, Esc its Stop
// (or closes an open list). Buttons are looked up each time, because Gradio creates and removes them.
import { explainTerms } from "./about.js";
import { follow } from "./address.js";
import { h, press, remember, remembered, showAlert } from "./kit.js";

const MAIN = ["pg-generate", "pg-cmp-run"];
const STOP = ["pg-stop", "pg-cmp-stop", "pg-run-stop", "pg-runs-stop"];

document.addEventListener("keydown", (event) => {
  const { target, key } = event;
  if (key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (press(MAIN)) event.preventDefault();
  } else if ((key === "f" || key === "p") && !isTyping(event) && pressLettered(key)) {
    event.preventDefault();
  } else if (key === "Escape" && !document.querySelector("ul[role=listbox]")) {
    press(STOP);
  } else if (key === "Tab" && target instanceof Element && target.matches("[role=combobox]")
    && !target.closest("dialog")) {
    // Gradio's list would handle the key after losing the focus, and reopen; Chromium would focus the
    // list itself, because it can be scrolled.
    event.stopImmediatePropagation();
    const lists = [...document.querySelectorAll("ul[role=listbox]")];
    for (const list of lists) list.toggleAttribute("inert", true);
    setTimeout(() => lists.forEach((list) => list.toggleAttribute("inert", false)));
  }
}, true);

function isTyping({ target, ctrlKey, metaKey, altKey }) {
  return ctrlKey || metaKey || altKey || target instanceof Element
    && target.matches("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable=true]");
}

/** Presses the visible button that has this shortcut. */
function pressLettered(key) {
  /** @type {any[]} */
  const buttons = [...document.querySelectorAll(`button[data-key="${key}"]:enabled`)];
  const button = buttons.find((one) => one.offsetParent || one.hidden && one.parentElement.offsetParent);
  button?.click();
  return Boolean(button);
}

// The text under a setting describes its control; screen readers announce changes of it.
let numDescriptions = 0;
document.addEventListener("focusin", ({ target }) => {
  const control = /** @type {Element} */ (target);
  const info = control.closest(".pg-field")?.querySelector(".info-text");
  if (!info) return;
  info.id ||= `pg-about-${++numDescriptions}`;
  info.setAttribute("aria-live", "polite");
  control.setAttribute("aria-describedby", info.id);
});
// An introduction for newcomers, until they close it.
const WELCOME = "pg-welcome";
document.documentElement.toggleAttribute("data-newcomer", !remembered(WELCOME));
document.addEventListener("click", ({ target }) => {
  if (!(target instanceof Element) || !target.closest("#pg-welcome button")) return;
  document.documentElement.removeAttribute("data-newcomer");
  remember(WELCOME, "closed");
});
// Gradio hides the errors of listeners outside its queue.
const { fetch } = window;
const errorBox = h("div", { id: "pg-error", role: "alert", hidden: true });
document.body.append(errorBox);
errorBox.addEventListener("click", () => showAlert(errorBox));
window.fetch = async (...request) => {
  const answer = await fetch(...request);
  if (answer.status === 500) answer.clone().json().then(({ error }) => showAlert(errorBox, error), () => {});
  return answer;
};
explainTerms();
follow();
