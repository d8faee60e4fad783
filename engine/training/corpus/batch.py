"""Forwards of many texts of different length: one token of each per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engine.model.forward import MaskBuilder, RaggedBatch
from engine.model.target import Target

ALIGN = 8
"""Widths are multiples of this many columns, which CUDA's attention kernels want of masks."""


def batch_of(target: Target, rows: int, max_len: int) -> NativeBatch | ModuleBatch:
    """Room for `rows` texts of up to `max_len` tokens each.

    `prefill` reads the beginnings of texts: pairs of a row, which drops what it held, and tokens.
    `step` reads a token in each of some rows: row (ascending), token, position; it returns logits
    `(rows read, vocabulary)`.
    """
    texts = target.ragged_batch(rows * max_len)
    return ModuleBatch(target, rows, max_len) if texts is None else NativeBatch(texts, max_len)


class NativeBatch:
    """By the processor's kernels, which read any rows of any texts in one call."""

    def __init__(self, texts: RaggedBatch, max_len: int) -> None:
        self._texts = texts
        self._max_len = max_len

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        tokens = [token for _, prompt in prompts for token in prompt]
        positions = [position for _, prompt in prompts for position in range(len(prompt))]
        begins = [row * self._max_len for row, prompt in prompts for _ in prompt]
        self._texts.read(*map(torch.tensor, (tokens, positions, begins)))

    def step(self, read: Sequence[tuple[int, int, int]]) -> Tensor:
        rows, tokens, positions = map(torch.tensor, zip(*read, strict=True))
        begins = rows * self._max_len
        return self._texts.read(tokens, positions, begins, num_logits=len(read)).logits


class ModuleBatch:
    """By transformers' modules: keys and values lie at their positions, column = position.

    All rows are fed at every step; a row's mask ends at its own column.
    """

    def __init__(self, target: Target, rows: int, max_len: int) -> None:
        self._target = target
        self._num_rows, self._max_len = rows, max_len
        self._masks = MaskBuilder(target.model)
        self._cache = _RowCache(rows, max_len)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Side by side, padded on the right, which causal rows never see."""
        device, width = self._target.device, max(len(tokens) for _, tokens in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for k, (_, tokens) in enumerate(prompts):
            ids[k, : len(tokens)] = torch.tensor(tokens)
        self._cache.prefill(torch.tensor([row for row, _ in prompts], device=device))
        positions = torch.arange(width, device=device).expand(len(prompts), width)
        self._forward(ids.to(device), positions, width)

    def step(self, read: Sequence[tuple[int, int, int]]) -> Tensor:
        """Rows that are not asked are fed something, where it does no harm: at their beginning."""
        device = self._target.device
        rows = torch.tensor([row for row, _, _ in read], device=device)
        both = torch.zeros(2, self._num_rows, dtype=torch.long, device=device)
        both[:, rows] = torch.tensor([pair[1:] for pair in read], device=device).T
        ids, positions = both[0, :, None], both[1, :, None]
        longest = max(position for _, _, position in read) + 1
        width = min(-(-longest // ALIGN) * ALIGN, self._max_len)
        self._cache.extend(positions[:, 0], width)
        return self._forward(ids, positions, width)[rows, -1]

    def _forward(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        out = self._target.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(positions, width),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits
        return logits

    def _mask(self, positions: Tensor, width: int) -> Any:
        """Row r may look at columns up to its position, within the window if there is one."""
        columns = torch.arange(width, device=positions.device)
        full = columns[None, None] <= positions[..., None]
        sliding, window = full, self._masks.window
        if window is not None:
            sliding = full & (columns[None, None] > positions[..., None] - window)
        return self._masks.as_wanted(full, sliding, self._target.dtype)


class _RowCache(Cache):
    """Keys and values of a batch whose rows are at different positions."""

    def __init__(self, rows: int, max_len: int) -> None:
        super().__init__(layers=[])
        self._shape = (rows, max_len)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: Tensor | None = None
        self._columns = torch.empty(0)
        self._width = 0

    def prefill(self, rows: Tensor) -> None:
        """The next forward reads the beginnings of these rows."""
        self._new = rows

    def extend(self, columns: Tensor, width: int) -> None:
        """The next forward adds one column per row; the longest row then has `width`."""
        self._new, self._columns, self._width = None, columns, width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._make(key_states), self._make(value_states))
        keys, values = self._layers[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _make(self, states: Tensor) -> Tensor:
        rows, max_len = self._shape
        return states.new_zeros(rows, states.shape[1], max_len, states.shape[3])

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        if self._new is not None:
            buffer[self._new, :, : states.shape[2]] = states
            return states
        rows = torch.arange(len(buffer), device=buffer.device)
        buffer[rows, :, self._columns] = states[:, :, 0]
        return buffer[:, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._new is not None else self._width - 1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1
