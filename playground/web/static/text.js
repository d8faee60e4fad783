// The streamed text of a panel: turns of a chat or a completion, one span per token. Needs dom.js.
const KINDS = ["prefill", "bonus", "recovered"];
const KIND_WORDS = {
  prefill: "first token, committed by the prefill",
  bonus: "bonus token of the target after a fully accepted path",
  recovered: "recovered token, drawn by the target after a rejection",
};
const DEEPEST_SHADE = 8;

// end: { n: events in all, reason, units: UTF-16 length of the whole text, tail: its last letters }
// event: [run, n, pieces, accepted, kind, rejected, drafted]; n 0 is the prefill, n > 0 step n - 1.
class Track {
  constructor(meta, body) {
    this.meta = meta;
    this.body = body;
    this.events = [];
    this.numTokens = 0;
    this.end = null;
  }

  get numSteps() { return Math.max(0, this.events.length - 1); }

  get text() {
    return this.streamed.slice(0, this.end?.units) + this.missing;
  }

  get streamed() { return this.events.flatMap((event) => event[2]).join(""); }

  // What the whole text has beyond its pieces: an incomplete character at the very end.
  get missing() {
    const lacking = (this.end?.units ?? 0) - this.streamed.length;
    return lacking > 0 ? this.end.tail.slice(-lacking) : "";
  }
}

class TokenText {
  constructor(host, onPick) {
    this.host = host;
    this.tracks = new Map();
    this.sticky = true;
    this.flushing = false;
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    host.parentElement.append(this.tip);
    host.addEventListener("scroll", () => {
      this.sticky = host.scrollTop + host.clientHeight > host.scrollHeight - 40;
    });
    host.addEventListener("click", (event) => {
      const at = this.spanAt(event);
      if (at) onPick(at.track, at.n);
    });
    host.addEventListener("pointerover", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  spanAt(event) {
    const span = event.target.closest?.("[data-n]");
    if (!span) return null;
    const track = this.tracks.get(span.closest("[data-run]")?.dataset.run);
    return track ? { track, n: Number(span.dataset.n), span } : null;
  }

  clear() {
    this.tracks.clear();
    this.host.replaceChildren();
  }

  // Keeps the turns on show up to the run that the new one continues.
  open(meta) {
    if (meta.parent && this.tracks.has(meta.parent)) this.dropAfter(meta.parent);
    else {
      this.clear();
      for (const message of meta.history || []) this.message(message.role, message.content);
    }
    const body = h("div", { class: "tokens", "data-run": meta.id });
    const turn = h("div", { class: `turn ${meta.mode === "raw" ? "raw" : "assistant"}` });
    if (meta.mode === "raw") body.append(h("span", { class: "prompt" }, meta.prompt));
    else if (meta.prompt) this.message("user", meta.prompt);
    turn.append(body);
    this.host.append(turn);
    const track = new Track(meta, body);
    this.tracks.set(meta.id, track);
    this.sticky = true;
    this.scroll();
    return track;
  }

  dropAfter(run) {
    const turn = this.tracks.get(run).body.closest(".turn");
    while (turn.nextElementSibling) turn.nextElementSibling.remove();
    for (const [id, track] of this.tracks) if (!track.body.isConnected) this.tracks.delete(id);
  }

  message(role, content) {
    const text = h("div", { class: "said" }, content);
    this.host.append(h("div", { class: `turn ${role}` }, text));
  }

  append(track, event) {
    const [, n, pieces, accepted, kind, rejected] = event;
    const fragment = document.createDocumentFragment();
    const drafts = Math.min(accepted, pieces.length);
    pieces.forEach((piece, i) => {
      if (i === drafts && rejected.length) fragment.append(this.rejected(n, rejected));
      if (piece) fragment.append(this.token(n, i, piece, i < drafts ? null : KINDS[kind]));
    });
    track.body.append(fragment);
    track.events.push(event);
    track.numTokens += pieces.length;
    this.scroll();
  }

  token(n, i, piece, kind) {
    const shade = `draft d${Math.min(i + 1, DEEPEST_SHADE)}`;
    return h("span", { class: kind ?? shade, "data-n": n, "data-i": i }, piece);
  }

  rejected(n, labels) {
    return h("span", { class: "rejected", "data-n": n, "aria-hidden": "true" },
      ...labels.map((label) => h("s", {}, visible(label))));
  }

  finish(track, end) {
    if (track.end) return;
    track.end = end;
    if (track.missing) track.body.append(h("span", { class: "bonus" }, track.missing));
    this.cutTail(track.body, track.streamed.length - end.units);
    if (end.reason === "eos") {
      track.body.append(h("span", { class: "eos", title: "end of text" }, "\u25a0"));
    }
    this.scroll();
  }

  // Dims the last `units` UTF-16 units: the part of a stop string that had streamed already.
  cutTail(body, units) {
    for (let span = body.lastElementChild; span && units > 0; span = span.previousElementSibling) {
      if (span.classList.contains("rejected")) continue;
      const text = span.textContent;
      if (text.length > units) {
        span.textContent = text.slice(0, text.length - units);
        span.after(h("span", { class: "cut" }, text.slice(text.length - units)));
      } else {
        span.className = "cut";
      }
      units -= text.length;
    }
  }

  scroll() {
    if (this.flushing) return;
    this.flushing = true;
    requestAnimationFrame(() => {
      this.flushing = false;
      if (this.sticky) this.host.scrollTop = this.host.scrollHeight;
    });
  }

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

  hover(event) {
    const at = this.spanAt(event);
    this.tip.hidden = !at;
    if (!at) return;
    this.tip.replaceChildren(...this.explain(at));
    const box = this.host.parentElement.getBoundingClientRect();
    const span = at.span.getBoundingClientRect();
    const left = Math.min(Math.max(0, span.left - box.left), box.width - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(4, left)}px`;
    const below = span.bottom - box.top + 6;
    const fits = below + this.tip.offsetHeight < box.height;
    this.tip.style.top = `${fits ? below : span.top - box.top - this.tip.offsetHeight - 6}px`;
  }

  explain({ track, n, span }) {
    const [, , , accepted, kind, rejected, drafted] = track.events[n];
    const index = Number(span.dataset.i);
    const isDraft = span.classList.contains("draft");
    const what = isDraft ? `accepted draft, depth ${index + 1}` : KIND_WORDS[KINDS[kind]];
    const lines = [h("b", {}, span.classList.contains("rejected") ? "rejected draft" : what)];
    if (n > 0) lines.push(h("div", {}, `step ${n} \u00b7 ${accepted} of ${drafted} drafted accepted`));
    if (rejected.length) {
      const tokens = rejected.map((label) => h("s", {}, visible(label)));
      lines.push(h("div", { class: "tip-rejected" }, "rejected ", ...tokens));
    }
    return lines;
  }
}
