// Which tab an address opens; tests/playground/test_address.py reads the same cases.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { tabOf } from "../../playground/web/static/address.js";

const CASES = JSON.parse(readFileSync(new URL("addresses.json", import.meta.url), "utf8"));

for (const [query, tab] of Object.entries(CASES)) {
  test(`?${query} opens ${tab}`, () => assert.equal(tabOf(new URLSearchParams(query)), tab));
}
