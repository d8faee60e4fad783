// Which tab an address opens.
import assert from "node:assert/strict";
import test from "node:test";
import { tabOf } from "../../playground/web/static/address.js";

const CASES = {
  "": "generate",
  "tab=compare": "compare",
  "tab=generate&run=abc": "generate",
  "target=tiny&method=ngram": "generate",
  "run=abc": "runs",
  "run=abc&runs=%7B%7D": "runs",
  "runs=%7B%22sort%22%3A1%7D": "runs",
  "runs=a,b": "compare",
  "compare=abc": "compare",
  "tree=0.1&target=tiny": "tree",
  "benchmark=one": "benchmark",
  "sweep=one": "sweep",
  "deploy=vllm&of=run:1": "deploy",
  "__theme=dark": "generate",
};

for (const [query, tab] of Object.entries(CASES)) {
  test(`?${query} opens ${tab}`, () => assert.equal(tabOf(new URLSearchParams(query)), tab));
}
