// One to four panels fed by one stream of messages, which may be lost or repeated.
import { show } from "../address.js";
import { ask, part } from "../kit.js";
import { Panel } from "./panel.js";

/** @typedef {import("../kit.js").Component} Component */
/**
 * @typedef {{ formulas: Record<string, string>, placeholder: string, compares?: boolean,
 *   tab?: string | null }} Given
 */

const LIVE = ["queued", "loading", "prefill", "running"];
export const LOOK_MS = 1500;

/**
 * A message of `playground.host`'s stream: `seq` counts the messages of a stream, commits carry their
 * own place in their run, and so none is needed twice and a gap shows.
 * @typedef {object} Message
 * @property {string} stream
 * @property {number} seq
 * @property {boolean} [resync] whether commits are to be fetched instead
 * @property {import("./text.js").RunFacts[]} [runs]
 * @property {Record<string, any>} [status] by run
 * @property {string} [ev] commits as JSON
 * @property {Record<string, any>} [figures] by run
 * @property {Record<string, import("./text.js").End>} [ends] by run
 */

export class Panels {
  constructor(component, given) {
    this.component = component;
    this.given = given;
    this.host = part(component.element, ".panels");
    /** @type {Panel[]} */
    this.panels = [];
    /** @type {Map<string, Panel>} */
    this.byRun = new Map();
    /** @type {Map<string, import("./text.js").End>} */
    this.ends = new Map();
    /** @type {string | null} */
    this.stream = null;
    /** @type {Set<string>} streams that something else took the place of */
    this.dropped = new Set();
    this.seq = -1;
    this.syncing = false;
    /** @type {Map<string, string | null>} runs that go on, with their ids in the log */
    this.live = new Map();
    this.heardMs = 0;
    setInterval(() => this.look(), LOOK_MS);
  }

  /** @param {Message | null} message what the component's value is now */
  receive(message) {
    if (!message?.stream) { this.reset(); return; }
    if (this.dropped.has(message.stream)) return;
    this.heardMs = Date.now();
    const isNew = message.stream !== this.stream;
    if (isNew) this.begin(message);
    else if (message.seq <= this.seq) return;
    const gap = message.seq > this.seq + 1 || isNew && Boolean(message.resync);
    this.seq = message.seq;
    for (const [run, status] of Object.entries(message.status ?? {})) {
      (this.byRun.get(run) ?? this.panels[0]).status(status);
      this.note(run, status);
    }
    this.take(message, gap);
  }

  // Where a run is, for the address and for `look`.
  note(run, status) {
    if (LIVE.includes(status.state)) this.live.set(run, status.log_id ?? null);
    else this.live.delete(run);
    const { tab } = this.given, id = status.log_id ?? run;
    if (tab && id && this.byRun.has(run)) show(tab, { run: id });
  }

  // Asks the server where nothing came for a while: the stream may be broken, or the server gone.
  look() {
    if (this.live.size && this.isSilent) this.resync();
  }

  get isSilent() { return Date.now() - this.heardMs > LOOK_MS; }

  begin(message) {
    if (this.stream) this.dropped.add(this.stream);
    this.stream = message.stream;
    this.seq = -1;
    this.live.clear();
    this.ends = new Map();
    this.byRun = new Map();
    const runs = message.runs ?? [];
    this.setCount(Math.max(1, runs.length));
    runs.forEach((meta, i) => {
      this.panels[i].open(meta);
      this.byRun.set(meta.id, this.panels[i]);
      this.recall(this.panels[i].text);
    });
    if (!runs.length || message.resync) return;
    this.host.dataset.asked = runs[0].prompt;
    this.component.trigger("begun", { mode: runs[0].mode });
  }

