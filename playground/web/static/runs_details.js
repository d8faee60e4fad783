// The run that is open: its name, tags and note to write on, its settings to read, and what can be
// done with it. Needs dom.js, runs_columns.js, runs_actions.js.
class Details {
  // calls: ask(name, asked), changed(), again(id), generate(id), pin(setup), isBaseline(row),
  // link(), actions
  constructor(calls) {
    this.calls = calls;
    this.name = this.line("name", "name this run", (text) => ({ do: "rename", name: text }));
    this.tags = this.line("tags", "tags, with commas",
      (text) => ({ do: "tags", tags: readTags(text) }));
    this.note = h("textarea", { class: "line note", rows: 1, placeholder: "note", "aria-label": "note" });
    this.listen(this.note, (text) => ({ do: "note", note: text }));
    this.buttons = h("span", { class: "buttons" });
    this.said = h("span", { class: "said", role: "status" });
    this.fault = h("div", { class: "alert", hidden: true });
    this.settings = h("div", { class: "facts" });
    this.host = h("section", { class: "details", hidden: true, "aria-label": "the open run" },
      h("div", { class: "bar" }, this.name, this.tags, this.buttons, this.said),
      this.note, this.fault,
      h("details", { class: "all" }, h("summary", {}, "settings and machine"), this.settings));
  }

  line(key, placeholder, change) {
    const box = h("input", { type: "text", class: "line", placeholder, "aria-label": key });
    box.addEventListener("keydown", (event) => { if (event.key === "Enter") box.blur(); });
    this.listen(box, change);
    return box;
  }

  // Saved when the box is left, if it was changed.
  listen(box, change) {
    box.addEventListener("change", async () => {
      const run = this.run;
      const done = await this.calls.ask("edit", { id: run.id, ...change(box.value) });
      if (!done || this.run?.id !== run.id) return;
      this.say("saved");
      this.calls.changed();
    });
  }

  say(words) {
    this.said.textContent = words;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.said.textContent = ""; }, 2500);
  }

  async show(id) {
    this.wanted = id;
    const run = id ? await this.calls.ask("details", { id }) : null;
    if (this.wanted !== id) return;
    this.run = run;
    this.host.hidden = !run;
    if (!run) return;
    this.name.value = run.name;
    this.tags.value = run.tags.join(", ");
    this.note.value = run.note;
    this.fault.hidden = !run.error;
    this.fault.textContent = run.error ?? "";
    this.drawButtons();
    this.settings.replaceChildren(...run.facts.map(([title, rows]) => h("div", {},
      h("h4", {}, title), h("dl", {}, ...rows.flatMap(([name, words]) =>
        [h("dt", {}, name), h("dd", {}, words)])))));
  }

  again() {
    this.running = true;
    this.drawButtons();
    this.calls.again(this.run.id);
  }

  // The repeated run is over, or was refused.
  over() {
    this.running = false;
    this.drawButtons();
  }

  drawButtons() {
    const { run, calls } = this;
    if (!run) return;
    const button = (title, act, help) => h("button", { type: "button", title: help, onclick: act }, title);
    const pinned = calls.isBaseline(run);
    this.buttons.replaceChildren(
      this.running ? button("stop", () => calls.stop(), "stop the run that was begun here (Esc)")
        : button("run again", () => this.again(), "the same prompt and settings once more, shown below"),
      button("open in Generate", () => calls.generate(run.id), "its settings and prompt in the Generate page"),
      button(pinned ? "unpin baseline" : "pin as baseline", () => calls.pin(pinned ? null : run),
        "speedups are then over this configuration, on the same prompt"),
      button("copy link", async () => {
        await navigator.clipboard?.writeText(calls.link(run.id));
        this.say("copied");
      }),
      button("export", () => calls.actions.export("json", { ids: [run.id] }), "JSON with all steps"),
      run.deleted ? button("restore", () => calls.actions.restore([run.id]))
        : button("delete", () => calls.actions.delete([run.id])));
  }
}
