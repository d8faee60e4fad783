// The page's URL: the selected tab and its parameters. A change of tab adds an entry to the browser's
// history; other changes replace the entry, so Back leads from tab to tab.
import { remember } from "./kit.js";

/** @type {Record<string, URLSearchParams>} the parameters of every tab */
const queries = {};
/** By tab, the parameter that is restored when the page is opened without it. */
const REMEMBERED = { generate: "run", compare: "compare" };
const PERMALINKS = ["compare", "tree", "benchmark", "sweep", "train", "deploy"];

/** The tab that a URL opens, by the rule of `web/address.py`. */
export function tabOf(/** @type {URLSearchParams} */ query) {
  const named = query.get("tab");
  if (named) return named;
  if (query.has("run") || query.get("runs")) return "runs";
  return PERMALINKS.find((tab) => query.get(tab)) ?? "generate";
}

function addressOf(tab) {
  let query = new URLSearchParams(queries[tab]);
  query.delete("tab");
  if (tabOf(query) !== tab || tab === "generate" && query.size) {
    query = new URLSearchParams([["tab", tab], ...query]);
  }
  const theme = here().get("__theme"), address = new URL(location.href);
  if (theme) query.set("__theme", theme);
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
 * @param {Record<string, string | null | undefined>} changes parameters; those without a value are removed
 * @param {boolean} whole whether to remove all other parameters
 */
export function show(tab, changes, whole = false) {
  const query = whole ? new URLSearchParams() : queries[tab] ?? new URLSearchParams();
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value); else query.delete(name);
  }
  queries[tab] = query;
  const name = REMEMBERED[tab];
  for (const store of name && name in changes ? ["sessionStorage", "localStorage"] : []) {
    remember(`pg-${tab}-${name}`, query.get(name) ?? "", store);
  }
  const address = addressOf(tab);
  if (tabOf(here()) === tab && address !== location.href) history.replaceState(null, "", address);
}

/** A parameter of a tab's URL. */
export function parameter(/** @type {string} */ tab, /** @type {string} */ name) {
  return queries[tab]?.get(name) ?? null;
}

/** Selects a tab. */
export function select(tab) {
  const menu = [...document.querySelectorAll(".overflow-dropdown button")];
  const button = document.querySelector(`[role=tablist] [data-tab-id="${CSS.escape(tab)}"]`)
    ?? menu.find((entry) => entry.textContent?.trim().toLowerCase() === tab);
  if (button instanceof HTMLElement && tab !== selectedTab()) button.click();
}

/** Selects the tab that the URL names, and keeps the URL up to date from then on. */
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
