// The Deploy page: what to hand over on the left, how each engine takes it on the right. Needs
// deploy_parts.js and deploy_import.js.
const page = element.querySelector(".deploy");
const state = { kind: "run", engine: "trtllm", version: "" };
let menus = null, asking = 0;

const fault = h("p", { class: "alert", role: "alert", hidden: true });
const run = chooser("run", () => look());
const target = chooser("target", async () => { await fillMethods(); look(); });
const method = chooser("method", () => look());
const version = chooser("engine version", () => { state.version = version.value; look(); });
const kinds = ["run", "method"].map((kind) => h("button", { type: "button", role: "tab",
  "data-kind": kind, onclick: () => { pickKind(kind); look(); } },
kind === "run" ? "A run" : "A method"));
const runPart = h("div", { class: "part" }, labelled("run of the log", run));
const methodPart = h("div", { class: "part" }, labelled("target", target), labelled("method", method));
const summary = h("div", { class: "summary" });
const engines = h("div", { class: "engines", role: "radiogroup", "aria-label": "engine" });
const result = h("div", { class: "export", "aria-live": "polite" });
const matrix = h("details", { class: "card all" },
  h("summary", {}, "Every method in every engine"), h("p", { class: "note" },
    `${MARKS.exact} as it is \u00b7 ${MARKS["with losses"]} with losses \u00b7 `
    + `${MARKS["not taken"]} not taken; newest releases, default settings.`));
const reader = new ConfigReader((asked) => trigger("use", asked));

page.append(
  h("div", { class: "setup" },
    h("section", { class: "card" }, h("h4", {}, "Hand over"),
      h("div", { class: "tabs", role: "tablist" }, ...kinds), runPart, methodPart, summary),
    reader.host),
  h("div", { class: "result" }, fault, engines, result, matrix));

function pickKind(kind) {
  state.kind = kind;
  for (const tab of kinds) tab.setAttribute("aria-selected", String(tab.dataset.kind === kind));
  runPart.hidden = kind !== "run";
  methodPart.hidden = kind !== "method";
}

function complain(sentence) {
  fault.hidden = !sentence;
  fault.textContent = sentence ?? "";
}

function runTitle(row) {
  const when = new Date(row.created_at).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
  const figures = row.tok_s === null ? "" : ` \u00b7 ${number(row.tok_s, 1)} tok/s`;
  return `${row.method}${figures} \u00b7 ${row.target} \u00b7 ${when}`;
}

function fillRuns(rows, picked = run.value) {
  const pairs = rows.map((row) => [runTitle(row), row.id]);
  if (picked && !rows.some((row) => row.id === picked)) pairs.unshift([`run ${picked}`, picked]);
  fillChooser(run, pairs.length ? pairs : [["No runs yet", ""]], picked);
}

// A run that is older than those on the list is known by its id alone until it is looked at.
function nameRun(id, found) {
  if (menus.runs.some((row) => row.id === id)) return;
  const figures = found.tok_s === null ? "" : ` \u00b7 ${number(found.tok_s, 1)} tok/s`;
  const option = [...run.options].find(({ value }) => value === id);
  if (option) option.textContent = `${found.title}${figures} \u00b7 ${found.target} \u00b7 ${id}`;
}

async function fillMethods(picked) {
  const answer = await server.methods({ target: target.value });
  if (!answer || answer.error) return complain(answer?.error ?? "The server did not answer.");
  fillChooser(method, answer.methods, picked ?? method.value);
}

// ---- what is shown

function figure(name, value, digits, unit) {
  if (value === null || value === undefined) return null;
  return h("span", { class: "figure", tabindex: "0", title: menus.formulas[name] },
    h("b", {}, number(value, digits)), ` ${unit}`);
}

function showSummary(found) {
  summary.replaceChildren(
    h("div", { class: "head" }, h("b", {}, found.title),
      h("span", { class: `badge ${found.lossless ? "lossless" : "lossy"}` },
        found.lossless ? "lossless" : "lossy")),
    ...[figure("mat", found.mat, 2, "MAT"), figure("tok_s", found.tok_s, 1, "tok/s")]
      .filter(Boolean),
    h("p", { class: "note" }, `on ${found.target}`), settingsLine(found.settings));
}

function showEngines(rows) {
  const focused = engines.contains(document.activeElement);
  engines.replaceChildren(...rows.map((row) => {
    const info = menus.engines.find(({ name }) => name === row.name);
    const picked = row.name === state.engine;
    const words = row.verdict === "exact" ? `Trees: ${info.trees}.` : row.words;
    return h("button", { type: "button", role: "radio", class: "engine", "data-engine": row.name,
      "aria-checked": String(picked), tabindex: picked ? "0" : "-1", title: words,
      onclick: () => pickEngine(row.name) },
    h("b", {}, info.title), verdictBadge(row.verdict),
    h("span", { class: "words" }, words));
  }));
  if (focused) engines.querySelector('[aria-checked="true"]')?.focus();
}

