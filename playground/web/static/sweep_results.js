// A sweep as it stands: progress, the picked trial, plots, the table of trials. Needs dom.js and
// sweep_plots.js.
const LIVE_MS = 1000, IDLE_MS = 5000;
const STATUS_WORDS = { running: "running", completed: "done", stopped: "stopped",
  failed: "failed", interrupted: "interrupted: its process died" };

const OUTCOME_WORDS = { killed: "broken off", stopped: "broken off" };

function left(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `about ${Math.max(1, Math.round(seconds))} s left`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `about ${minutes} min left`
    : `about ${Math.floor(minutes / 60)} h ${minutes % 60} min left`;
}

function headWords({ name, status }) {
  return `${name} \u00b7 ${STATUS_WORDS[status].split(":")[0]}`;
}

function pointWords(fields, point) {
  return fields.map((field) => `${field} ${written(point[field] ?? null)}`).join(", ");
}

// [key, title, text of a row's figures, digits]
function columnsOf(state) {
  const f = (name, digits) => (row) => number(row.figures?.[name] ?? null, digits);
  const all = [
    ["value", state.objective.title, f("value", 2)],
    ["speedup", "speedup", f("speedup", 2)],
    ["tok_s", "tok/s measured", f("tok_s", 1)],
    ["plain_tok_s", "plain tok/s", f("plain_tok_s", 1)],
    ["mat", "MAT", f("mat", 2)],
    ["same", "same text", (row) => (row.figures
      ? `${row.figures.num_same}/${row.figures.num_prompts}` : DASH)],
  ];
  return all.filter(([key]) => key !== state.objective.key || key === "tok_s");
}

class SweepResults {
  // onUse(name, number) takes a trial along.
  constructor(onUse) {
    this.onUse = onUse;
    this.picked = null;
    this.notice = "";
    this.byValue = false;
    this.chooser = chooser("sweep", () => this.open(this.chooser.value));
    this.stopper = this.button("Stop", () => this.act("stop"));
    this.goer = this.button("Resume", () => this.goOn());
    this.forgetter = this.button("Forget", () => this.forget());
    this.words = h("span", { class: "words", role: "status" });
    this.bar = h("i");
    this.progress = h("span", { class: "progress", role: "progressbar", "aria-valuemin": 0,
      "aria-valuemax": 100, "aria-label": "trials" }, this.bar);
    this.about = h("p", { class: "note about" });
    this.fault = h("div", { class: "alert", role: "alert", hidden: true });
    this.best = h("div", { class: "card best" });
    this.plots = new SweepPlots();
    this.table = h("div", { class: "frame", tabindex: "0", "aria-label": "trials" });
    this.empty = h("p", { class: "empty" }, "No sweeps yet. Tick what varies and start one.");
    this.body = h("div", { class: "found", hidden: true }, this.about, this.best, this.plots.host,
      this.table);
    this.host = h("section", { class: "results", "aria-label": "What it found" },
      h("div", { class: "bar" }, this.chooser, this.stopper, this.goer, this.forgetter),
      h("div", { class: "bar state" }, this.progress, this.words), this.fault, this.empty,
      this.body);
  }

  button(title, onclick) {
    return h("button", { type: "button", class: "tool", onclick, hidden: true }, title);
  }

  // All sweeps into the menu; opens `name`, else what runs, else the newest. `linked`: the name
  // comes from a link, and it is to be said that there is none.
  async list(name = this.name, linked = false) {
    const found = await server.list_all({});
    if (!found || found.error) return this.complain(found?.error);
    const { sweeps } = found;
    this.chooser.hidden = !sweeps.length;
    this.empty.hidden = sweeps.length > 0;
    fillChooser(this.chooser, sweeps.map((head) => [headWords(head), head.name]));
    const running = sweeps.find((head) => head.status === "running");
    const known = sweeps.find((head) => head.name === name);
    const opened = known ?? running ?? sweeps[0];
    if (opened) this.open(opened.name);
    else this.close();
    if (linked && !known) this.complain(`No sweep is named ${name}. It may have been forgotten.`);
  }

  close() {
    this.name = null;
    this.body.hidden = true;
    this.words.textContent = "";
    for (const one of [this.stopper, this.goer, this.forgetter, this.progress]) one.hidden = true;
  }

  open(name) {
    if (this.name !== name) { this.picked = null; this.state = null; }
    this.notice = "";
    this.name = name;
    this.chooser.value = name;
    this.link();
    this.poll();
  }

