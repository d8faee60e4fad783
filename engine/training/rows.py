"""Texts of different length that are read side by side, one token of each per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engine.kernels.cpu.native import SideBySide
from engine.model.forward import MaskBuilder
from engine.model.target import Target

ALIGN = 8
"""Widths are multiples of this many columns, which CUDA's attention kernels want of masks."""


class Rows(ABC):
    """So many texts, each with its own keys and values."""

    @abstractmethod
    def begin(self, heads: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Read the beginnings of texts: pairs of a row and its tokens; what it held is dropped."""

    @abstractmethod
    def step(self, fed: Sequence[tuple[int, int, int]]) -> Tensor:
        """Read one token in each of some rows: row (ascending), token, position.

        Returns:
            logits `(len(fed), vocabulary)`.
        """


def rows_of(target: Target, count: int, max_len: int) -> Rows:
    """Room for `count` texts of up to `max_len` tokens each."""
    texts = target.texts(count * max_len)
    if texts is not None:
        return KernelRows(texts, max_len)
    return ModuleRows(target, count, max_len)


class KernelRows(Rows):
    """By the processor's kernels, which read any rows of any texts in one call."""

    def __init__(self, texts: SideBySide, max_len: int) -> None:
        self._texts = texts
        self._max_len = max_len

    def begin(self, heads: Sequence[tuple[int, Sequence[int]]]) -> None:
        tokens = [token for _, text in heads for token in text]
        positions = [place for _, text in heads for place in range(len(text))]
        begins = [row * self._max_len for row, text in heads for _ in text]
        self._texts.read(*map(torch.tensor, (tokens, positions, begins)))

    def step(self, fed: Sequence[tuple[int, int, int]]) -> Tensor:
        rows, tokens, positions = map(torch.tensor, zip(*fed, strict=True))
        output = self._texts.read(tokens, positions, rows * self._max_len, num_logits=len(fed))
        return output.logits


class ModuleRows(Rows):
    """By transformers' modules: keys and values lie at their positions, column = position.

    All rows are fed at every step; a row's mask ends at its own column.
    """

    def __init__(self, target: Target, count: int, max_len: int) -> None:
        self._target = target
        self._count, self._max_len = count, max_len
        self._masks = MaskBuilder(target.model)
        self._cache = _RowCache(count, max_len)

    def begin(self, heads: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Side by side, padded on the right, which causal rows never see."""
        device, width = self._target.device, max(len(tokens) for _, tokens in heads)
        ids = torch.zeros(len(heads), width, dtype=torch.long)
        for row, (_, tokens) in enumerate(heads):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        self._cache.begin(torch.tensor([i for i, _ in heads], device=device))
        positions = torch.arange(width, device=device).expand(len(heads), width)
        self._forward(ids.to(device), positions, self._mask(positions, width))

    def step(self, fed: Sequence[tuple[int, int, int]]) -> Tensor:
        """Rows that are not asked are fed something, where it does no harm: at their beginning."""
        device = self._target.device
        rows = torch.tensor([row for row, _, _ in fed], device=device)
        both = torch.zeros(2, self._count, dtype=torch.long, device=device)
        both[:, rows] = torch.tensor([pair[1:] for pair in fed], device=device).T
        ids, positions = both[0, :, None], both[1, :, None]
        longest = max(position for _, _, position in fed) + 1
        width = min(-(-longest // ALIGN) * ALIGN, self._max_len)
        self._cache.extend(positions[:, 0], width)
        return self._forward(ids, positions, self._mask(positions, width))[rows, -1]

    def _mask(self, positions: Tensor, width: int) -> Any:
        """Row r may look at columns up to its position, within the window if there is one."""
        masks, dtype = self._masks, self._target.dtype
        columns = torch.arange(width, device=positions.device)
        full = columns[None, None] <= positions[..., None]
        sliding = full
        if masks.window is not None:
            sliding = full & (columns[None, None] > positions[..., None] - masks.window)

        def finish(mask: Tensor) -> Tensor:
            if not masks.additive:
                return mask[:, None]
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            return zeros.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]

        if masks.per_kind:
            return {"full_attention": finish(full), "sliding_attention": finish(sliding)}
        return finish(sliding if masks.all_sliding else full)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Any) -> Tensor:
        out = self._target.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits
        return logits


class _RowCache(Cache):
    """Keys and values of a batch whose rows are at different positions."""

    def __init__(self, rows: int, max_len: int) -> None:
        super().__init__(layers=[])
        self._shape = (rows, max_len)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: Tensor | None = None
        self._columns = torch.empty(0)
        self._width = 0

    def begin(self, rows: Tensor) -> None:
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
        return tuple(  # type: ignore[return-value]
            self._write(buffer, states)
            for buffer, states in zip(
                self._layers[layer_idx], (key_states, value_states), strict=True
            )
        )

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
