// The choice tree as a value, its edits, its history, its link and its layout.
import assert from "node:assert/strict";
import { test } from "node:test";

import { Choices, EDITS, EditHistory, fromLink, layoutChoices, linkOf }
  from "../../playground/web/static/tree/model.js";
import { neighbourOf } from "../../playground/web/static/trees.js";

const TREE = Choices.closed([[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]);

test("paths are closed under prefixes and in node order", () => {
  assert.deepEqual(TREE.keys,
    ["0", "1", "0.0", "0.1", "1.0", "1.1", "0.0.0", "0.1.0", "0.0.0.0"]);
  assert.equal(TREE.nodes.get("1.1"), 6);
  assert.deepEqual([TREE.size, TREE.depth, TREE.isChain], [9, 4, false]);
  assert.ok(Choices.chain(3).isChain);
});

test("edits make new trees, or say why not", () => {
  assert.equal(EDITS.child(TREE, "0").at, "0.2");
  assert.equal(EDITS.next(TREE, "0").at, "2");
  const removed = EDITS.remove(TREE, "0");
  assert.deepEqual(removed.tree.keys, ["1", "1.0", "1.1"]);
  assert.equal(removed.at, "1");
  assert.equal(TREE.size, 9);
  assert.match(EDITS.remove(TREE, "").fault, /root cannot be removed/);
  assert.match(EDITS.next(TREE, "").fault, /no siblings/);
  const limits = { depth: 4, ranks: 2, what: "Medusa" };
  assert.match(EDITS.child(TREE, "0.0.0.0", limits).fault, /drafts 4 deep/);
  assert.match(EDITS.next(TREE, "1", limits).fault, /offers ranks 0 to 1/);
});

test("history goes back and forth, and forgets what was undone", () => {
  const history = new EditHistory("a");
  assert.equal(history.go(-1), false);
  history.push("b");
  history.push("c");
  assert.ok(history.go(-1) && history.go(-1));
  assert.equal(history.now, "a");
  assert.ok(history.go(1));
  history.push("d");
  assert.equal(history.go(1), false);
  assert.equal(history.now, "d");
});

test("a link carries the leaves", () => {
  assert.equal(linkOf(TREE), "1.0_1.1_0.1.0_0.0.0.0");
  assert.ok(fromLink(linkOf(TREE)).equals(TREE));
  for (const bad of ["", "a", "0..1", "0_", "0.".repeat(70) + "0"]) assert.equal(fromLink(bad), null);
});

test("no two nodes of a layout share a place, and arrows follow it", () => {
  const layout = layoutChoices(TREE, new Set());
  const places = new Set(layout.order.map(({ x, y }) => `${x} ${y}`));
  assert.equal(places.size, TREE.size + 1);
  const to = (key, arrow) => neighbourOf(layout.order, layout.items.get(key), arrow)?.key;
  assert.equal(to("", "ArrowRight"), "0");
  assert.equal(to("0", "ArrowDown"), "1");
  const folded = layoutChoices(TREE, new Set(["0"]));
  assert.equal(folded.items.get("0").folded, 5);
  assert.equal(folded.items.has("0.0"), false);
});
