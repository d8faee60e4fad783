// A long action of the server: a button, its progress in words, and Stop. Needs dom.js.
const JOB_POLL_MS = 250;

class TreeJob {
  // ask() → promise of { job } or { error }; done(end) is told the finished job's last state.
  constructor(title, ask, done) {
    this.ask = ask;
    this.done = done;
    this.button = h("button", { type: "button", class: "tool", onclick: () => this.start() }, title);
    this.bar = h("i");
    this.words = h("span", { class: "job-words", role: "status" });
    this.stopper = h("button", { type: "button", class: "tool", hidden: true,
      onclick: () => this.stop() }, "Stop");
    this.progress = h("span", { class: "progress", hidden: true, role: "progressbar",
      "aria-valuemin": 0, "aria-valuemax": 100 }, this.bar);
    this.host = h("div", { class: "job" }, this.button, this.progress, this.stopper, this.words);
  }

  get running() { return this.button.hidden; }

  // Forgets how the last one ended.
  clear() {
    if (!this.running) this.words.textContent = "";
  }

  async start() {
    this.show({ words: "asking \u2026", progress: null }, true);
    const answer = await this.ask();
    if (!answer || answer.error) {
      this.show({ words: answer?.error ?? "The server did not answer. Try again." }, false);
      return;
    }
    this.id = answer.job;
    this.poll();
  }

  async poll() {
    const state = await server.job({ job: this.id });
    if (state?.over === undefined) {
      this.show({ words: state?.error ?? "The server did not answer. Try again." }, false);
      return;
    }
    this.show({ ...state, words: state.error ?? state.words }, !state.over);
    if (!state.over) setTimeout(() => this.poll(), JOB_POLL_MS);
    else if (state.end) this.done(state.end);
  }

  stop() {
    this.words.textContent = "stopping \u2026";
    server.stop({ job: this.id });
  }

  show({ words, progress = null }, running) {
    this.host.classList.toggle("running", running);
    this.button.hidden = running;
    this.stopper.hidden = this.progress.hidden = !running;
    this.progress.classList.toggle("unknown", progress === null);
    this.bar.style.width = progress === null ? "" : `${100 * progress}%`;
    if (progress === null) this.progress.removeAttribute("aria-valuenow");
    else this.progress.setAttribute("aria-valuenow", Math.round(100 * progress));
    this.words.textContent = words ?? "";
  }
}
