// One to four panels fed by one stream of messages; messages may be lost or repeated.
import { show } from "../address.js";
import { ask, onValue, part } from "../kit.js";
import { Panel } from "./panel.js";

const LIVE = ["queued", "loading", "prefill", "running"];
const SILENCE_MS = 1500;

/**
 * What is new of a run.
 * @typedef {{ events?: import("./text.js").Commit[], status?: any, figures?: any,
 *   end?: import("./text.js").End | null }} Batch
 *
 * A message of `playground.host`'s stream: `seq` numbers the messages, and commits carry their index in
 * their run, so gaps and repetitions are detected. `resync`: the commits must be fetched; `batches`: a
 * `Batch` by run, as JSON.
 * @typedef {{ stream: string, seq: number, resync?: boolean, batches: string,
 *   runs?: import("./text.js").RunFacts[] }} Message
 */

export class Panels {
  constructor(component, options) {
    this.component = component;
    this.options = options;
    this.host = part(component.element, ".panels");
    this.panels = [];
    this.byRun = new Map();
    this.ends = new Map();
    this.stream = null;
    /** @type {Set<string>} streams whose later messages are ignored */
    this.replacedStreams = new Set();
    this.seq = -1;
    this.syncing = false;
    /** @type {Map<string, string | null>} unfinished runs, with their ids in the log */
    this.live = new Map();
    this.lastMessageMs = 0;
    setInterval(() => this.checkSilence(), SILENCE_MS);
  }

  /** @param {Message | null} message the component's value */
  receive(message) {
    if (!message?.stream) { this.reset(); return; }
    if (this.replacedStreams.has(message.stream)) return;
    this.lastMessageMs = Date.now();
    const isNew = message.stream !== this.stream;
    if (isNew) this.begin(message);
    else if (message.seq <= this.seq) return;
    let complete = message.seq === this.seq + 1 && !(isNew && message.resync);
    this.seq = message.seq;
    for (const [run, batch] of Object.entries(JSON.parse(message.batches))) {
      complete = this.absorb(run, batch) && complete;
    }
    if (!this.settle() || !complete) this.resync();
  }

  // Tracks whether a run is finished, for `checkSilence`, and writes its id into the URL.
  trackStatus(run, status) {
    if (LIVE.includes(status.state)) this.live.set(run, status.log_id ?? null);
    else this.live.delete(run);
    const { tab } = this.options, id = status.log_id ?? run;
    if (tab && id && this.byRun.has(run)) show(tab, { run: id });
  }

  // Fetches what is missing if no message has come for a while: the stream may be broken.
  checkSilence() {
    if (this.live.size && Date.now() - this.lastMessageMs > SILENCE_MS) this.resync();
  }

  begin(message) {
    if (this.stream) this.replacedStreams.add(this.stream);
    this.stream = message.stream;
    this.seq = -1;
    const runs = message.runs ?? [];
    this.clear(Math.max(1, runs.length));
    runs.forEach((meta, i) => {
      this.panels[i].open(meta);
      this.byRun.set(meta.id, this.panels[i]);
      this.fetchHistory(this.panels[i].text);
    });
    if (!runs.length || message.resync) return;
    this.host.dataset.prompt = runs[0].prompt;
    this.component.trigger("begun");
  }

  clear(count) {
    this.live.clear();
    this.ends = new Map();
    this.byRun = new Map();
    while (this.panels.length > count) this.panels.pop()?.root.remove();
    while (this.panels.length < count) {
      const panel = new Panel(this.options, this.component);
      this.panels.push(panel);
      this.host.append(panel.root);
    }
    this.host.dataset.count = String(count);
  }

  /**
   * Shows what is new of a run; the first panel has the status of none.
   * @param {Batch} batch
   * @returns {boolean} false if commits before these are missing
   */
  absorb(run, batch) {
    const { events = [], status, figures, end } = batch, panel = this.byRun.get(run) ?? this.panels[0];
    let complete = true;
    for (const event of events) complete = panel.take(event) && complete;
    if (events.length) panel.scrubber.update(panel.track);
    if (figures) panel.showFigures(figures);
    if (status) { panel.status(status); this.trackStatus(run, status); }
    if (end) this.ends.set(run, end);
    return complete;
  }

  /**
   * Finishes every run whose commits have all arrived.
   * @returns {boolean} false if commits are missing
   */
  settle() {
    let complete = true;
    for (const [run, end] of this.ends) {
      const panel = this.byRun.get(run);
      if (!panel?.track) continue;
      if (panel.track.events.length < end.n) complete = false;
      else panel.finish(end);
    }
    const all = this.ends.size > 0 && this.ends.size >= this.byRun.size;
    this.component.element.dataset.done = String(all && complete);
    return complete;
  }

  // Fetches the missing commits of every displayed run.
  async resync() {
    if (this.syncing) return;
    this.syncing = true;
    const stream = this.stream;
    for (const [run, panel] of this.byRun) await this.fetch(run, panel);
    this.syncing = false;
    if (stream === this.stream) this.settle();
    else this.resync();
  }

  async fetch(run, panel) {
    const stream = this.stream;
    const id = this.live.get(run) ?? run, have = panel.track?.events.length ?? 0;
    for await (const batch of this.batches(id, have)) {
      if (stream !== this.stream || !panel.track) return;
      if (batch.error) {
        panel.status({ state: "lost", text: "no answer", error: batch.error });
        if (!batch.gone) this.live.delete(run);  // else `checkSilence` tries again
        return;
      }
      this.absorb(run, batch);
    }
  }

  // A run's commits from the log, in batches.
  async *batches(id, have = 0) {
    for (let more = true; more;) {
      const batch = await ask(this.component.server.since({ run: id, have }));
      yield batch;
      have += batch.events?.length ?? 0;
      more = batch.more && batch.events.length > 0;
    }
  }

  // Fetches the tokens of a chat's earlier answers, last answer first.
  async fetchHistory(text) {
    for (let track = text.unread.pop(); track; track = text.unread.pop()) {
      const events = [];
      let end = null;
      for await (const batch of this.batches(track.meta.id)) {
        events.push(...batch.events ?? []);
        end = batch.end;
      }
      if (!end || !track.body.isConnected) continue;
      track.body.replaceChildren();
      for (const event of events) text.append(track, event);
      text.finish(track, end);
    }
  }

  // Empties the panels; further messages of the displayed stream are ignored.
  reset() {
    if (this.stream) {
      this.replacedStreams.add(this.stream);
      if (this.options.tab) show(this.options.tab, { run: null });
    }
    this.stream = null;
    this.clear(0);
    this.clear(1);
    this.component.element.dataset.done = "false";
  }
}

export function mount(component, options) {
  const panels = new Panels(component, options);
  onValue(component, (message) => panels.receive(message));
}
