// The Runs page over its viewer: filters, table, comparison, the open run; and the link to all this.
// Needs dom.js and the other runs_*.js. FORMULAS is put before these scripts.
let page = null, asking = 0;
let said = null;  // what is said of the last link or order; it stays until the next one
const LOOKS = new Set(["facets", "find", "groups", "details", "compare"]);
const kept = { baseline: memory.read("baseline") };
const calls = {
  ask, pin, compare, formula,
  isBaseline: (row) => Boolean(kept.baseline) && row.setup_id === kept.baseline.setup_id,
  baseline: () => kept.baseline,
  query: () => asked(),
  total: () => page?.total,
  link: linkTo,
  reload: () => load(),
  changed: () => load(),
  again: (id) => trigger("again", { id }),
  stop: () => trigger("stop", {}),
  generate: (id) => trigger("generate", { id }),
  open: (id) => openRun(id),
  close: () => compare(null),
  onOpen: (row) => openRun(row.id),
  onTick: () => actions.draw(),
  onSort: sortBy,
  onGroup: (group, words) => filters.narrow(filters.query.group, group.value, words),
};
const filters = new Filters(() => load());
const picker = new ColumnPicker(() => draw());
const table = new RunsTable(calls);
const actions = new Actions(table, calls);
calls.actions = actions;
const details = new Details(calls);
const comparison = new Compare(calls);
const count = h("span", { class: "count" });
const previous = h("button", { type: "button", onclick: () => turn(-1) }, "\u2039 previous");
const next = h("button", { type: "button", onclick: () => turn(1) }, "next \u203a");
const baseline = h("span", { class: "chips" });
const fault = h("div", { class: "alert", role: "alert", hidden: true });

element.querySelector(".runs").append(
  h("div", { class: "bar filters" }, ...filters.hosts, picker.host,
    h("button", { type: "button", onclick: () => load(true) }, "refresh"),
    h("button", { type: "button", title: "a link to this table as it is now",
      onclick: copyLink }, "copy link")),
  h("div", { class: "bar second" }, actions.host, filters.chips, baseline,
    h("span", { class: "spring" }), count, previous, next),
  fault, table.host, comparison.host, details.host);

// The server's answer, or null and the sentence that says why there is none.
async function ask(name, asked) {
  const got = await server[name](asked);
  const sentence = got ? got.error : "The server did not answer. Is it still running?";
  // A table that loads afterwards must not wipe what came of an order.
  if (!LOOKS.has(name)) said = sentence ?? null;
  showFault(sentence ?? said);
  return sentence ? null : got;
}

function showFault(sentence) {
  fault.hidden = !sentence;
  fault.textContent = sentence ?? "";
}

function formula(column) {
  const words = FORMULAS[column.formula ?? column.key] ?? column.help ?? null;
  if (column.key !== "speedup") return words;
  const over = kept.baseline ? `the pinned baseline: ${kept.baseline.title}` : "plain decoding";
  return `${words}. Here over ${over}; a dash where that has no run of the same circumstances.`;
}

function asked() {
  const { group, page: number, ...query } = filters.query;
  return query;
}

async function load(fresh = false) {
  const ticket = ++asking;
  if (fresh || !facets) {
    const found = await ask("facets", {});
    if (!found) return;
    facets = found;
    filters.draw();
  }
  const { group } = filters.query;
  const found = group ? await ask("groups", { ...asked(), group })
    : await ask("find", { ...asked(), page: filters.query.page, baseline: kept.baseline?.setup_id ?? "" });
  if (ticket !== asking || !found) return;
  page = found;
  draw();
  rememberLink();
}

function draw() {
  drawBaseline();
  if (!page) return;
  if (page.groups) return drawGroups();
  const { query } = filters;
  table.showRuns(page.rows, picker.columns, query);
  if (!page.rows.length) {
    table.showEmpty(filters.isFiltered ? "No run matches." : "No runs yet. Generate something.");
  }
  const first = query.page * page.page_size;
  count.textContent = page.total
    ? `${first + 1}\u2013${first + page.rows.length} of ${page.total}` : "";
  previous.disabled = query.page === 0;
  next.disabled = first + page.rows.length >= page.total;
  actions.draw();
  details.drawButtons();
}

function drawGroups() {
  table.showGroups(page.groups, filters.query.group);
  if (!page.groups.length) table.showEmpty("No run matches.");
  const more = page.groups.length === page.most ? ", the largest" : "";
  count.textContent = page.groups.length ? plural(page.groups.length, "group") + more : "";
  previous.disabled = next.disabled = true;
  actions.draw();
}

function drawBaseline() {
  baseline.replaceChildren(...(kept.baseline ? [h("button", { type: "button", class: "chip",
    title: "speedups are over this configuration; click to unpin", onclick: () => pin(null) },
  `\u2605 baseline ${clip(kept.baseline.title, 50)} \u00d7`)] : []));
}

function turn(by) {
  filters.query.page = Math.max(0, filters.query.page + by);
  load();
}

function sortBy(key) {
  const { query } = filters;
  query.descending = query.sort === key ? !query.descending : true;
  query.sort = key;
  query.page = 0;
  load();
}

// A configuration that speedups are over, from now on and after a reload; null: plain decoding.
function pin(run) {
  kept.baseline = run && { setup_id: run.setup_id,
    title: [run.method_title, run.settings].filter(Boolean).join(" \u00b7 ") };
  memory.write("baseline", kept.baseline);
  load();
  if (comparison.ids) comparison.show([...comparison.ids]);
}

function compare(ids) {
  comparison.show(ids);
  rememberLink();
  if (ids) comparison.host.scrollIntoView({ block: "nearest" });
}

function openRun(id) {
  said = null;
  table.markOpened(id);
  details.show(id);
  rememberLink();
  trigger("open", { id });
}

// ---- the link

function linkTo(id = table.opened) {
  const here = new URL(location.href);
  const url = new URL(here.pathname, here.origin);
  const query = filters.link;
  if (comparison.ids) query.compare = comparison.ids;
  if (kept.baseline) query.baseline = kept.baseline;
  if (id) url.searchParams.set("run", id);
  if (Object.keys(query).length) url.searchParams.set("runs", JSON.stringify(query));
  return url.href;
}

function rememberLink() {
  if (!element.offsetParent) return;
  const url = new URL(linkTo());
  const theme = new URL(location.href).searchParams.get("__theme");
  if (theme) url.searchParams.set("__theme", theme);
  history.replaceState(history.state, "", url);
}

async function copyLink() {
  await navigator.clipboard?.writeText(linkTo());
  actions.say("Link copied.");
}

// A run and a query from a link, or from another page.
function take() {
  const { opened = null, query = null, fault: sentence = null } = props.value ?? {};
  details.over();
  said = sentence;
  if (query && typeof query === "object") {
    const { compare: ids, baseline: pinned, ...rest } = query;
    if (pinned?.setup_id) {
      kept.baseline = { setup_id: String(pinned.setup_id), title: String(pinned.title ?? "") };
    }
    filters.restore(rest);
    if (Array.isArray(ids)) comparison.show(ids);
  }
  if (opened && opened !== table.opened) {
    table.markOpened(opened);
    details.show(opened);
  }
}

// Fresh whenever the table comes into view: a tab switch, the first time included.
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting)) load(true);
}).observe(element);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && details.running && element.offsetParent) calls.stop();
});
watch("value", () => { take(); load(true); });
take();
table.showRuns([], picker.columns, filters.query);
