// Dynamic trees (EAGLE-2/3): which trees were drafted, and what other sizes would have drafted.
// Needs dom.js, tree_model.js, tree_chart.js, tree_job.js, tree_card.js.
//
// drafted: { words, settings, mat, rates, steps, tokens, nodes, levels, counts: { nodes, depths,
// widths: [[value, steps], …] }, paths: [[path, drafted, accepted], …], redrafted }
const DYNAMIC_SETTINGS = [
  ["max_total_draft_tokens", "nodes kept", 1, 256],
  ["dynamic_tree_max_topK", "top K", 1, 32],
  ["max_draft_len", "levels", 1, 16],
];
const MOST_TRIES = 8;

function predictDrafted(speed, { mat, levels, counts, steps }) {
  return predict(speed, mat, levels, counts.nodes.map(([n, count]) => [n, count / steps]));
}

class DynamicCard {
  constructor(editor) {
    this.editor = editor;
    this.tries = [];
    this.boxes = new Map(DYNAMIC_SETTINGS.map(([name, title, min, max]) => {
      const { box, field } = numberField(name, title, name, { min, max, step: 1 }, () => {
        slide.value = box.value;
        this.later();
      });
      const slide = h("input", { type: "range", min, max, step: 1, tabindex: "-1",
        "aria-hidden": "true", oninput: () => { box.value = slide.value; this.later(); } });
      field.append(slide);
      return [name, { box, slide, field }];
    }));
    this.job = new TreeJob("Re-draft the texts", () => server.measure({ kind: "redraft",
      target: editor.pickers.target, method: editor.method?.key, source: editor.source?.id ?? null,
      settings: this.settings(), tab: TAB }), (end) => this.take(end.drafted));
    this.note = h("p", { class: "note" }, "Other settings are drafted again over the same texts: the "
      + "drafter runs, the target does not. It read the texts once and its features are kept.");
    this.list = h("div", {});
    this.chart = new TreeChart("", 130);
    this.host = card("dynamic", "Dynamic tree",
      h("div", { class: "row fields" }, ...[...this.boxes.values()].map(({ field }) => field)),
      this.job.host, this.note, this.list, this.chart.host);
  }

  get isOn() { return this.editor.method?.kind === "dynamic"; }

  settings() {
    if (!this.isOn) return null;
    return Object.fromEntries([...this.boxes].map(([name, { box }]) => [name, Number(box.value)]));
  }

  // Once the texts are read, every change is drafted at once.
  later() {
    clearTimeout(this.timer);
    if (this.tries.some((one) => one.redrafted)) {
      this.timer = setTimeout(() => this.job.start(), 400);
    }
  }

  changed() {
    this.host.hidden = !this.isOn;
    if (!this.isOn) return;
    const { method, source } = this.editor;
    const now = `${method.key}/${source?.id}`;
    if (now === this.of) { this.show(this.shown); return; }
    this.of = now;
    this.job.clear();
    for (const [name, { box, slide }] of this.boxes) box.value = slide.value = method.settings[name];
    this.tries = [];
    this.job.button.disabled = !source;
    this.show(null);
  }

  edited() {}

  // What was drafted, by the runs themselves or just now.
  take(drafted) {
    if (!drafted || !this.isOn) return;
    this.tries = [drafted, ...this.tries].slice(0, MOST_TRIES);
    this.show(drafted);
  }

  show(drafted) {
    this.shown = drafted;
    this.chart.host.hidden = !drafted;
    this.list.replaceChildren(...(this.tries.length ? [this.table()] : []));
    this.editor.showDrafted(drafted);
    if (!drafted) return;
    const { nodes, depths } = drafted.counts;
    const share = (rows) => rows.map(([, count]) => 100 * count / drafted.steps);
    this.chart.show([
      { name: "% of the trees by nodes", x: nodes.map(([n]) => n), y: share(nodes),
        colour: "--pg-target", mode: nodes.length > 1 ? "lines+markers" : "markers" },
      { name: "% of the trees by depth", x: depths.map(([n]) => n), y: share(depths),
        colour: "--pg-draft", mode: depths.length > 1 ? "lines+markers" : "markers" },
    ], { x: "drafted nodes (blue), depth (green)", y: "% of the steps" },
    `${drafted.words} The tree on the left: the paths drafted most, by how many steps drafted them.`);
  }

  table() {
    const row = (one) => h("tr", { class: one === this.shown ? "on" : "" },
      h("td", {}, h("button", { type: "button", class: "quiet", onclick: () => this.show(one) },
        DYNAMIC_SETTINGS.map(([name]) => one.settings[name]).join(" / ")
          + (one.redrafted ? "" : " recorded"))),
      h("td", {}, number(one.mat, 3)), h("td", {}, number(one.nodes, 1)),
      h("td", {}, number(predictDrafted(this.editor.speed, one).tok_s, 1)));
    return h("table", {}, h("thead", {}, h("tr", {}, ...["kept / K / levels", "MAT", "nodes",
      "tok/s"].map((title) => h("th", {}, title)))), h("tbody", {}, ...this.tries.map(row)));
  }
}
