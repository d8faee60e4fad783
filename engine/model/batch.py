"""Forwards over several texts of different length at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engine.model.forward import MaskBuilder, RaggedBatch, cache_argument
from engine.model.target import Target
from engine.proposal import Needs, Proposal, TargetOutput
from engine.tree import TreeShape

ALIGN = 8
"""Widths are multiples of this many columns, which CUDA's attention kernels want of masks."""


Text = tuple[int, int, Sequence[int]]
"""A row, the position of the first new token of its text, and the new tokens."""


class TextBatch:
    """Texts of different length that are read in lock-step, each in a row of its own.

    What was read stays until something else is read at the same position: a rejected draft is
    overwritten. A row that is left out of a step is over, and starts with another text.

    Attributes:
        mixes_lengths: whether a forward may read any number of tokens of each text.
    """

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        """Room for texts of up to `max_len` tokens each."""
        self._max_len = max_len
        if len(target.recurrent):
            self._texts: Texts = _OneTextAtATime(target, num_texts, max_len)
        else:
            native = target.ragged_batch(num_texts * max_len)
            self._texts = native or _PaddedTexts(target, num_texts, max_len)
        self.name = self._texts.name
        self.mixes_lengths = isinstance(self._texts, RaggedBatch)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Read the beginnings of texts: pairs of a row and token ids."""
        self._read(_rows_of([(row, 0, prompt) for row, prompt in prompts]), 0)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits `(tokens, vocab)` of new tokens.

        Args:
            tokens: row (ascending), token id, position; equally many of each row.
        """
        return self._read(tokens, len(tokens)).logits

    def advance(self, texts: Sequence[Text]) -> TargetOutput:
        """Read new tokens of texts; the output has a row for each text's last one.

        Args:
            texts: by ascending row. Without `mixes_lengths`, only a beginning may be more than one
                token, and all texts that go on must be there.
        """
        earlier = _rows_of([(row, begin, tokens[:-1]) for row, begin, tokens in texts])
        last = _rows_of([(row, begin + len(t) - 1, t[-1:]) for row, begin, t in texts])
        if earlier and not self.mixes_lengths:
            self._read(earlier, 0)
            earlier = []
        return self._read([*earlier, *last], len(last))

    def repeat(self, length: int) -> None:
        """Give all rows the first `length` tokens of row 0."""
        self._texts.repeat(length, every=self._max_len)

    def _read(self, tokens: Sequence[tuple[int, int, int]], num_logits: int) -> TargetOutput:
        rows, ids, positions = map(torch.tensor, zip(*tokens, strict=True))
        return self._texts.read(ids, positions, rows * self._max_len, num_logits=num_logits)


def _rows_of(texts: Sequence[Text]) -> list[tuple[int, int, int]]:
    """Row, token id and position of every token."""
    return [(row, t, begin + i) for row, begin, tokens in texts for i, t in enumerate(tokens)]


class _PaddedTexts:
    """transformers' modules over a padded batch: keys and values lie at column = position.

    A step feeds all rows up to the last one that it reads; a row's mask ends at its own column.
    """

    name = "transformers' modules, a batch dimension"

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        self._target = target
        self._max_len = max_len
        self._masks = MaskBuilder(target.model)
        self._cache = _RowCache(num_texts, max_len)

    def read(
        self, tokens: Tensor, positions: Tensor, begins: Tensor, *, num_logits: int
    ) -> TargetOutput:
        """As `RaggedBatch.read`; logits of all tokens or, of prompts, of none."""
        device = self._target.device
        rows, text, counts = torch.unique_consecutive(
            begins // self._max_len, return_inverse=True, return_counts=True
        )
        column = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[text]
        # Prompts lie side by side, padded on the right, which causal rows never see. Rows left out
        # of a step are over: what is fed at their beginning does no harm.
        n = width = int(counts.max())
        if num_logits:
            text, longest = rows[text], int(positions.max()) + 1
            width = min(-(-longest // ALIGN) * ALIGN, self._max_len)
        batch = torch.arange(n).repeat(2, int(text.max()) + 1, 1)
        batch[:, text, column] = torch.stack([tokens, positions])
        ids, places = batch.to(device)
        if num_logits:
            self._cache.extend(places, width)
        else:
            self._cache.prefill(rows.to(device))
        out = self._target.model(
            input_ids=ids,
            position_ids=places,
            attention_mask=self._mask(places, width),
            use_cache=True,
            logits_to_keep=n if num_logits else 1,
            **{cache_argument(self._target.model): self._cache},
        )
        logits = out.logits[text.to(device), column.to(device)] if num_logits else out.logits[:0, 0]
        return TargetOutput(logits)

    def repeat(self, length: int, *, every: int) -> None:
        self._cache.repeat(length)

    def _mask(self, positions: Tensor, width: int) -> Any:
        """Row r may look at columns up to its position, within the window if there is one."""
        columns = torch.arange(width, device=positions.device)
        full = columns[None, None] <= positions[..., None]
        sliding, window = full, self._masks.window
        if window is not None:
            sliding = full & (columns[None, None] > positions[..., None] - window)
        return self._masks.as_wanted(full, sliding, self._target.dtype)


class _OneTextAtATime:
    """One cache per text: a recurrent state has no columns that a mask could hide."""

    name = "transformers' modules, one text after the other"

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        self._target = target
        self._max_len = max_len
        self._caches = [target.new_cache(0, rewinds=2) for _ in range(num_texts)]
        self._texts: list[list[int]] = [[] for _ in range(num_texts)]

    def read(
        self, tokens: Tensor, positions: Tensor, begins: Tensor, *, num_logits: int
    ) -> TargetOutput:
        """As `RaggedBatch.read`; logits of all tokens."""
        rows, counts = torch.unique_consecutive(begins // self._max_len, return_counts=True)
        ids, starts = (each.split(counts.tolist()) for each in (tokens, positions))
        logits = [
            self._read(row, int(start[0]), part.tolist())
            for row, start, part in zip(rows.tolist(), starts, ids, strict=True)
        ]
        return TargetOutput(torch.cat(logits))

    def repeat(self, length: int, *, every: int) -> None:
        for row in range(1, len(self._texts)):
            self._read(row, 0, self._texts[0][:length])

    def _read(self, row: int, position: int, tokens: Sequence[int]) -> Tensor:
        text, cache = self._texts[row], self._caches[row]
        text[position:] = tokens
        cache.truncate(position)
        unread = torch.tensor(text[cache.length :], device=self._target.device)
        chain = Proposal(unread, TreeShape.chain(len(unread) - 1))
        logits = self._target.verify(chain, cache, Needs()).logits
        cache.extend(len(unread))
        return logits[-len(tokens) :]


Texts = RaggedBatch | _PaddedTexts | _OneTextAtATime


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
