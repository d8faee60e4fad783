// The streamed text of a panel: turns of a chat or a completion, one span per token.
import { h, visible } from "../kit.js";

const KINDS = ["prefill", "bonus", "recovered"];
/** @type {Record<string, string>} */
const KIND_WORDS = {
  prefill: "first token, committed by the prefill",
  bonus: "bonus token of the target after a fully accepted path",
  recovered: "recovered token, drawn by the target after a rejection",
};
const DEEPEST_SHADE = 8;
const MOST_REJECTED = 3;
/** Rejected drafts that stand above the text; the tip has all of them. */

/**
 * What a run's prefill (n = 0) or step n - 1 committed: pieces of text, how many of them were drafted,
 * the kind of the last one, the labels of rejected drafts, how many were drafted, milliseconds by part.
 * @typedef {[run: string, n: number, pieces: string[], accepted: number, kind: number,
 *   rejected: string[], drafted: number, ms: number[]]} Commit
 */

/**
 * How a run ended: commits in all, why, UTF-16 length of the whole text, its last letters.
 * @typedef {{ n: number, reason: string, units: number, tail: string }} End
 */

/**
 * What a panel shows of a run besides its text.
 * @typedef {{ id: string, title: string, mode: string, prompt: string, parent: string | null,
 *   target: string, badge: string, history: { role: string, content: string }[],
 *   answered_by?: string[] }} RunFacts `answered_by`: the runs of the last answers in `history`
 */

/** Everything that arrived of one run. */
export class Track {
  constructor(meta, body) {
    this.meta = meta;
    this.body = body;
    /** @type {Commit[]} */
    this.events = [];
    this.numTokens = 0;
    /** @type {End | null} */
    this.end = null;
  }

  get numSteps() { return Math.max(0, this.events.length - 1); }

  get streamed() { return this.events.flatMap((event) => event[2]).join(""); }

  // What the whole text has beyond its pieces: an incomplete character at the very end.
  get missing() {
    const lacking = (this.end?.units ?? 0) - this.streamed.length;
    return this.end && lacking > 0 ? this.end.tail.slice(-lacking) : "";
  }

  get text() { return this.streamed.slice(0, this.end?.units) + this.missing; }
}

/**
 * How the end of a text is cut off: of the last pieces, how many UTF-16 units each keeps.
 * @param {number[]} lengths of all pieces
 * @param {number} units to cut
 * @returns {number[]} units kept of the pieces that lose some, the last piece first
 */
export function tailKept(lengths, units) {
  const kept = [];
  for (let i = lengths.length - 1; i >= 0 && units > 0; i -= 1) {
    kept.push(Math.max(0, lengths[i] - units));
    units -= lengths[i];
  }
  return kept;
}

