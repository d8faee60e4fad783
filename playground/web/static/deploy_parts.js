// Parts of the Deploy page: menus, verdicts, files with their buttons, the table of all methods.
// Needs dom.js.
function labelled(title, control, hint = "") {
  return h("label", { class: "picker", title: hint || null }, h("span", {}, title), control);
}

function chooser(name, onchange) {
  return h("select", { class: "line", "aria-label": name, onchange });
}

// pairs: [[title, value]]; keeps what is picked if it is still there.
function fillChooser(select, pairs, value = select.value) {
  select.replaceChildren(...pairs.map(([title, key]) => h("option", { value: key }, title)));
  select.value = pairs.some(([, key]) => key === value) ? value : pairs[0]?.[1] ?? "";
}

const MARKS = { exact: "\u2713", "with losses": "~", "not taken": "\u2715" };
const VERDICTS = {
  exact: "taken as it is",
  "with losses": "taken, but something is lost: see the warnings",
  "not taken": "the engine cannot take this method",
};

function verdictBadge(verdict) {
  return h("span", { class: "verdict", "data-verdict": verdict, title: VERDICTS[verdict] },
    h("b", { "aria-hidden": "true" }, MARKS[verdict]), ` ${verdict}`);
}

function settingsLine(settings) {
  if (!settings.length) return h("p", { class: "settings" }, "All settings at their defaults.");
  return h("p", { class: "settings" }, ...settings.flatMap(([name, value]) =>
    [h("span", {}, h("i", {}, name), "\u00a0", value), " "]));
}

function sentences(kind, title, list) {
  if (!list.length) return null;
  return h("div", { class: `told ${kind}` }, h("h5", {}, title),
    h("ul", {}, ...list.map((text) => h("li", {}, text))));
}

async function copyText(text, button) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "select the text and press Ctrl+C";
  }
  setTimeout(() => { button.textContent = before; }, 1600);
}

function saveText(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })),
    download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function fileCard({ name, text }) {
  const copy = h("button", { type: "button", class: "quiet copy", "aria-label": `copy ${name}`,
    onclick: () => copyText(text, copy) }, "copy");
  return h("section", { class: "file", "data-file": name },
    h("header", {}, h("h5", {}, name), h("span", { class: "spring" }), copy,
      h("button", { type: "button", class: "quiet", "aria-label": `download ${name}`,
        onclick: () => saveText(name, text) }, "download")),
    h("pre", { tabindex: "0" }, h("code", {}, text)));
}

// Methods down, engines across; every cell has its sentence as tooltip and for screen readers.
function matrixTable({ engines, rows }) {
  const cell = (title, engine, found) => {
    const words = [found.words, found.nearest && `Nearest: ${found.nearest}`].filter(Boolean);
    const said = `${title} in ${engine}: ${found.verdict}. ${words.join(" ")}`;
    return h("td", { "data-verdict": found.verdict, title: said },
      h("span", { "aria-hidden": "true" }, MARKS[found.verdict]),
      h("span", { class: "unseen" }, said));
  };
  return h("div", { class: "frame" }, h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "method"),
      ...engines.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.title),
      ...row.cells.map((found, i) => cell(row.title, engines[i], found)))))));
}
