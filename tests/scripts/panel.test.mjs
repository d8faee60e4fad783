// Text offsets, the draft tree's layout, and the race's clock.
import assert from "node:assert/strict";
import { test } from "node:test";

import { numReached } from "../../playground/web/static/compare/race.js";
import { clip, probability, visible } from "../../playground/web/static/kit.js";
import { foldImprobable, layoutTree, withBonus }
  from "../../playground/web/static/panel/draft_tree.js";
import { lengthCounts } from "../../playground/web/static/panel/panel.js";
import { firstChoices, framesOf } from "../../playground/web/static/panel/walk.js";
import { mostInstructive, mostWasteful } from "../../playground/web/static/panel/timeline.js";
import { neighbourOf } from "../../playground/web/static/trees.js";
import { Track, dimTail } from "../../playground/web/static/panel/text.js";

function track(pieces, end = null) {
  const made = new Track({ id: "r" }, null);
  made.events = pieces.map((piece, n) => [n, [piece], 0, 0, [], 0]);
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

test("the tail that is dimmed begins in the middle of a piece", async () => {
  const dimmed = (texts, units) => onPage(() => {
    const spans = texts.map((textContent) => ({ textContent, classList: { contains: () => false }, after() {} }));
    dimTail({ children: spans }, units);
    return spans.map(({ textContent, className }) => className === "cut" ? "" : textContent);
  });
  assert.deepEqual(await dimmed(["abc", "defg", "hi"], 0), ["abc", "defg", "hi"]);
  assert.deepEqual(await dimmed(["abc", "defg", "hi"], 1), ["abc", "defg", "h"]);
  assert.deepEqual(await dimmed(["abc", "defg", "hi"], 2), ["abc", "defg", ""]);
  assert.deepEqual(await dimmed(["abc", "defg", "hi"], 5), ["abc", "d", ""]);
  assert.deepEqual(await dimmed(["abc"], 9), [""]);
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

test("what was accepted beyond the end of the text is not on the path", () => {
  const nodes = withBonus({ ...STEP, num_committed: 1 });
  assert.deepEqual(nodes.map(({ accepted }) => accepted), [true, true, false, false]);
  assert.match(framesOf({ ...STEP, num_committed: 1 }, false).at(-2).text, /ends here: of 3 tokens, the first one is/);
});

/** A node with so many children, the first of which was accepted; ranks fall in probability. */
function wide(children) {
  const probs = Array.from({ length: children }, (_, i) => 1 / (i + 2));
  return { ...STEP, token_texts: ["r", ...probs.map((_, i) => `c${i}`)], accepted: [1],
    parents: [-1, ...probs.map(() => 0)], draft_probs: [null, ...probs],
    target_probs: [null, ...probs], tokens: Array(children + 1).fill(7),
    ranks: [0, ...probs.map((_, i) => i)] };
}

test("the least probable siblings are folded into one node, never the accepted path", () => {
  const nodes = withBonus(wide(20));
  assert.equal(foldImprobable(nodes, 30, new Set()).length, nodes.length);
  const few = foldImprobable(nodes, 6, new Set());
  assert.deepEqual(few.map(({ label }) => label), ["r", "c0", "e", "c1", "c2", "c3", "c4", "+15"]);
  assert.equal(layoutTree(few).placed.filter(({ children }) => !children.length).length, 6);
  assert.equal(foldImprobable(nodes, 6, new Set([0])).length, nodes.length, "opened");
  const chain = { ...wide(1), token_texts: Array(30).fill("x"), parents: Array.from({ length: 30 }, (_, i) => i - 1),
    accepted: Array.from({ length: 29 }, (_, i) => i + 1), draft_probs: Array(30).fill(0.01),
    target_probs: Array(30).fill(0.01), tokens: Array(30).fill(7), ranks: Array(30).fill(0) };
  assert.equal(foldImprobable(withBonus(chain), 1, new Set()).length, 31);
});

test("what lies below a folded node is counted with it", () => {
  const nodes = withBonus({ ...STEP, token_texts: [...STEP.token_texts, "x"], tokens: [1, 2, 3, 4, 9],
    parents: [...STEP.parents, 2], draft_probs: [...STEP.draft_probs, 0.9],
    target_probs: [...STEP.target_probs, 0.9], ranks: [...STEP.ranks, 0] });
  const more = foldImprobable(nodes, 1, new Set()).find(({ kind }) => kind === "more");
  assert.equal(more?.label, "+2");
});

test("a tree of 59 nodes fills the width, its labels at full size", () => {
  const step = wide(59), nodes = foldImprobable(withBonus(step), 14, new Set());
  const { placed, width, height } = layoutTree(nodes, 1000);
  assert.ok(height <= 14 * 26 + 6 && width <= 1000);
  assert.ok(Math.max(...placed.map(({ x }) => x)) > 300, "columns are spread");
  const chain = layoutTree(withBonus({ ...STEP, token_texts: Array(9).fill("word"), accepted: [],
    parents: Array.from({ length: 9 }, (_, i) => i - 1), draft_probs: Array(9).fill(0.5),
    target_probs: Array(9).fill(0.5), tokens: Array(9).fill(7), ranks: Array(9).fill(0) }), 1000);
  assert.ok(chain.width > 950 && chain.width <= 1001);
});

test("with the root on top depth goes down", () => {
  const { placed } = layoutTree(withBonus(STEP), 600, true);
  for (const item of placed.slice(1)) assert.ok(item.y > item.parentItem.y);
  assert.ok(placed[1].x < placed[2].x && placed[1].y === placed[2].y);
});

test("a walk goes from the root to the commit, in the order of a step", () => {
  const frames = framesOf(STEP, false);
  const words = [/The root/, /guesses the next token/, /Depth 2/, /a row of one forward/, /must not see/,
    /One forward of the target/, /.b., and it was drafted/, /.d., and it was drafted/, /accepted to its end/,
    /Committed: 2 accepted drafts/, /Chain against tree/];
  assert.equal(frames.length, words.length);
  frames.forEach(({ text }, i) => assert.match(text, words[i]));
  assert.deepEqual(frames.map(({ depth }) => depth), [0, 1, ...Array(9).fill(2)]);
  assert.equal(frames.findIndex(({ probs }) => probs), 5);
  assert.deepEqual(frames.slice(6, 9).map(({ judged }) => judged), [1, 2, 2]);
  const rejected = framesOf({ ...STEP, accepted: [1], recovered: true }, false);
  assert.match(rejected.find(({ rejected }) => rejected).text, /target's own choice is .e.; drafted was .d/);
  const sibling = framesOf({ ...STEP, accepted: [1] }, false).filter(({ row }) => row !== null);
  assert.deepEqual(sibling.map(({ row }) => row), [1, 2]);
  assert.match(sibling[1].text, /must not see/);
});

test("a walk tells draws from choices, and says what a step without drafts is", () => {
  const drawn = framesOf({ ...STEP, accepted: [1], recovered: true }, true).map(({ text }) => text).join(" ");
  assert.match(drawn, /drawn from the residual/);
  assert.doesNotMatch(drawn, /own choice/);
  const plain = { ...STEP, token_texts: ["a"], parents: [-1], accepted: [], draft_probs: [null],
    target_probs: [null], tokens: [1], ranks: [0] };
  assert.equal(framesOf(plain, false).length, 3);
  assert.match(framesOf(plain, false)[1].text, /Nothing was drafted/);
});

test("a chain of as many drafts is what the first choices would have been", () => {
  assert.deepEqual(firstChoices(STEP), { length: 2, kept: 2 });
  const second = { ...STEP, accepted: [2] };
  assert.deepEqual(firstChoices(second), { length: 2, kept: 0 });
  assert.match(framesOf(second, false).at(-1).text, /kept 0 here, the tree kept 1.*choice 2 of the drafter/);
  assert.match(framesOf(STEP, false).at(-1).text, /at least these 2/);
  const chain = { ...STEP, parents: [-1, 0, 1, 2], ranks: [0, 0, 0, 0] };
  assert.match(framesOf(chain, false).at(-1).text, /This draft is a chain/);
});

test("accepted lengths follow from the counts of at least so many", () => {
  assert.deepEqual(lengthCounts([3, 1, 1], 6), [3, 2, 0, 1]);
  assert.deepEqual(lengthCounts([], 4), [4]);
});

const step = (tokens, accepted, ...ms) => [1, Array(tokens).fill("x"), accepted, 1, [], 4, ms];
const STEPS = [step(1, 0, 1, 8, 0, 1), step(4, 3, 1, 8, 0, 1), step(2, 1, 1, 8, 0, 11)];

test("the best step has the most accepted drafts beside a rejected one", () => {
  assert.deepEqual(mostInstructive(STEPS), [1, 2, 0]);
  const whole = [4, Array(5).fill("x"), 4, 1, [], 4, [1, 8, 0, 1, 0]];
  const large = [5, ["x", "x"], 1, 2, ["y"], 59, [1, 8, 0, 1, 0]];
  assert.deepEqual(mostInstructive([...STEPS, whole, large]), [1, 4, 2, 3, 0]);
  assert.deepEqual(mostWasteful([...STEPS, whole, large])[0], 4);
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
  assert.equal(neighbourOf(placed, placed[0], "ArrowDown", true), placed[1], "the root on top");
});

test("the race counts the commits that have happened", () => {
  const moments = [5, 9, 9, 30];
  assert.deepEqual([0, 5, 8, 9, 29, 30, 99].map((ms) => numReached(moments, ms)),
    [0, 1, 1, 3, 3, 4, 4]);
});

test("probabilities and tokens in few characters", () => {
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

/** What some work gives where there is a page. */
async function onPage(work) {
  const before = { document: globalThis.document, location: globalThis.location };
  Object.assign(globalThis, { document: anyNode(), location: { search: "", href: "http://x/" } });
  const result = await work();
  Object.assign(globalThis, before);
  return result;
}

const triggeredBy = (messages) => onPage(async () => {
  const { Panels } = await import("../../playground/web/static/panel/panels.js");
  const events = [];
  const panels = Object.create(Panels.prototype);
  Object.assign(panels, {
    component: { trigger: (name) => events.push(name), element: { dataset: {} }, server: {} },
    options: {}, host: { dataset: {} }, panels: [{ open() {}, status() {}, text: { unread: [] } }], stream: null, seq: -1,
    byRun: new Map(), ends: new Map(), live: new Map(), replacedStreams: new Set(),
    clear() {}, resync: () => events.push("resync"),
  });
  for (const message of messages) panels.receive(message);
  return events;
});

const MESSAGE = { stream: "s", runs: [{ id: "r", mode: "chat", prompt: "p" }], batches: "{}" };

test("a run that the page itself started clears the prompt", async () => {
  assert.deepEqual(await triggeredBy([{ ...MESSAGE, seq: 0 }, { ...MESSAGE, seq: 1 }]), ["begun"]);
});

test("a run that is followed after a reload does not, and is fetched once", async () => {
  for (const first of [0, 3]) {  // whichever message the page sees first
    const messages = [first, first + 1].map((seq) => ({ ...MESSAGE, seq, resync: true }));
    assert.deepEqual(await triggeredBy(messages), ["resync"]);
  }
});
