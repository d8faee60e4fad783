"""Finds a loaded model's matrices in the GGUF file that it came from, in the model's row order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.gguf import Blocks, GGUFFile

NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
"""transformers' names of a decoder layer's matrices → GGUF's."""
SAMPLE = 7
"""Every so many rows are compared with the model's own; odd, to meet every place within a head."""


class GGUFMatrices:
    """4-bit matrices of a model's decoder layers."""

    def __init__(self, file: GGUFFile, head_dim: int) -> None:
        self._file = file
        self._head_dim = head_dim

    def find(self, owner: Any, layer: int, names: Sequence[str]) -> Blocks | None:
        """These linear modules of a layer, one above the other.

        None if one of them is not held in 4 bits, or holds other values than the model.
        """
        found = [self._one(getattr(owner, name).weight, layer, name) for name in names]
        if any(blocks is None for blocks in found):
            return None
        parts = [blocks for blocks in found if blocks is not None]
        return Blocks(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
        )

    def _one(self, weight: Tensor, layer: int, name: str) -> Blocks | None:
        blocks = self._file.blocks(f"blk.{layer}.{NAMES[name]}.weight")
        if blocks is None or blocks.codes.shape != weight.shape:
            return None
        orders = [torch.arange(len(weight))]
        if name in ("q_proj", "k_proj"):
            orders.append(rotary_order(len(weight), self._head_dim))
        fits = (blocks.rows(order) for order in orders if _same(blocks, weight, order))
        return next(fits, None)


def rotary_order(rows: int, head_dim: int) -> Tensor:
    """Rows of GGUF's query and key matrices in transformers' order.

    GGUF's Llama files turn neighbouring columns of a head, transformers turns its halves: row
    2 i + j of a head there is row i + j · head_dim / 2 here. Example, head_dim 4: 0 2 1 3.
    """
    pairs = torch.arange(rows).view(-1, head_dim // 2, 2)
    return pairs.transpose(1, 2).flatten()


def _same(blocks: Blocks, weight: Tensor, order: Tensor) -> bool:
    values = blocks.rows(order[::SAMPLE]).dequantised()
    return torch.equal(values.to(weight.dtype), weight[::SAMPLE])
