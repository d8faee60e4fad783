// The token panels: one to four runs side by side, fed by batches that may be lost or repeated.
// Needs dom.js, tree.js, text.js, figures.js, scrubber.js.
const host = element.querySelector(".panels");
const formulas = props.formulas ?? {};
const USELESS_DRAFTS = "Almost no draft is accepted: drafting only costs time here.";

class Panel {
  constructor(placeholder) {
    this.title = h("h3", {}, "");
    this.badge = h("span", { class: "badge", hidden: true });
    this.state = h("span", { class: "state" });
    this.progress = h("span", { class: "progress", hidden: true }, h("i"));
    this.link = h("a", { class: "quiet", hidden: true }, "permalink");
    this.copy = h("button", { type: "button", class: "quiet", hidden: true,
      onclick: () => navigator.clipboard?.writeText(this.track?.text ?? "") }, "copy text");
    const showRejected = h("input", { type: "checkbox", onchange: (event) => {
      this.root.classList.toggle("show-rejected", event.target.checked);
    } });
    this.hint = h("span", { class: "hint", hidden: true }, USELESS_DRAFTS);
    this.alert = h("div", { class: "alert", role: "alert", hidden: true });
    const figures = h("div", { class: "figures" });
    this.figures = new Figures(figures, formulas);
    const text = h("div", { class: "text", role: "log", tabindex: "0", "aria-label": "text" },
      h("div", { class: "placeholder" }, placeholder));
    const textFrame = h("div", { class: "text-frame" }, text);
    const scrub = h("div", { class: "scrubber" });
    const tree = h("div", { class: "tree" });
    this.root = h("section", { class: "panel" },
      h("header", {}, this.title, this.badge, this.state, this.progress, this.hint,
        h("span", { class: "spring" }), this.copy, this.link),
      figures, this.alert, textFrame,
      h("div", { class: "legend" }, swatch("prefill bonus", "target"),
        swatch("recovered", "target after a rejection"), ...shades(),
        h("label", { class: "toggle" }, showRejected, " show rejected drafts")),
      scrub, treeLegend(), tree);
    this.text = new TokenText(text, (track, n) => this.scrubber.pick(track, n));
    this.scrubber = new Scrubber(scrub, tree, {
      fetchStep: (run, index) => server.step({ run, index }),
      onStep: (track, n, reveal) => this.text.mark(track, n, reveal),
    });
    text.addEventListener("keydown", (event) => this.key(event));
    this.track = null;
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.scrubber.go(this.scrubber.index + by);
  }

  open(meta) {
    if (!this.text.tracks.size) this.text.host.replaceChildren();
    this.track = this.text.open(meta);
    this.title.textContent = meta.title;
    this.title.title = meta.target ? `${meta.title} on ${meta.target}` : meta.title;
    this.badge.hidden = false;
    this.badge.textContent = meta.lossless ? "lossless" : "lossy";
    this.badge.className = `badge ${meta.lossless ? "lossless" : "lossy"}`;
    this.showFigures(null);
    this.scrubber.attach(this.track);
    this.link.hidden = this.copy.hidden = true;
  }

  status(status) {
    this.state.textContent = status.words;
    this.state.dataset.state = status.state;
    const bar = this.progress.firstChild;
    this.progress.hidden = !["loading", "queued", "prefill"].includes(status.state);
    this.progress.classList.toggle("unknown", status.progress == null);
    bar.style.width = status.progress == null ? "" : `${100 * status.progress}%`;
    this.fault(status.error, status.warning);
    this.root.dataset.state = status.state;
    if (status.log_id != null) {
      const url = new URL(location.href);
      url.search = "";
      url.searchParams.set("run", status.log_id);
      this.link.href = url.href;
      this.link.hidden = false;
    }
  }

  showFigures(metrics) {
    this.figures.show(metrics);
    this.hint.hidden = !(metrics && metrics.num_steps >= 16
      && metrics.num_drafted >= metrics.num_steps && metrics.mat < 1.05);
  }

  fault(sentence, warning = null) {
    this.alert.hidden = !(sentence || warning);
    this.alert.classList.toggle("warning", !sentence && Boolean(warning));
    this.alert.textContent = sentence ?? warning ?? "";
  }

  take(event) {
    if (event[1] !== this.track.events.length) return event[1] < this.track.events.length;
    this.text.append(this.track, event);
    return true;
  }