function showExport(found) {
  const info = menus.engines.find(({ name }) => name === found.engine);
  fillChooser(version, info.versions.map(([name, words]) => [`${name} \u2013 ${words}`, name]),
    found.version);
  if (!info.versions.some(([name]) => name === found.version)) {
    version.prepend(h("option", { value: found.version }, found.version));
    version.value = found.version;
  }
  const link = h("button", { type: "button", class: "quiet", title: "copy a link to this page",
    onclick: () => copyText(linkTo(), link) }, "copy link");
  const command = h("button", { type: "button", class: "quiet", title: "the same on the command line",
    onclick: () => copyText(commandFor(), command) }, "copy command");
  result.replaceChildren(...[
    h("div", { class: "head" }, h("h4", {}, info.title), labelled("release", version),
      verdictBadge(found.verdict), h("span", { class: "spring" }), command, link),
    found.refusal && h("div", { class: "told refusal" }, h("p", {}, found.refusal),
      found.nearest && h("p", {}, h("b", {}, "Nearest: "), found.nearest)),
    sentences("warning", "Lost on the way", found.warnings),
    ...found.files.map(fileCard),
    sentences("note", "Notes", found.notes)].filter(Boolean));
}

// ---- asking

function asked() {
  const of = state.kind === "run" ? { run: run.value }
    : { method: method.value, target: target.value };
  return { ...of, engine: state.engine, version: state.version };
}

function pickEngine(name) {
  if (name !== state.engine) state.version = "";
  state.engine = name;
  look();
}

async function look() {
  if (!menus) return;
  const question = asked();
  if (state.kind === "run" && !question.run) {
    complain(null);
    summary.replaceChildren();
    engines.replaceChildren();
    result.replaceChildren(h("p", { class: "empty" },
      "No runs yet. Generate something, or pick a method."));
    return;
  }
  const ticket = ++asking;
  const found = await server.look(question);
  if (ticket !== asking) return;
  if (!found || found.error) {
    state.version = "";
    summary.replaceChildren();
    engines.replaceChildren();
    result.replaceChildren();
    return complain(found?.error ?? "The server did not answer.");
  }
  complain(null);
  showSummary(found);
  if (question.run) nameRun(question.run, found);
  showEngines(found.engines);
  showExport(found.export);
  if (shown) writeLink();
}

function linkTo() {
  const url = new URL(location.href), theme = url.searchParams.get("__theme");
  url.search = "";
  if (theme) url.searchParams.set("__theme", theme);
  url.searchParams.set("deploy", state.engine);
  if (state.kind === "run") {
    url.searchParams.set("of", `run:${run.value}`);
  } else {
    url.searchParams.set("of", `method:${method.value}`);
    url.searchParams.set("target", target.value);
  }
  if (state.version) url.searchParams.set("version", state.version);
  return url.href;
}

function writeLink() { history.replaceState(null, "", linkTo()); }

function commandFor() {
  const quote = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const of = state.kind === "run" ? ["--run", run.value]
    : ["--method", method.value.replace(/^type:/, ""), "--target", target.value];
  const release = state.version ? ["--engine-version", state.version] : [];
  return ["python", "app.py", "export", ...of, "--to", state.engine, ...release].map(quote).join(" ");
}

async function open(link) {
  const answer = await server.menus({});
  if (!answer || answer.error) return complain(answer?.error ?? "The server did not answer.");
  menus = answer;
  fillChooser(target, menus.targets, link?.target || target.value);
  const [kind, rest] = /^(run|method):(.+)$/s.exec(link?.of ?? "")?.slice(1) ?? [];
  fillRuns(menus.runs, kind === "run" ? rest : run.value);
  await fillMethods(kind === "method" ? rest : undefined);
  if (menus.engines.some(({ name }) => name === link?.deploy)) state.engine = link.deploy;
  state.version = link?.version || "";
  pickKind(kind ?? (menus.runs.length ? "run" : "method"));
  reader.fill(menus.engines);
  await look();
}

async function refresh() {
  const answer = await server.menus({});
  if (!answer || answer.error) return;
  menus = answer;
  const before = run.value;
  fillRuns(menus.runs);
  if (state.kind === "run" && run.value !== before) look();
}

engines.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step || !menus) return;
  event.preventDefault();
  const names = menus.engines.map(({ name }) => name);
  pickEngine(names[(names.indexOf(state.engine) + step + names.length) % names.length]);
});
matrix.addEventListener("toggle", async () => {
  if (!matrix.open || matrix.querySelector("table")) return;
  const found = await server.matrix({});
  matrix.append(found && !found.error ? matrixTable(found)
    : h("p", { class: "alert" }, found?.error ?? "The server did not answer."));
});

let shown = false, linked = props.value?.link ?? null;
pickKind("run");
// The runs are fresh whenever the page comes into view.
new IntersectionObserver((entries) => {
  const now = entries.at(-1).isIntersecting;
  if (now && !shown) (menus ? refresh() : open(linked));
  shown = now;
}).observe(element);
watch("value", () => {
  if (!props.value?.link) return;
  linked = props.value.link;
  if (menus) open(linked);
});