  // The address opens this sweep again.
  link() {
    if (element.offsetParent === null) return;
    const url = new URL(location.href), theme = url.searchParams.get("__theme");
    url.search = "";
    url.searchParams.set("sweep", this.name);
    if (theme) url.searchParams.set("__theme", theme);
    history.replaceState(null, "", url);
  }

  async poll() {
    clearTimeout(this.timer);
    const { name } = this;
    if (!name) return;
    if (element.offsetParent !== null && !document.hidden) {
      const have = this.state?.version ?? null;
      const state = await server.look({ name, have });
      if (name !== this.name) return;
      if (!state || state.error) this.alert(state?.error);
      else if (state.trials || this.state) {
        this.show({ ...state, trials: state.trials ?? this.state.trials });
      }
    }
    clearTimeout(this.timer);
    const live = this.state?.status === "running";
    this.timer = setTimeout(() => this.poll(), live ? LIVE_MS : IDLE_MS);
  }

  // Says why something that was asked for was not done, until the next thing is asked for.
  complain(sentence) {
    this.notice = sentence ?? "The server did not answer. Is it still running?";
    this.alert(this.notice);
  }

  alert(sentence) {
    this.fault.hidden = sentence === "";
    this.fault.textContent = sentence ?? "The server did not answer. Is it still running?";
  }

  show(state) {
    const ended = this.state?.status === "running" && state.status !== "running";
    this.state = state;
    this.alert(this.notice || state.fault);
    this.body.hidden = false;
    this.about.textContent = state.about;
    const option = this.chooser.querySelector(`[value="${CSS.escape(state.name)}"]`);
    if (option) option.textContent = headWords(state);
    this.showProgress(state);
    this.showPicked(state);
    this.showTable(state);
    const measured = state.trials.filter((row) => row.outcome === "measured").length;
    this.plots.host.hidden = !measured;
    if (measured) this.plots.show(state.name, measured);
    if (ended) this.list();
  }

  showProgress(state) {
    const live = state.status === "running", progress = state.progress;
    const done = progress?.num_done ?? state.num_done;
    const inside = progress?.of_pairs ? progress.num_pairs / progress.of_pairs : 0;
    const share = Math.min(1, (done + inside) / Math.max(1, state.num_trials));
    this.progress.hidden = false;
    this.bar.style.width = `${100 * share}%`;
    this.progress.setAttribute("aria-valuenow", Math.round(100 * share));
    const words = [`${done} of ${plural(state.num_trials, "trial")}`];
    if (!live) words.push(STATUS_WORDS[state.status]);
    else if (state.stopping) words.push("stopping \u2026");
    else if (!progress) words.push(state.here ? "starting" : "running in another process");
    else {
      words.push(left(progress.eta_s));
      if (progress.point) words.push(pointWords(state.fields, progress.point));
      words.push(progress.num_pairs ? `${progress.num_pairs} of ${progress.of_pairs} answered`
        : progress.words);
    }
    this.words.textContent = words.filter(Boolean).join(" \u00b7 ");
    this.words.title = this.words.textContent;
    this.stopper.hidden = !live || !state.here;
    this.stopper.disabled = state.stopping;
    this.forgetter.hidden = live;
    const more = state.status === "completed";
    this.goer.hidden = live || (more && !state.more_to_try);
    this.goer.textContent = more ? "10 more trials" : "Resume";
  }

  // The picked trial with its figures; the best one unless another was picked.
  showPicked(state) {
    const number_ = this.picked ?? state.best;
    const row = state.trials.find((one) => one.number === number_);
    const shape = JSON.stringify([row, state.verdict, state.best]);
    if (shape === this.shownPick) return;
    this.shownPick = shape;
    this.best.hidden = !row;
    if (!row) return;
    const best = row.number === state.best;
    const figures = columnsOf(state).map(([key, title, text]) =>
      h("div", { class: "figure", tabindex: "0" },
        h("span", { class: "value", "data-figure": key }, text(row)),
        h("span", { class: "label" }, title),
        h("span", { class: "formula", role: "tooltip" }, key === "value" ? state.objective.formula
          : state.formulas[key])));
    const usable = row.outcome === "measured" || row.outcome === "pruned";
    this.best.replaceChildren(
      h("div", { class: "head" },
        h("h4", {}, best ? `Best: trial ${row.number}` : `Trial ${row.number}`),
        best ? null : h("button", { type: "button", class: "quiet",
          onclick: () => this.pick(null) }, "back to the best"),
        h("span", { class: "spring" }),
        h("button", { type: "button", class: "primary", "data-use": "generate", disabled: !usable,
          onclick: () => this.onUse(state.name, row.number) }, "Use in Generate"),
        h("button", { type: "button", class: "tool", disabled: !usable,
          onclick: () => this.save(state.name, row.number) }, "Export YAML")),
      h("p", { class: "point" }, ...state.fields.map((field) => h("span", {},
        h("i", {}, field), ` ${written(row.point[field] ?? null)}`))),
      h("div", { class: "figures" }, ...figures),
      h("p", { class: "note verdict" }, best ? state.verdict : this.remark(state, row)));
  }

