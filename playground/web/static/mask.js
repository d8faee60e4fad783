// What an engine is handed of a draft tree: who sees whom, packed; positions; paths to the leaves.
import { h, s, toClipboard, visible } from "./kit.js";

const CELL = 9;
const SAID_MS = 2000;

/**
 * As `engine.interop.trees.buffers` computes them.
 * @typedef {object} Buffers
 * @property {number[][]} spec_decoding_packed_mask
 * @property {number[]} spec_decoding_position_offsets
 * @property {number[][]} retrieve_indices
 * @property {number[]} retrieve_next_token
 * @property {number[]} retrieve_next_sibling
 */

/** Whether a row, as int32 words, sees a column. */
export const sees = (words, column) => ((words[column >> 5] >>> (column & 31)) & 1) === 1;

/** A row of the mask as a picture, read from its packed words. */
function cells(words, row, count) {
  const svg = s("svg", { width: count * CELL, height: CELL, "aria-hidden": "true" });
  for (let column = 0; column < count; column += 1) {
    const kind = !sees(words, column) ? "no" : column === row ? "own" : "yes";
    svg.append(s("rect", { class: kind, x: column * CELL, width: CELL - 1, height: CELL - 1 }));
  }
  return svg;
}

/** The tables of one tree; drawn while they are open. */
export class MaskView {
  /**
   * @param {(open: boolean) => void} onToggle
   * @param {(node: number | null) => void} onPoint is told of the row under the pointer
   */
  constructor(onToggle = () => {}, onPoint = () => {}) {
    /** @type {{ buffers: Buffers, labels: string[], path: Set<number>, note: string } | null} */
    this.given = null;
    this.body = h("div", { class: "mask-body", tabindex: "0", role: "region",
      "aria-label": "tables of the draft tree" });
    const rowOf = ({ target }) => target instanceof Element ? target.closest("[data-row]") : null;
    this.body.addEventListener("pointerover", (event) => {
      const row = rowOf(event);
      onPoint(row ? Number(row.getAttribute("data-row")) : null);
    });
    this.body.addEventListener("pointerleave", () => onPoint(null));
    this.copy = h("button", { type: "button", class: "quiet", "aria-live": "polite",
      onclick: () => this.copyJson() }, "copy as JSON");
    this.host = h("details", { class: "mask", ontoggle: () => {
      onToggle(this.host.open);
      this.draw();
    } }, h("summary", {}, "Attention mask, positions and indices: what an engine receives"), this.copy,
    this.body);
  }

  get isOpen() { return this.host.open; }

  /**
   * @param {Buffers | null} buffers
   * @param {string[]} labels of the nodes
   * @param {Iterable<number>} path nodes to be marked
   * @param {string} note what the tables leave out
   */
  show(buffers, labels = [], path = [], note = "") {
    this.given = buffers && { buffers, labels, path: new Set(path), note };
    this.host.hidden = !buffers;
    this.draw();
  }

  /** @param {number | null} node whose row is marked */
  point(node) {
    for (const row of this.body.querySelectorAll("[data-row]")) {
      row.classList.toggle("pointed", node !== null && row.getAttribute("data-row") === String(node));
    }
  }

  async copyJson() {
    const copied = await toClipboard(JSON.stringify(this.given?.buffers));
    this.copy.textContent = copied ? "copied" : "not copied: the browser does not allow it here";
    setTimeout(() => { this.copy.textContent = "copy as JSON"; }, SAID_MS);
  }

  draw() {
    if (!this.isOpen || !this.given) return;
    const { buffers, labels, path, note } = this.given, mask = buffers.spec_decoding_packed_mask;
    const table = (titles, rows) => h("table", {},
      h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, ...rows));
    const row = (node) => h("tr", { class: path.has(node) ? "on" : "", "data-row": node },
      ...[node, visible(labels[node] ?? ""), buffers.spec_decoding_position_offsets[node],
        cells(mask[node], node, mask.length), mask[node].join(" "),
        buffers.retrieve_next_token[node], buffers.retrieve_next_sibling[node],
      ].map((cell) => h("td", {}, cell instanceof Node ? cell : String(cell))));
    this.body.replaceChildren(
      table(["row", "node", "offset", "sees the rows", "packed mask (int32)", "next token",
        "next sibling"], mask.map((_, node) => row(node))),
      table(["retrieve indices: rows from the root to each leaf"],
        buffers.retrieve_indices.map((rows) => h("tr", {}, h("td", {}, `[${rows.join(", ")}]`)))), note);
  }
}
