// What an engine receives of a draft tree: packed attention mask, positions, paths to the leaves.
import { copyButton, h, s, table, visible } from "./kit.js";

const CELL = 9;

/**
 * The buffers that `engine.tree.tree_buffers` computes.
 * @typedef {{ spec_decoding_packed_mask: number[][], spec_decoding_position_offsets: number[],
 *   retrieve_indices: number[][], retrieve_next_token: number[], retrieve_next_sibling: number[] }} Buffers
 */

/** Whether a row of the mask, as int32 words, sees a column. */
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

/** The tables of one tree; drawn only while they are open. */
export class MaskView {
  /** @param {(node: number | null) => void} onPoint called with the row under the pointer */
  constructor(onPoint = () => {}) {
    this.content = null;
    this.body = h("div", { class: "mask-body", tabindex: "0", role: "region",
      "aria-label": "tables of the draft tree" });
    this.body.addEventListener("pointerover", ({ target }) => {
      const row = /** @type {Element} */ (target).closest("[data-row]");
      onPoint(row ? Number(row.getAttribute("data-row")) : null);
    });
    this.body.addEventListener("pointerleave", () => onPoint(null));
    this.host = h("details", { class: "mask", ontoggle: () => this.draw() },
      h("summary", {}, "Attention mask, positions and indices: what an engine receives"),
      copyButton("copy as JSON", () => JSON.stringify(this.content?.buffers)), this.body);
  }

  get isOpen() { return this.host.open; }

  /**
   * @param {Buffers | null} buffers
   * @param {string[]} labels of the nodes
   * @param {Iterable<number>} path nodes to highlight
   * @param {string} note what the tables omit
   */
  show(buffers, labels = [], path = [], note = "") {
    this.content = buffers && { buffers, labels, path: new Set(path), note };
    this.host.hidden = !buffers;
    this.draw();
  }

  /** @param {number | null} node the node whose row is highlighted */
  highlight(node) {
    for (const row of this.body.querySelectorAll("[data-row]")) {
      row.classList.toggle("pointed", node !== null && row.getAttribute("data-row") === String(node));
    }
  }

  draw() {
    if (!this.isOpen || !this.content) return;
    const { buffers, labels, path, note } = this.content, mask = buffers.spec_decoding_packed_mask;
    const rows = mask.map((words, node) => ({ on: path.has(node), "data-row": node, cells: [`${node}`,
      visible(labels[node] ?? ""), `${buffers.spec_decoding_position_offsets[node]}`,
      cells(words, node, mask.length), words.join(" "), `${buffers.retrieve_next_token[node]}`,
      `${buffers.retrieve_next_sibling[node]}`] }));
    this.body.replaceChildren(
      table(["row", "node", "offset", "sees the rows", "packed mask (int32)", "next token",
        "next sibling"], rows),
      table(["retrieve indices: rows from the root to each leaf"],
        buffers.retrieve_indices.map((leaf) => ({ cells: [`[${leaf.join(", ")}]`] }))), note);
  }
}
