() => {
  // Keys of the whole page: Ctrl+Enter generates, Esc stops (or closes an open list). Buttons are
  // found by id each time.
  const press = (id) => {
    const holder = document.getElementById(id);
    const button = holder?.matches("button") ? holder : holder?.querySelector("button");
    if (!button || button.disabled || !button.offsetParent) return false;
    button.click();
    return true;
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      if (press("pg-generate")) event.preventDefault();
    } else if (event.key === "Escape" && !document.querySelector("ul[role=listbox]")) {
      press("pg-stop");
    }
  }, true);
}
