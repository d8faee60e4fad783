// The Compare page's board: where the comparison is, the race, the panels, what came of it.
// Needs dom.js, figures.js, panel.js, race.js and compare_table.js.
const head = element.querySelector(".compare-head");
const stateWords = h("span", { class: "compare-words", role: "status" });
const stateBar = h("span", { class: "progress", hidden: true }, h("i"));
const stateAlert = h("div", { class: "alert", role: "alert", hidden: true });
const setup = h("span", { class: "compare-setup" });
const link = h("a", { class: "quiet", hidden: true }, "permalink");
const showSteps = h("input", { type: "checkbox",
  onchange: (event) => { element.dataset.steps = String(event.target.checked); } });
head.append(
  h("div", { class: "compare-state" }, stateWords, stateBar, h("span", { class: "spring" }), setup,
    h("label", { class: "toggle" }, showSteps, " steps and trees"), link),
  stateAlert);
const race = new Race(element.querySelector(".compare-race"));
const results = new CompareTable(element.querySelector(".compare-results"), formulas,
  (run) => trigger("deploy", { id: run }));
const LOAD_MS = 40;
const BLANK = { id: null, words: "", state: "", final: false, progress: null, error: null };
let state = BLANK, comparison = null, reportText = "", raced = null, wasRunning = false;

function readTexts() {
  const message = props.value;
  if (!message || !message.compare) return;
  state = JSON.parse(message.compare);
  if (message.report !== reportText) {
    reportText = message.report;
    comparison = reportText ? JSON.parse(reportText) : null;
    results.show(comparison);
  }
  showState();
  for (const panel of panels) addClock(panel);
  if (!state.final) {
    wasRunning = true;
    raced = null;
    race.follow(panels.map((panel) => panel.track).filter(Boolean));
    return;
  }
  if (raced === message.stream) return;
  raced = message.stream;
  element.dataset.final = "false";
  linkTo(state.id);
  drawPickers();
  startWhenWhole(wasRunning && state.state === "completed");
  wasRunning = false;
}

function showState() {
  stateWords.textContent = state.words;
  stateWords.dataset.state = state.state;
  const busy = !state.final && state.state !== "failed";
  stateBar.hidden = !busy;
  stateBar.classList.toggle("unknown", state.progress == null);
  stateBar.firstChild.style.width = state.progress == null ? "" : `${100 * state.progress}%`;
  stateAlert.hidden = !state.error;
  stateAlert.textContent = state.error ?? "";
  const repeats = state.final ? ` \u00b7 ${plural(comparison?.num_repeats ?? 0, "repeat")}` : "";
  setup.textContent = comparison ? comparison.setup + repeats : "";
}

function addClock(panel) {
  if (panel.clock) return;
  panel.clock = h("span", { class: "panel-clock" });
  panel.root.querySelector("header").append(panel.clock);
}

// The address of the page becomes the comparison's, so that a reload or a copy opens it again.
function linkTo(id) {
  link.hidden = !comparison;
  if (!comparison) return;
  const url = new URL(location.href), theme = url.searchParams.get("__theme");
  url.search = "";
  url.searchParams.set("compare", id);
  link.href = url.href;
  if (theme) url.searchParams.set("__theme", theme);
  history.replaceState(null, "", url);
}

// Races as soon as every panel has its whole text.
function startWhenWhole(autoplay) {
  const asked = stream;
  const look = async () => {
    if (asked !== stream) return;
    const tracks = [...byRun.values()].map((panel) => panel.track);
    if (!tracks.every((track) => track?.end)) { setTimeout(look, LOAD_MS); return; }
    const runs = [...byRun.keys()];
    const answer = runs.length ? await server.clocks({ runs }) : { clocks: [] };
    if (asked !== stream) return;
    if (!answer || answer.error) {
      stateAlert.hidden = false;
      stateAlert.textContent = answer?.error ?? "The server did not answer.";
      return;
    }
    race.load(answer.clocks.map((clock) => new Racer(clock, byRun.get(clock.run))));
    element.dataset.final = "true";
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (autoplay && !still && race.racers.length > 1) { race.seek(0); race.play(); }
  };
  look();
}

// Which prompt and repeat is raced, where there are several.
function drawPickers() {
  race.pickers.replaceChildren();
  if (!comparison) return;
  const shown = comparison.runs.find((row) => row[3] === [...byRun.keys()][0]) ?? [];
  const pick = (label, choices, value) => {
    const box = h("select", { "aria-label": label, onchange: () => raceOther() },
      ...choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
    if (choices.length > 1) race.pickers.append(box);
    return box;
  };
  const repeats = Array.from({ length: comparison.num_repeats }, (_, i) => [String(i),
    `repeat ${i + 1}`]);
  promptPicker = pick("prompt of the race", comparison.prompts.map(([name, text]) =>
    [name, clip(text, 48)]), shown[0]);
  repeatPicker = pick("repeat of the race", repeats, String(shown[1]));
}
let promptPicker = null, repeatPicker = null;

async function raceOther() {
  const names = comparison.configurations.map((row) => row.name);
  const runs = names.map((name) => comparison.runs.find((row) => row[0] === promptPicker.value
    && String(row[1]) === repeatPicker.value && row[2] === name)?.[3]).filter(Boolean);
  if (!runs.length) return;
  element.dataset.final = "false";
  const answer = await server.metas({ runs });
  if (!answer || answer.error) return;
  race.clear();
  begin({ stream: `local ${runs[0]}`, runs: answer.runs, resync: true });
  for (const panel of panels) addClock(panel);
  resync();
  startWhenWhole(false);
}

// Keys of this page; those of other pages press buttons that are not on show.
document.addEventListener("keydown", (event) => {
  if (!element.offsetParent) return;
  const press = (id) => {
    const holder = document.getElementById(id);
    (holder?.matches("button") ? holder : holder?.querySelector("button"))?.click();
  };
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    press("pg-cmp-run");
  } else if (event.key === "Escape" && !document.querySelector("ul[role=listbox]")) {
    press("pg-cmp-stop");
  }
}, true);

watch("value", readTexts);
readTexts();
