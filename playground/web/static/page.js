// Keys of the whole page: Ctrl+Enter presses the main button of the page on show, Esc its Stop (or
// closes an open list). Buttons are found by id each time: pages come and go.
const MAIN = ["pg-generate", "pg-cmp-run"];
const STOP = ["pg-stop", "pg-cmp-stop", "pg-run-stop", "pg-runs-stop"];

// Whether one of the buttons was on show.
function press(ids) {
  for (const id of ids) {
    const holder = document.getElementById(id);
    const button = holder?.matches("button") ? holder : holder?.querySelector("button");
    if (!(button instanceof HTMLButtonElement) || button.disabled || !button.offsetParent) continue;
    button.click();
    return true;
  }
  return false;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (press(MAIN)) event.preventDefault();
  } else if (event.key === "Escape" && !document.querySelector("ul[role=listbox]")) {
    press(STOP);
  }
}, true);
export {};
