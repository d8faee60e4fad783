"""Rotary positions from tables that are filled once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 2048
"""Tables grow to the next multiple of this many positions."""


class Rotary(NamedTuple):
    """For the rows of one forward, `(n, 1, head_dim)` each; the first half of the sine negated."""

    cos: Tensor
    signed_sin: Tensor


class RotaryTable:
    """Cosines and sines of every position, as transformers' module makes them for this model."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """`module`: the model's `rotary_emb`, whose frequencies do not depend on the length."""
        self._frequencies: Tensor = module.inv_freq.detach().float()
        self._scaling = float(module.attention_scaling)
        self._dtype = dtype
        self._table = torch.empty(0)

    def rows(self, positions: Tensor) -> Rotary:
        """Of these positions `(n,)`."""
        return Rotary(*self._pairs(positions).unsqueeze(2).unbind(1))

    def halves(self, positions: Tensor) -> Tensor:
        """Of these positions `(n,)`: cosines of one half, then its sines, `(n, head_dim)`."""
        pairs = self._pairs(positions)
        half = pairs.shape[-1] // 2
        return torch.cat([pairs[:, 0, :half], pairs[:, 1, half:]], dim=-1)

    def _pairs(self, positions: Tensor) -> Tensor:
        last = int(positions.max())
        if last >= self._table.shape[0]:
            self._fill(-(-(last + 1) // BLOCK) * BLOCK)
        return self._table[positions]

    def _fill(self, count: int) -> None:
        angles = torch.arange(count, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        pairs = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1)
        self._table = pairs.to(self._dtype)
