// The streamed text of a panel: turns of a chat or a completion, one span per token.
import { showTip } from "../about.js";
import { h, perFrame, visible } from "../kit.js";

/** Kinds of a commit's last token, with their descriptions. */
const KINDS = [["prefill", "first token, committed by the prefill"],
  ["bonus", "bonus token of the target after a fully accepted path"],
  ["recovered", "recovered token, drawn by the target after a rejection"]];
const MAX_SHADE = 8;
/** Rejected drafts shown above the text; the tooltip lists all of them. */
const MAX_REJECTED = 3;

/**
 * What a run's prefill (n = 0) or step n - 1 committed: pieces of text, how many of them were drafted,
 * the kind of the last one, labels of rejected drafts, number of drafted tokens, milliseconds by part,
 * and seconds since the request.
 * @typedef {[n: number, pieces: string[], accepted: number, kind: number,
 *   rejected: string[], drafted: number, ms: number[], atS: number]} Commit
 */

/**
 * How a run ended: number of commits, reason, UTF-16 length of the whole text, its last characters.
 * @typedef {{ n: number, reason: string, units: number, tail: string }} End
 */

/**
 * What a panel shows of a run in addition to its text.
 * @typedef {{ id: string, title: string, mode: string, prompt: string, parent: string | null,
 *   target: string, badge: string, history: { role: string, content: string }[],
 *   answered_by?: string[] }} RunFacts `answered_by`: the runs of the last answers in `history`
 */

/** The commits of one run that have arrived. */
export class Track {
  constructor(meta, body) {
    this.meta = meta;
    this.body = body;
    this.events = [];
    this.numTokens = 0;
    this.end = null;
  }

  get numSteps() { return Math.max(0, this.events.length - 1); }

  get streamed() { return this.events.flatMap((event) => event[1]).join(""); }

  // The end of the text that no piece contains: an incomplete character.
  get missing() {
    const lacking = (this.end?.units ?? 0) - this.streamed.length;
    return this.end && lacking > 0 ? this.end.tail.slice(-lacking) : "";
  }

  get text() { return this.streamed.slice(0, this.end?.units) + this.missing; }
}

export class TokenText {
  /**
   * @param {(track: Track, n: number) => void} onPick called with the commit whose token was clicked
   * @param {(track: Track | null, n: number, i: number) => void} onPoint with the token under the pointer
   */
  constructor(host, onPick, onPoint) {
    this.onPoint = onPoint;
    this.host = host;
    this.tracks = new Map();
    /** @type {Track[]} earlier answers whose commits have not been fetched */
    this.unread = [];
    this.sticky = true;
    /** @type {HTMLElement[]} rejected drafts that are still to be placed within the text's width */
    this.unplaced = [];
    /** @type {HTMLElement | null} the last one that was placed */
    this.lastPlaced = null;
    host.addEventListener("scroll", () => {
      this.sticky = host.scrollTop + host.clientHeight > host.scrollHeight - 40;
    });
    host.addEventListener("click", (event) => {
      const at = this.spanAt(event);
      if (at) onPick(at.track, at.n);
    });
    host.addEventListener("pointerover", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => {
      showTip(null);
      onPoint(null, 0, 0);
    });
  }

  spanAt({ target }) {
    const span = target.closest("[data-n]");
    const track = this.tracks.get(span?.closest("[data-run]")?.dataset.run);
    return track ? { track, n: Number(span.dataset.n), span } : null;
  }

  /** Starts a run; keeps the displayed turns up to the run that it continues. */
  open(meta) {
    const parent = this.tracks.get(meta.parent ?? "");
    if (parent) {
      const turn = parent.body.parentElement;
      while (turn.nextElementSibling) turn.nextElementSibling.remove();
      for (const [id, other] of this.tracks) if (!other.body.isConnected) this.tracks.delete(id);
    } else {
      this.tracks.clear();
      this.host.replaceChildren();
      this.showHistory(meta);
    }
    const body = h("div", { class: "tokens", "data-run": meta.id });
    if (meta.mode === "raw") body.append(h("span", { class: "prompt" }, meta.prompt));
    else if (meta.prompt) this.message("user", meta.prompt);
    this.host.append(h("div", { class: `turn ${meta.mode === "raw" ? "raw" : "assistant"}` }, body));
    const track = new Track(meta, body);
    this.tracks.set(meta.id, track);
    this.sticky = true;
    this.scroll();
    return track;
  }

  // Shows the turns before a reopened run; answers of runs in the log get their tokens by `append`.
  showHistory({ history = [], answered_by = [] }) {
    const answers = history.filter(({ role }) => role === "assistant").length;
    let i = answered_by.length - answers;
    for (const { role, content } of history) {
      const turn = this.message(role, content);
      const id = role === "assistant" ? answered_by[i++] : null;
      if (!id) continue;
      const track = new Track({ id }, h("div", { class: "tokens", "data-run": id }));
      turn.replaceChildren(track.body);
      track.body.textContent = content;
      this.tracks.set(id, track);
      this.unread.push(track);
    }
  }

