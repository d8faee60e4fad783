"""Forwards of many texts of different length: one token of each per step, or as many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engine.model.forward import MaskBuilder, RaggedBatch, cache_argument
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape

ALIGN = 8
"""Widths are multiples of this many columns, which CUDA's attention kernels want of masks."""


def batch_of(target: Target, rows: int, max_len: int) -> NativeBatch | ModuleBatch | OneTextAtATime:
    """Room for `rows` texts of up to `max_len` tokens each.

    `prefill` reads the beginnings of texts: pairs of a row, which drops what it held, and tokens.
    `step` reads tokens in some rows, in each as many, one behind the other: row (ascending),
    token, position; it returns their logits `(tokens read, vocabulary)`. What it read stays until
    something else is read at that position: a rejected draft is overwritten. A row that is left
    out once is over; it is given another text before it is read again.
    `repeat` gives all rows the first `length` tokens of row 0.
    """
    if len(target.recurrent):
        return OneTextAtATime(target, rows)
    texts = target.ragged_batch(rows * max_len)
    return ModuleBatch(target, rows, max_len) if texts is None else NativeBatch(texts, max_len)


class NativeBatch:
    """By the processor's kernels, which read any rows of any texts in one call."""

    name = "compiled kernels, all rows in one call"

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

    def repeat(self, length: int) -> None:
        self._texts.repeat(length, every=self._max_len)


class ModuleBatch:
    """By transformers' modules: keys and values lie at their positions, column = position.

    Rows up to the last that is asked are fed at every step; a row's mask ends at its own column.
    """

    name = "transformers' modules, a batch dimension"

    def __init__(self, target: Target, rows: int, max_len: int) -> None:
        self._target = target
        self._max_len = max_len
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
        asked = torch.tensor(read, device=device)
        rows = asked[:, 0].unique()
        n = len(read) // len(rows)
        both = torch.arange(n, device=device).repeat(2, int(rows[-1]) + 1, 1)
        both[:, rows] = asked[:, 1:].T.unflatten(1, (len(rows), n))
        ids, positions = both
        longest = max(position for _, _, position in read) + 1
        width = min(-(-longest // ALIGN) * ALIGN, self._max_len)
        self._cache.extend(positions, width)
        return self._forward(ids, positions, width, num_logits=n)[rows].flatten(0, 1)

    def repeat(self, length: int) -> None:
        self._cache.repeat(length)

    def _forward(self, ids: Tensor, positions: Tensor, width: int, num_logits: int = 1) -> Tensor:
        out = self._target.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(positions, width),
            use_cache=True,
            logits_to_keep=num_logits,
            **{cache_argument(self._target.model): self._cache},
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


class OneTextAtATime:
    """By a cache for each text: a recurrent state has no columns that a mask could hide."""

    name = "transformers' modules, one text after the other"

    def __init__(self, target: Target, rows: int) -> None:
        self._target = target
        self._caches = [target.new_cache(0, rewinds=2) for _ in range(rows)]
        self._texts: list[list[int]] = [[] for _ in range(rows)]

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        for row, prompt in prompts:
            self._read(row, 0, prompt)

    def step(self, read: Sequence[tuple[int, int, int]]) -> Tensor:
        logits = []
        for row, tokens in itertools.groupby(read, key=lambda each: each[0]):
            _, ids, positions = zip(*tokens, strict=True)
            logits.append(self._read(row, positions[0], ids))
        return torch.cat(logits)

    def repeat(self, length: int) -> None:
        self.prefill([(row, self._texts[0][:length]) for row in range(1, len(self._texts))])

    def _read(self, row: int, position: int, tokens: Sequence[int]) -> Tensor:
        text, cache = self._texts[row], self._caches[row]
        text[position:] = tokens
        cache.truncate(position)
        unread = torch.tensor(text[cache.length :], device=self._target.device)
        chain = Proposal(unread, TreeShape.chain(len(unread) - 1))
        logits = self._target.verify(chain, cache, Needs()).logits
        cache.extend(len(unread))
        return logits[-len(tokens) :]


Batch = NativeBatch | ModuleBatch | OneTextAtATime


class _RowCache(Cache):
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
        """The next forward fills these columns `(rows, n)`; the longest row then has `width`."""
        self._new, self._columns, self._width = None, columns, width

    def repeat(self, length: int) -> None:
        for keys, values in self._layers.values():
            keys[1:, :, :length] = keys[:1, :, :length]
            values[1:, :, :length] = values[:1, :, :length]

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
        rows = torch.arange(len(states), device=buffer.device)
        buffer[rows[:, None], :, self._columns] = states.transpose(1, 2)
        return buffer[: len(states), :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._new is not None else self._width - self._columns.shape[1]

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1