export class TokenText {
  /**
   * @param {(track: Track, n: number) => void} onPick is told of the commit whose token was clicked
   * @param {(track: Track | null, n: number, i: number) => void} onPoint of the token under the pointer
   */
  constructor(host, onPick, onPoint = () => {}) {
    this.onPoint = onPoint;
    this.host = host;
    /** @type {Map<string, Track>} */
    this.tracks = new Map();
    /** @type {Track[]} earlier answers whose commits are not here */
    this.unread = [];
    this.sticky = true;
    this.flushing = false;
    /** @type {HTMLElement[]} rejected drafts that may reach beyond the edge of the text */
    this.above = [];
    /** @type {HTMLElement | null} the last of them that has its place */
    this.placed = null;
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    this.frame = h("div", { class: "text-frame" }, host, this.tip);
    host.addEventListener("scroll", () => {
      this.sticky = host.scrollTop + host.clientHeight > host.scrollHeight - 40;
    });
    host.addEventListener("click", (event) => {
      const at = this.spanAt(event);
      if (at) onPick(at.track, at.n);
    });
    host.addEventListener("pointerover", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
      onPoint(null, 0, 0);
    });
  }

  spanAt(event) {
    const span = event.target instanceof Element ? event.target.closest("[data-n]") : null;
    const body = span?.closest("[data-run]");
    if (!(span instanceof HTMLElement) || !(body instanceof HTMLElement)) return null;
    const track = this.tracks.get(body.dataset.run ?? "");
    return track ? { track, n: Number(span.dataset.n), span } : null;
  }

  /** Keeps the turns on show up to the run that the new one continues. */
  open(meta) {
    const parent = this.tracks.get(meta.parent ?? "");
    if (parent) this.dropAfter(parent);
    else {
      this.tracks.clear();
      this.host.replaceChildren();
      this.recall(meta);
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

  // The turns before a run that is opened again; those that runs wrote get their tokens by `append`.
  recall({ history = [], answered_by = [] }) {
    const answers = history.filter(({ role }) => role === "assistant").length;
    let i = answered_by.length - answers;
    for (const { role, content } of history) {
      const said = this.message(role, content);
      const id = role === "assistant" ? answered_by[i++] : null;
      if (!id) continue;
      const track = new Track({ id }, h("div", { class: "tokens", "data-run": id }));
      said.replaceChildren(track.body);
      track.body.textContent = content;
      this.tracks.set(id, track);
      this.unread.push(track);
    }
  }

  dropAfter(track) {
    const turn = track.body.parentElement;
    while (turn?.nextElementSibling) turn.nextElementSibling.remove();
    for (const [id, other] of this.tracks) if (!other.body.isConnected) this.tracks.delete(id);
  }

  message(role, content) {
    const turn = h("div", { class: `turn ${role}` }, h("div", { class: "said" }, content));
    this.host.append(turn);
    return turn;
  }

  /** @param {Track} track @param {Commit} event */
  append(track, event) {
    const [, n, pieces, accepted, kind, rejected] = event;
    const drafts = Math.min(accepted, pieces.length);
    pieces.forEach((piece, i) => {
      if (i === drafts && rejected.length) {
        this.above.push(rejectedDrafts(n, rejected));
        track.body.append(this.above[this.above.length - 1]);
      }
      if (piece) track.body.append(tokenSpan(n, i, piece, i < drafts ? null : KINDS[kind]));
    });
    track.events.push(event);
    track.numTokens += pieces.length;
    this.scroll();
  }

  finish(track, end) {
    if (track.end) return;
    track.end = end;
    if (track.missing) track.body.append(h("span", { class: "bonus" }, track.missing));
    dimTail(track.body, track.streamed.length - end.units);
    if (end.reason === "eos") {
      track.body.append(h("span", { class: "eos", title: "end of text" }, "\u25a0"));
    }
    this.scroll();
  }

  scroll() {
    if (this.flushing) return;
    this.flushing = true;
    requestAnimationFrame(() => {
      this.flushing = false;
      for (const span of this.above.splice(0)) {
        const over = span.offsetLeft + span.offsetWidth - (span.parentElement?.clientWidth ?? Infinity);
        if (over > 0) span.style.marginLeft = `${-over}px`;
        cutBefore(span, this.placed);
        this.placed = span;
      }
      if (this.sticky) this.host.scrollTop = this.host.scrollHeight;
    });
  }

  /**
   * Marks the tokens of a commit.
   * @param {boolean} reveal whether to scroll there
   */
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
   * Marks one token, or none.
   * @param {number} i its place in the commit; from the end if negative
   */
  point(track, n, i) {
    for (const span of this.host.querySelectorAll(".pointed")) span.classList.remove("pointed");
    const spans = track?.body.querySelectorAll(`[data-n="${n}"][data-i]`) ?? [];
    const wanted = [...spans].find((span) => span.dataset.i === String(i));
    (i < 0 ? spans[spans.length - 1] : wanted)?.classList.add("pointed");
  }

  hover(event) {
    const at = this.spanAt(event);
    this.tip.hidden = !at;
    this.onPoint(at?.track ?? null, at?.n ?? 0, Number(at?.span.dataset.i ?? -1));
    if (!at) return;
    this.tip.replaceChildren(...explain(at.track, at.n, at.span));
    const box = this.frame.getBoundingClientRect();
    const span = at.span.getBoundingClientRect();
    const left = Math.min(Math.max(0, span.left - box.left), box.width - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(4, left)}px`;
    const below = span.bottom - box.top + 6;
    const fits = below + this.tip.offsetHeight < box.height;
    this.tip.style.top = `${fits ? below : span.top - box.top - this.tip.offsetHeight - 6}px`;
  }
}

/** @param {string | null} kind null for an accepted draft */
function tokenSpan(n, i, piece, kind) {
  const shade = `draft d${Math.min(i + 1, DEEPEST_SHADE)}`;
  return h("span", { class: kind ?? shade, "data-n": n, "data-i": i }, piece);
}

function rejectedDrafts(n, labels) {
  return h("span", { class: "rejected", "data-n": n, "aria-hidden": "true" },
    ...labels.slice(0, MOST_REJECTED).map((label) => h("s", {}, visible(label))),
    labels.length > MOST_REJECTED ? "\u2026" : null);
}

/**
 * Cuts rejected drafts short where the next ones begin above the same line.
 * @param {HTMLElement} span
 * @param {HTMLElement | null} last the ones before
 */
function cutBefore(span, last) {
  if (last?.parentElement !== span.parentElement || last?.offsetTop !== span.offsetTop) return;
  const room = span.offsetLeft - last.offsetLeft - 3;
  if (room < last.offsetWidth) last.style.maxWidth = `${Math.max(0, room)}px`;
}

/** Dims the last `units` UTF-16 units: the part of a stop string that had streamed already. */
function dimTail(body, units) {
  const spans = [...body.children].filter((span) => !span.classList.contains("rejected"));
  const texts = spans.map((span) => span.textContent ?? "");
  tailKept(texts.map((text) => text.length), units).forEach((kept, i) => {
    const at = spans.length - 1 - i;
    if (!kept) { spans[at].className = "cut"; return; }
    spans[at].textContent = texts[at].slice(0, kept);
    spans[at].after(h("span", { class: "cut" }, texts[at].slice(kept)));
  });
}

/** The tip over a token. */
function explain(track, n, span) {
  const [, , , accepted, kind, rejected, drafted] = track.events[n];
  const what = span.classList.contains("rejected") ? "rejected draft"
    : span.classList.contains("draft") ? `accepted draft, depth ${Number(span.dataset.i) + 1}`
      : KIND_WORDS[KINDS[kind]];
  const lines = [h("b", {}, what)];
  if (n > 0) lines.push(h("div", {}, `step ${n} \u00b7 ${accepted} of ${drafted} drafted accepted`));
  if (rejected.length) {
    const tokens = rejected.map((label) => h("s", {}, visible(label)));
    lines.push(h("div", { class: "tip-rejected" }, "rejected ", ...tokens));
  }
  return lines;
}