  pick(number_) {
    this.picked = number_;
    this.showPicked(this.state);
    this.shownTable = null;
    this.showTable(this.state);
  }

  showTable(state) {
    const columns = columnsOf(state).filter(([key]) => !["tok_s", "plain_tok_s"].includes(key));
    const shape = JSON.stringify([state.trials, state.best, this.picked, this.byValue]);
    if (shape === this.shownTable) return;
    this.shownTable = shape;
    const order = (title, on) => h("button", { type: "button",
      onclick: () => { this.byValue = on; this.showTable(this.state); } },
    title + (this.byValue === on ? (on ? " \u2193" : " \u2191") : ""));
    const head = h("tr", {}, h("th", { class: "num" }, order("trial", false)), h("th", {}, ""),
      ...state.fields.map((field) => h("th", {}, field)),
      ...columns.map(([key, title]) => h("th", { class: "num", title: key === "value"
        ? state.objective.formula : state.formulas[key] }, key === "value" ? order(title, true)
        : title)),
      h("th", { class: "num", title: state.formulas.seconds }, "time"));
    const value = (row) => (row.outcome === "measured" ? row.figures.value : -Infinity);
    const rows = this.byValue ? [...state.trials].sort((a, b) => value(b) - value(a) || 0)
      : state.trials;
    const focused = document.activeElement?.closest?.("tr[data-number]")?.dataset.number;
    this.table.replaceChildren(h("table", {}, h("thead", {}, head),
      h("tbody", {}, ...rows.map((row) => this.tableRow(state, columns, row)))));
    if (focused) this.table.querySelector(`tr[data-number="${focused}"] button`)?.focus();
  }

  tableRow(state, columns, row) {
    const open = () => this.pick(row.number === state.best ? null : row.number);
    const line = h("tr", { "data-outcome": row.outcome, "data-number": row.number },
      h("td", { class: "num" }, h("button", { type: "button", onclick: open }, String(row.number))),
      h("td", { class: "end", title: row.reason || (state.as_good.includes(row.number)
        ? state.formulas.as_good : null) }, this.standing(state, row)),
      ...state.fields.map((field) => h("td", {}, written(row.point[field] ?? null))),
      ...columns.map(([, , text]) => h("td", { class: "num" }, text(row))),
      h("td", { class: "num" }, row.seconds === null ? DASH : duration(1000 * row.seconds)));
    line.classList.toggle("best", row.number === state.best);
    line.classList.toggle("picked", row.number === (this.picked ?? state.best));
    line.addEventListener("click", (event) => { if (!event.target.closest("button")) open(); });
    return line;
  }

  // What is to be said of a trial that is not the best.
  remark(state, row) {
    if (row.reason) return `${OUTCOME_WORDS[row.outcome] ?? row.outcome}: ${row.reason}`;
    if (state.as_good.includes(row.number)) return `As good as the best: ${state.formulas.as_good}.`;
    return row.outcome === "measured" ? "" : OUTCOME_WORDS[row.outcome] ?? row.outcome;
  }

  standing(state, row) {
    if (row.outcome !== "measured") return OUTCOME_WORDS[row.outcome] ?? row.outcome;
    if (row.number === state.best) return "best";
    return state.as_good.includes(row.number) ? "\u2248 best" : "";
  }

  async act(what, more = {}) {
    const answer = await server[what]({ name: this.name, ...more });
    if (!answer || answer.error) this.complain(answer?.error);
    else await this.list();
  }

  goOn() {
    const more = this.state.status === "completed";
    this.act("resume", more ? { trials: this.state.num_trials + 10 } : {});
  }

  forget() {
    if (confirm(`Forget the sweep ${this.name}? Its runs stay in the log.`)) this.act("forget");
  }

  async save(name, number_) {
    const file = await server.export({ name, number: number_ });
    if (!file || file.error) { this.complain(file?.error); return; }
    const url = URL.createObjectURL(new Blob([file.text], { type: "application/yaml" }));
    h("a", { href: url, download: file.file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
}
