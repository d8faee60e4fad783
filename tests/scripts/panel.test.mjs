// Text offsets, the draft tree's layout, and the race's clock.
import assert from "node:assert/strict";
import { test } from "node:test";

import { numReached } from "../../playground/web/static/compare/race.js";
import { clip, duration, neighbourOf, number, percent, probability, visible }
  from "../../playground/web/static/kit.js";
import { layoutTree, probable, withBonus }
  from "../../playground/web/static/panel/draft_tree.js";
import { columnsOf, ranked } from "../../playground/web/static/panel/timeline.js";
import { Track, tailKept } from "../../playground/web/static/panel/text.js";

function track(pieces, end = null) {
  const made = new Track({ id: "r" }, null);
  made.events = pieces.map((piece, n) => ["r", n, [piece], 0, 0, [], 0]);
  made.end = end;
  return made;
}

test("the text is the pieces, cut to its UTF-16 length", () => {
  assert.equal(track(["ab", "\u{1F600}c"]).text, "ab\u{1F600}c");
  assert.equal(track(["ab", "\u{1F600}c"], { units: 4, tail: "" }).text, "ab\u{1F600}");
  assert.equal(track(["stop", "##"], { units: 4, tail: "" }).text, "stop");
});

test("an incomplete character at the very end comes with the end", () => {
  const made = track(["ab"], { units: 3, tail: "b\ufffd" });
  assert.equal(made.missing, "\ufffd");
  assert.equal(made.text, "ab\ufffd");
  assert.equal(track(["ab"], { units: 2, tail: "ab" }).missing, "");
});

test("the tail that is dimmed ends in the middle of a piece", () => {
  assert.deepEqual(tailKept([3, 4, 2], 0), []);
  assert.deepEqual(tailKept([3, 4, 2], 1), [1]);
  assert.deepEqual(tailKept([3, 4, 2], 2), [0]);
  assert.deepEqual(tailKept([3, 4, 2], 5), [0, 1]);
  assert.deepEqual(tailKept([3], 9), [0]);
});

const STEP = {
  token_texts: ["a", "b", "c", "d"], parents: [-1, 0, 0, 1], accepted: [1, 3],
  draft_probs: [null, 0.5, 0.3, 0.2], target_probs: [null, 0.6, 0.1, 0.4],
  tokens: [1, 2, 3, 4], ranks: [null, 0, 1, 0],
  bonus: 5, bonus_text: "e", recovered: false,
};

test("the target's own token hangs under the accepted path", () => {
  const nodes = withBonus(STEP);
  assert.deepEqual(nodes.map(({ accepted }) => accepted), [true, true, false, true, true]);
  assert.equal(nodes[4].parent, 3);
  assert.equal(nodes[4].kind, "bonus");
  assert.equal(withBonus({ ...STEP, accepted: [] }).at(-1).parent, 0);
});

test("a threshold hides improbable nodes and what is below them, never the accepted path", () => {
  const nodes = withBonus({ ...STEP, token_texts: [...STEP.token_texts, "x"], tokens: [1, 2, 3, 4, 9],
    parents: [...STEP.parents, 2], draft_probs: [...STEP.draft_probs, 0.9],
    target_probs: [...STEP.target_probs, 0.9], ranks: [...STEP.ranks, 0] });
  assert.deepEqual(probable(nodes, 0).map(({ label }) => label), ["a", "b", "c", "d", "x", "e"]);
  const kept = probable(nodes, 0.31);
  assert.deepEqual(kept.map(({ label }) => label), ["a", "b", "d", "e"]);
  assert.deepEqual(kept.map(({ node, parent }) => [node, parent]), [[0, -1], [1, 0], [2, 1], [3, 2]]);
  assert.equal(layoutTree(kept).placed.length, 4);
});

const step = (tokens, accepted, ...ms) => ["r", 1, Array(tokens).fill("x"), accepted, 1, [], 4, ms];
const STEPS = [step(1, 0, 1, 8, 0, 1), step(4, 3, 1, 8, 0, 1), step(2, 1, 1, 8, 0, 11)];

