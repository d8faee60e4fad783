// The address of the page: the selected tab and its parameters. A change of tab is an entry of the
// browser's history; other parameters replace the entry, so that Back leads from tab to tab.

/** @typedef {Record<string, string | null | undefined>} Query */

/** @type {Record<string, URLSearchParams>} the parameters of every tab */
const queries = {};
/** The parameter that a reload without the address restores, by tab. */
const REMEMBERED = { generate: "run", compare: "compare" };
const PERMALINKS = ["compare", "tree", "benchmark", "sweep", "train", "deploy"];

/** The tab that an address opens, by the rule of `web/address.py`. */
export function tabOf(/** @type {URLSearchParams} */ query) {
  const named = query.get("tab");
  if (named) return named;
  if (query.has("run")) return "runs";
  if (query.get("runs")) return query.get("runs")?.startsWith("{") ? "runs" : "compare";
  return PERMALINKS.find((tab) => query.get(tab)) ?? "generate";
}

function addressOf(tab) {
  const query = new URLSearchParams(queries[tab]), theme = here().get("__theme");
  query.delete("tab");
  if (tabOf(query) !== tab || tab === "generate" && query.size) {
    const rest = [...query];
    return url(new URLSearchParams([["tab", tab], ...rest]), theme);
  }
  return url(query, theme);
}

function url(query, theme) {
  if (theme) query.set("__theme", theme);
  const address = new URL(location.href);
  address.search = query.toString();
  return address.href;
}

function here() { return new URLSearchParams(location.search); }

function selectedTab() {
  const tab = document.querySelector("[role=tablist] [role=tab][aria-selected=true]");
  return tab instanceof HTMLElement ? tab.dataset.tabId ?? null : null;
}

/**
 * Changes the parameters of a tab.
 * @param {string} tab
 * @param {Query} changes parameters; one without a value is removed
 * @param {boolean} whole whether these are all of them
 * @returns {string} the address that leads there
 */
export function show(tab, changes, whole = false) {
  const query = whole ? new URLSearchParams() : queries[tab] ?? new URLSearchParams();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value); else query.delete(name);
  }
  queries[tab] = query;
  const name = REMEMBERED[tab];
  if (name && name in changes) remember(`pg-${tab}-${name}`, query.get(name) ?? "");
  const address = addressOf(tab);
  if (tabOf(here()) === tab && address !== location.href) history.replaceState(null, "", address);
  return address;
}

function remember(name, value) {
  try {
    for (const store of [sessionStorage, localStorage]) store.setItem(name, value);
  } catch { /* storage is blocked */ }
}

/** Selects a tab. */
export function select(tab) {
  const menu = [...document.querySelectorAll(".overflow-dropdown button")];
  const button = document.querySelector(`[role=tablist] [data-tab-id="${CSS.escape(tab)}"]`)
    ?? menu.find((entry) => entry.textContent?.trim().toLowerCase() === tab);
  if (button instanceof HTMLElement && tab !== selectedTab()) button.click();
}

/** Selects the tab of the address, and follows the tabs from now on. */
export function follow() {
  const first = tabOf(here());
  queries[first] = here();
  queries[first].delete("__theme");
  select(first);
  new MutationObserver(() => {
    const tab = selectedTab();
    if (tab && tab !== tabOf(here())) history.pushState(null, "", addressOf(tab));
  }).observe(document.body, { subtree: true, attributeFilter: ["aria-selected"] });
  addEventListener("popstate", () => select(tabOf(here())));
  document.addEventListener("pg-select", (event) => {
    if (event instanceof CustomEvent && event.detail) select(event.detail);
  });
  document.addEventListener("pg-address", (event) => {
    if (event instanceof CustomEvent) show(event.detail.tab, event.detail.query, event.detail.whole);
  });
}
