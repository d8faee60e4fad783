// The address of the page: the tab on show and what it shows. A change of tab is a step of the
// browser's history; what a tab shows replaces the step, so that Back leads from tab to tab.

/** @typedef {Record<string, string | null | undefined>} Query */

/** @type {Record<string, URLSearchParams>} what every tab shows */
const shown = {};
/** Of what outlives the page, the parameter: it is found again without the address, too. */
const LASTING = { generate: "run", compare: "compare" };

/** The tab that an address opens; permalinks name it by their first parameter alone. */
export function tabOf(/** @type {URLSearchParams} */ query) {
  const named = query.get("tab");
  if (named) return named;
  if (query.has("run")) return "runs";
  if (query.get("runs")) return query.get("runs")?.startsWith("{") ? "runs" : "compare";
  return ["compare", "tree", "benchmark", "sweep", "deploy"].find((tab) => query.get(tab))
    ?? "generate";
}

function addressOf(tab) {
  const query = new URLSearchParams(shown[tab]), theme = here().get("__theme");
  query.delete("tab");
  if (tabOf(query) !== tab || tab === "generate" && query.size) {
    const rest = [...query];
    return url(new URLSearchParams([["tab", tab], ...rest]), theme);
  }
  return url(query, theme);
}

function url(query, theme) {
  if (theme) query.set("__theme", theme);
  const found = new URL(location.href);
  found.search = query.toString();
  return found.href;
}

function here() { return new URLSearchParams(location.search); }

function tabOnShow() {
  const tab = document.querySelector("[role=tablist] [role=tab][aria-selected=true]");
  return tab instanceof HTMLElement ? tab.dataset.tabId ?? null : null;
}

/**
 * A tab shows something else.
 * @param {string} tab
 * @param {Query} changes parameters; one without a value is left out from now on
 * @param {boolean} whole whether these are all
 * @returns {string} the address that leads there
 */
export function show(tab, changes, whole = false) {
  const query = whole ? new URLSearchParams() : shown[tab] ?? new URLSearchParams();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value); else query.delete(name);
  }
  shown[tab] = query;
  const name = LASTING[tab];
  if (name && name in changes) remember(`pg-${tab}-${name}`, query.get(name) ?? "");
  const address = addressOf(tab);
  if (tabOf(here()) === tab && address !== location.href) history.replaceState(null, "", address);
  return address;
}

function remember(name, value) {
  try {
    for (const store of [sessionStorage, localStorage]) store.setItem(name, value);
  } catch { /* a browser that keeps nothing */ }
}

/** Puts a tab on show. */
export function select(tab) {
  const menu = [...document.querySelectorAll(".overflow-dropdown button")];
  const button = document.querySelector(`[role=tablist] [data-tab-id="${CSS.escape(tab)}"]`)
    ?? menu.find((entry) => entry.textContent?.trim().toLowerCase() === tab);
  if (button instanceof HTMLElement && tab !== tabOnShow()) button.click();
}

/** Follows the tabs from now on; the address that is there chooses the first. */
export function follow() {
  const first = tabOf(here());
  shown[first] = here();
  shown[first].delete("__theme");
  if (here().has("tab")) select(first);  // permalinks are opened by the pages that read them
  new MutationObserver(() => {
    const tab = tabOnShow();
    if (tab && tab !== tabOf(here())) history.pushState(null, "", addressOf(tab));
  }).observe(document.body, { subtree: true, attributeFilter: ["aria-selected"] });
  addEventListener("popstate", () => select(tabOf(here())));
  document.addEventListener("pg-address", (event) => {
    if (event instanceof CustomEvent) show(event.detail.tab, event.detail.query, event.detail.whole);
  });
}