  message(role, content) {
    const turn = h("div", { class: `turn ${role}` }, h("div", { class: "message" }, content));
    this.host.append(turn);
    return turn;
  }

  /** @param {Track} track @param {Commit} event */
  append(track, event) {
    const [n, pieces, accepted, kind, rejected] = event;
    const drafts = Math.min(accepted, pieces.length);
    pieces.forEach((piece, i) => {
      if (i === drafts && rejected.length) {
        this.unplaced.push(rejectedDrafts(n, rejected));
        track.body.append(this.unplaced[this.unplaced.length - 1]);
      }
      const kindOf = i < drafts ? `draft d${Math.min(i + 1, MAX_SHADE)}` : KINDS[kind][0];
      if (piece) track.body.append(h("span", { class: kindOf, "data-n": n, "data-i": i }, piece));
    });
    track.events.push(event);
    track.numTokens += pieces.length;
    this.scroll();
  }

  finish(track, end) {
    track.end = end;
    if (track.missing) track.body.append(h("span", { class: "bonus" }, track.missing));
    dimTail(track.body, track.streamed.length - end.units);
    if (end.reason === "eos") {
      track.body.append(h("span", { class: "eos", title: "end of text" }, "\u25a0"));
    }
    this.scroll();
  }

  scroll = perFrame(() => {
    for (const span of this.unplaced.splice(0)) {
      const over = span.offsetLeft + span.offsetWidth - (span.parentElement?.clientWidth ?? Infinity);
      if (over > 0) span.style.marginLeft = `${-over}px`;
      cutBefore(span, this.lastPlaced);
      this.lastPlaced = span;
    }
    if (this.sticky) this.host.scrollTop = this.host.scrollHeight;
  });

  /** Marks the tokens of a commit; `reveal`: scrolls there. */
  mark(track, n, reveal) {
    for (const span of this.host.querySelectorAll(".current")) span.classList.remove("current");
    const spans = track.body.querySelectorAll(`[data-n="${n}"]`);
    for (const span of spans) span.classList.add("current");
    if (!reveal || !spans.length) return;
    const box = this.host.getBoundingClientRect();
    const at = spans[0].getBoundingClientRect();
    if (at.top < box.top || at.bottom > box.bottom) {
      this.host.scrollTop += at.top - box.top - box.height / 2;
    }
  }

  /**
   * Highlights one token, or none.
   * @param {number} i its index in the commit; counted from the end if negative
   */
  highlight(track, n, i) {
    for (const span of this.host.querySelectorAll(".pointed")) span.classList.remove("pointed");
    const spans = track?.body.querySelectorAll(`[data-n="${n}"][data-i]`) ?? [];
    const wanted = [...spans].find((span) => span.dataset.i === String(i));
    (i < 0 ? spans[spans.length - 1] : wanted)?.classList.add("pointed");
  }

  hover(event) {
    const at = this.spanAt(event);
    showTip(at?.span.getBoundingClientRect(), ...at ? explain(at.track, at.n, at.span) : []);
    this.onPoint(at?.track ?? null, at?.n ?? 0, Number(at?.span.dataset.i ?? -1));
  }
}

function rejectedDrafts(n, labels) {
  return h("span", { class: "rejected", "data-n": n, "aria-hidden": "true" },
    ...labels.slice(0, MAX_REJECTED).map((label) => h("s", {}, visible(label))),
    labels.length > MAX_REJECTED ? "\u2026" : null);
}

/** Shortens the `last` rejected drafts if the next ones are above the same line. */
function cutBefore(span, last) {
  if (last?.parentElement !== span.parentElement || last?.offsetTop !== span.offsetTop) return;
  const room = span.offsetLeft - last.offsetLeft - 3;
  if (room < last.offsetWidth) last.style.maxWidth = `${Math.max(0, room)}px`;
}

/** Dims the last `units` UTF-16 units: the part of a stop string that was already streamed. */
export function dimTail(body, units) {
  const spans = [...body.children].filter((span) => !span.classList.contains("rejected"));
  for (const span of spans.reverse()) {
    if (units <= 0) return;
    const text = span.textContent, kept = Math.max(0, text.length - units);
    units -= text.length;
    if (!kept) { span.className = "cut"; continue; }
    span.textContent = text.slice(0, kept);
    span.after(h("span", { class: "cut" }, text.slice(kept)));
  }
}

/** The tooltip of a token. */
function explain(track, n, span) {
  const [, , accepted, kind, rejected, drafted] = track.events[n];
  const what = span.classList.contains("rejected") ? "rejected draft"
    : span.classList.contains("draft") ? `accepted draft, depth ${Number(span.dataset.i) + 1}`
      : KINDS[kind][1];
  const lines = [h("b", {}, what)];
  if (n > 0) lines.push(h("div", {}, `step ${n} \u00b7 ${accepted} of ${drafted} drafted accepted`));
  if (rejected.length) {
    lines.push(h("div", {}, "rejected ", ...rejected.map((label) => h("s", {}, visible(label)))));
  }
  return lines;
}