  finish(end) {
    if (this.track.end) return;
    this.text.finish(this.track, end);
    this.scrubber.ended(this.track);
    this.copy.hidden = false;
  }
}

function swatch(name, text) {
  return h("span", { class: "swatch" }, h("i", { class: name }), ` ${text}`);
}

function shades() {
  const blocks = [1, 3, 5, 8].map((depth) => h("i", { class: `draft d${depth}` }));
  return [h("span", { class: "swatch" }, ...blocks, " accepted draft, deeper = darker")];
}

function treeLegend() {
  return h("div", { class: "legend" }, swatch("k-path", "accepted path"),
    swatch("k-off", "rejected"), swatch("k-draft", "draft probability"),
    swatch("k-target", "target probability"), swatch("k-bonus", "bonus or recovered token"));
}

// ---- messages: seq counts the batches of one stream, an event carries its own position

let stream = null, dropped = null, seq = -1, syncing = false;
let panels = [], byRun = new Map(), ends = new Map();

function setPanels(count) {
  while (panels.length > count) panels.pop().root.remove();
  while (panels.length < count) {
    const panel = new Panel(props.placeholder ?? "");
    panels.push(panel);
    host.append(panel.root);
  }
  host.dataset.count = String(count);
}

function begin(message) {
  stream = message.stream;
  seq = -1;
  ends = new Map();
  const runs = message.runs ?? [];
  setPanels(Math.max(1, runs.length));
  byRun = new Map();
  runs.forEach((meta, i) => {
    panels[i].open(meta);
    byRun.set(meta.id, panels[i]);
  });
  if (runs.length && !message.resync) trigger("begun", { mode: runs[0].mode });
}

function receive() {
  const message = props.value;
  if (!message || typeof message !== "object" || !message.stream) return reset();
  if (message.stream === dropped) return;
  const fresh = message.stream !== stream;
  if (fresh) begin(message);
  else if (message.seq <= seq) return;
  const gap = message.seq > seq + 1 || message.resync;
  seq = message.seq;
  for (const [run, status] of Object.entries(message.status ?? {})) {
    (byRun.get(run) ?? panels[0]).status(status);
  }
  take(message, gap);
}

function take(batch, gap) {
  let complete = !gap;
  const grown = new Set();
  for (const event of JSON.parse(batch.ev || "[]")) {
    const panel = byRun.get(event[0]);
    if (!panel) continue;
    complete = panel.take(event) && complete;
    grown.add(panel);
  }
  for (const panel of grown) panel.scrubber.grown(panel.track);
  for (const [run, metrics] of Object.entries(batch.figures ?? {})) {
    byRun.get(run)?.showFigures(metrics);
  }
  for (const [run, end] of Object.entries(batch.ends ?? {})) ends.set(run, end);
  if (settle() && complete) return;
  resync();
}

// Ends every run whose events have all arrived; false when some are missing.
function settle() {
  let whole = true;
  for (const [run, end] of ends) {
    const panel = byRun.get(run);
    if (!panel) continue;
    if (panel.track.events.length < end.n) { whole = false; continue; }
    panel.finish(end);
  }
  element.dataset.done = String(ends.size > 0 && ends.size >= byRun.size && whole);
  return whole;
}

async function resync() {
  if (syncing) return;
  syncing = true;
  const asked = stream;
  for (const [run, panel] of byRun) {
    for (let more = true; more && asked === stream;) {
      const before = panel.track.events.length;
      const batch = await server.since({ run, have: before });
      if (asked !== stream) break;
      if (!batch || batch.error) { panel.fault(batch?.error ?? "The server did not answer."); break; }
      for (const event of batch.ev) panel.take(event);
      panel.scrubber.grown(panel.track);
      panel.showFigures(batch.figures);
      if (batch.status) panel.status(batch.status);
      if (batch.end) ends.set(run, batch.end);
      more = batch.more && panel.track.events.length > before;
    }
  }
  syncing = false;
  if (asked === stream) settle();
  else resync();
}

// Empties the panel; what a stream that was on show still sends is ignored.
function reset() {
  dropped = stream;
  stream = null;
  byRun = new Map();
  ends = new Map();
  panels.forEach((panel) => panel.root.remove());
  panels = [];
  setPanels(1);
  element.dataset.done = "false";
}

watch("value", receive);
receive();