test("a column is a step, or several with the most tokens of them", () => {
  assert.deepEqual(columnsOf(STEPS, 100).map(({ tokens }) => tokens), [1, 4, 2]);
  assert.deepEqual(columnsOf(STEPS, 1), [{ tokens: 4, ms: [3, 24, 0, 13, 0] }]);
  assert.deepEqual(columnsOf([], 100), []);
  assert.equal(columnsOf(Array(10_000).fill(STEPS[0]), 900.5).length, 900);
});

test("the best step has the most tokens for its time", () => {
  assert.deepEqual(ranked(STEPS), [1, 0, 2]);
});

test("a layout puts depth on x and no two leaves on one row", () => {
  const { placed, width, height } = layoutTree(withBonus(STEP));
  assert.deepEqual(placed.map(({ depth }) => depth), [0, 1, 1, 2, 3]);
  assert.equal(placed[0].y, (placed[1].y + placed[2].y) / 2);
  assert.notEqual(placed[4].y, placed[2].y);
  for (const item of placed.slice(1)) assert.ok(item.x > placed[item.parent].x);
  for (const item of placed) assert.ok(item.x + item.width <= width && item.y <= height);
});

test("arrow keys walk the draft tree", () => {
  const { placed } = layoutTree(withBonus(STEP));
  assert.equal(neighbourOf(placed, placed[0], "ArrowRight"), placed[1]);
  assert.equal(neighbourOf(placed, placed[1], "ArrowDown"), placed[2]);
  assert.equal(neighbourOf(placed, placed[2], "ArrowLeft"), placed[0]);
  assert.equal(neighbourOf(placed, placed[0], "ArrowUp"), undefined);
});

test("the race counts the commits that have happened", () => {
  const moments = [5, 9, 9, 30];
  assert.deepEqual([0, 5, 8, 9, 29, 30, 99].map((ms) => numReached(moments, ms)),
    [0, 1, 1, 3, 3, 4, 4]);
});

test("figures in words", () => {
  assert.equal(number(null, 2), "\u2013");
  assert.equal(number(0.4567, 2), "0.46");
  assert.equal(duration(3.14), "3.1 ms");
  assert.equal(duration(72.4), "72 ms");
  assert.equal(duration(1302), "1.30 s");
  assert.equal(duration(undefined), "\u2013");
  assert.equal(percent(0.256), "26%");
  assert.equal(probability(0.0001), "<.001");
  assert.equal(probability(0.25), ".25");
  assert.equal(visible(" a\n"), "\u00b7a\u23ce");
  assert.equal(clip("abcdef", 4), "abc\u2026");
});

/** Stands for any node of a page. */
function anyNode() {
  return new Proxy(function () {}, {
    get: (target, key) => key in target ? target[key]
      : key === Symbol.toPrimitive ? () => "" : anyNode(),
    set: (target, key, value) => { target[key] = value; return true; },
    apply: () => anyNode(),
  });
}

async function triggeredBy(messages) {
  const before = { document: globalThis.document, location: globalThis.location };
  Object.assign(globalThis, { document: anyNode(), location: { search: "", href: "http://x/" } });
  const { Panels } = await import("../../playground/web/static/panel/panels.js");
  const events = [];
  const panels = Object.create(Panels.prototype, { isSilent: { value: false } });
  Object.assign(panels, {
    component: { trigger: (name) => events.push(name), element: { dataset: {} }, server: {} },
    given: {}, host: { dataset: {} }, panels: [{ open() {}, status() {} }], stream: null, seq: -1,
    byRun: new Map(), ends: new Map(), live: new Map(), dropped: new Set(),
    setCount() {}, resync: () => events.push("resync"),
  });
  for (const message of messages) panels.receive(message);
  Object.assign(globalThis, before);
  return events;
}

const MESSAGE = { stream: "s", runs: [{ id: "r", mode: "chat", prompt: "p" }], status: {}, ev: "[]" };

test("a run that the page itself started clears the prompt", async () => {
  assert.deepEqual(await triggeredBy([{ ...MESSAGE, seq: 0 }, { ...MESSAGE, seq: 1 }]), ["begun"]);
});

test("a run that is followed after a reload does not, and is fetched once", async () => {
  for (const first of [0, 3]) {  // whichever message the page sees first
    const messages = [first, first + 1].map((seq) => ({ ...MESSAGE, seq, resync: true }));
    assert.deepEqual(await triggeredBy(messages), ["resync"]);
  }
});