  setCount(count) {
    while (this.panels.length > count) this.panels.pop()?.root.remove();
    while (this.panels.length < count) {
      const { component, given } = this;
      const panel = new Panel(given, {
        fetchStep: (run, index) => component.server.step({ run, index }),
        fetchSteps: (run, first, last) => component.server.steps({ run, first, last }),
        fetchTrace: (run) => component.server.trace({ run }),
      }, given.compares ? (event, data) => component.trigger(event, data) : null);
      this.panels.push(panel);
      this.host.append(panel.root);
    }
    this.host.dataset.count = String(count);
  }

  /** @param {boolean} gap whether messages before it were lost */
  take(message, gap) {
    let complete = !gap;
    const grown = new Set();
    for (const event of JSON.parse(message.ev || "[]")) {
      const panel = this.byRun.get(event[0]);
      if (!panel) continue;
      complete = panel.take(event) && complete;
      grown.add(panel);
    }
    for (const panel of grown) panel.scrubber.grown(panel.track);
    for (const [run, metrics] of Object.entries(message.figures ?? {})) {
      this.byRun.get(run)?.showFigures(metrics);
    }
    for (const [run, end] of Object.entries(message.ends ?? {})) this.ends.set(run, end);
    if (!this.settle() || !complete) this.resync();
  }

  /**
   * Ends every run whose commits have all arrived.
   * @returns {boolean} false when some are missing
   */
  settle() {
    let whole = true;
    for (const [run, end] of this.ends) {
      const panel = this.byRun.get(run);
      if (!panel?.track) continue;
      if (panel.track.events.length < end.n) whole = false;
      else panel.finish(end);
    }
    const all = this.ends.size > 0 && this.ends.size >= this.byRun.size;
    this.component.element.dataset.done = String(all && whole);
    return whole;
  }

  // Fetches what was lost, of every run on show.
  async resync() {
    if (this.syncing) return;
    this.syncing = true;
    const asked = this.stream;
    for (const [run, panel] of this.byRun) await this.fetch(run, panel);
    this.syncing = false;
    if (asked === this.stream) this.settle();
    else this.resync();
  }

  async fetch(run, panel) {
    const asked = this.stream;
    for (let more = true; more && panel.track;) {
      const have = panel.track.events.length;
      const id = this.live.get(run) ?? run;
      const batch = await ask(this.component.server.since({ run: id, have }));
      if (asked !== this.stream) return;
      if (batch.error) { this.lost(run, panel, batch); return; }
      for (const event of batch.ev) panel.take(event);
      panel.scrubber.grown(panel.track);
      panel.showFigures(batch.figures);
      if (batch.status) { panel.status(batch.status); this.note(run, batch.status); }
      if (batch.end) this.ends.set(run, batch.end);
      more = batch.more && panel.track.events.length > have;
    }
  }

  // Fetches the tokens of a chat's earlier answers, the last one first.
  async recall(text) {
    for (let track = text.unread.pop(); track; track = text.unread.pop()) {
      const { id } = track.meta, events = [];
      let batch;
      do {
        batch = await ask(this.component.server.since({ run: id, have: events.length }));
        events.push(...batch.ev ?? []);
      } while (batch.more && batch.ev.length);
      if (!batch.end || !track.body.isConnected) continue;
      track.body.replaceChildren();
      for (const event of events) text.append(track, event);
      text.finish(track, batch.end);
    }
  }

  // Says that nothing comes of a run; whether it will is asked until there is an answer.
  lost(run, panel, answer) {
    if (!answer.gone) this.live.delete(run);
    panel.status({ state: "lost", text: "no answer", error: answer.error });
  }

  // Empties the panels; what a stream that was on show still sends is ignored.
  reset() {
    if (this.stream) {
      this.dropped.add(this.stream);
      if (this.given.tab) show(this.given.tab, { run: null });
    }
    this.stream = null;
    this.live.clear();
    this.byRun = new Map();
    this.ends = new Map();
    this.setCount(0);
    this.setCount(1);
    this.component.element.dataset.done = "false";
  }
}

export function mount(component, given) {
  const panels = new Panels(component, given);
  const receive = () => panels.receive(component.props.value);
  component.watch("value", receive);
  receive();
}
