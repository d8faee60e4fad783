"""Forwards over several texts of different length at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.cache import TreeCache
from engine.model.forward import MaskBuilder, RaggedBatch
from engine.model.kv import KVBuffers, as_texts, in_texts
from engine.model.layer_types import kv_layers
from engine.model.target import Target
from engine.proposal import Needs, Proposal, TargetOutput
from engine.tree import TreeShape

ALIGN = 8
"""Widths are multiples of this many columns, which CUDA's attention kernels want of masks."""


RowTokens = tuple[int, int, Sequence[int]]
"""A row of the batch, the position of its first new token, and the new token ids."""


class TextBatch:
    """Texts of different lengths that are read in lock-step, each in a row of its own.

    Keys and values stay until others are stored at the same position: a rejected draft is
    overwritten. A row that is left out of a step has ended, and is reused for another text.

    Attributes:
        is_ragged: whether a forward may read a different number of tokens per text.
    """

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        """Room for texts of up to `max_len` tokens each."""
        self._max_len = max_len
        if not target.can_pack_texts:
            self._texts: _Batch = _SequentialBatch(target, num_texts, max_len)
        else:
            native = target.ragged_batch(num_texts * max_len)
            self._texts = native or _PaddedBatch(target, num_texts, max_len)
        self.name = self._texts.name
        self.is_ragged = isinstance(self._texts, RaggedBatch)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits `(tokens, vocab)` of new tokens.

        Args:
            tokens: row (ascending), token id, position; equally many of each row.
        """
        return self._read(tokens, len(tokens)).logits

    def advance(self, texts: Sequence[RowTokens]) -> TargetOutput:
        """Read new tokens of texts; the output has a row for each text's last one.

        Args:
            texts: by ascending row. Unless `is_ragged`, only a new text may have more than one
                token, and every text in progress must be among them.
        """
        earlier = _rows_of([(row, begin, tokens[:-1]) for row, begin, tokens in texts])
        last = _rows_of([(row, begin + len(t) - 1, t[-1:]) for row, begin, t in texts])
        if earlier and not self.is_ragged:
            self._read(earlier, 0)
            earlier = []
        return self._read([*earlier, *last], len(last))

    def repeat(self, length: int) -> None:
        """Give all rows the first `length` tokens of row 0."""
        self._texts.repeat(length, every=self._max_len)

    def _read(self, tokens: Sequence[tuple[int, int, int]], num_logits: int) -> TargetOutput:
        rows, ids, positions = map(torch.tensor, zip(*tokens, strict=True))
        return self._texts.read(ids, positions, rows * self._max_len, num_logits=num_logits)


def _rows_of(texts: Sequence[RowTokens]) -> list[tuple[int, int, int]]:
    """Row, token id and position of every token."""
    return [(row, t, begin + i) for row, begin, tokens in texts for i, t in enumerate(tokens)]


class _PaddedBatch:
    """transformers' modules over a padded batch; keys and values are stored at column = position.

    A step feeds all rows up to the last one that it reads; a row's mask ends at its own column.
    """

    name = "transformers' modules, a batch dimension"

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        self._target, self._max_len = target, max_len
        self._masks = MaskBuilder(target.model)
        layers = len(kv_layers(target.config))
        kv = KVBuffers(layers, num_texts * max_len, zeroed=True)
        self._cache = TreeCache(layers, kv=kv)
        self._rope_len = target.long_rope.shortest_alike(max_len)

    def read(
        self, tokens: Tensor, positions: Tensor, text_starts: Tensor, *, num_logits: int
    ) -> TargetOutput:
        """As `RaggedBatch.read`; logits of all tokens or, of prompts, of none."""
        device = self._target.device
        rows, text, counts = torch.unique_consecutive(
            text_starts // self._max_len, return_inverse=True, return_counts=True
        )
        column = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[text]
        # Prompts are padded on the right, where causal rows never look. Rows left out of a step
        # have ended: what is fed at their first positions does no harm.
        n = width = int(counts.max())
        if num_logits:
            text, longest = rows[text], int(positions.max()) + 1
            width = min(-(-longest // ALIGN) * ALIGN, self._max_len)
        batch = torch.arange(n).repeat(2, int(text.max()) + 1, 1)
        batch[:, text, column] = torch.stack([tokens, positions])
        ids, columns = batch.to(device)
        cache, every = self._cache, self._max_len
        cache.length = width - n
        if num_logits:
            cache.plan = in_texts(columns, width, every=every)
        else:
            cache.plan = as_texts(rows, every=every)
        keys = torch.arange(width, device=device)
        visible = keys <= columns[..., None]
        dtype = self._target.dtype
        with self._target.long_rope.using(self._rope_len):
            out = self._target.model(
                input_ids=ids,
                position_ids=columns,
                attention_mask=self._masks.for_model(visible, keys, columns, dtype),
                use_cache=True,
                logits_to_keep=n if num_logits else 1,
                cache=cache,
            )
        logits = out.logits[text.to(device), column.to(device)] if num_logits else out.logits[:0, 0]
        return TargetOutput(logits)

    def repeat(self, length: int, *, every: int) -> None:
        self._cache.kv.repeat(length, every=every)


class _SequentialBatch:
    """One cache per text: masks do not apply to recurrent states, nor to layers that count rows."""

    name = "transformers' modules, one text after the other"

    def __init__(self, target: Target, num_texts: int, max_len: int) -> None:
        self._target = target
        self._max_len = max_len
        caches = (target.new_cache(0, rewinds=2, text_len=max_len) for _ in range(num_texts))
        self._caches = list(caches)
        self._texts: list[list[int]] = [[] for _ in range(num_texts)]

    def read(
        self, tokens: Tensor, positions: Tensor, text_starts: Tensor, *, num_logits: int
    ) -> TargetOutput:
        """As `RaggedBatch.read`; logits of all tokens."""
        rows, counts = torch.unique_consecutive(text_starts // self._max_len, return_counts=True)
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


_Batch = RaggedBatch | _PaddedBatch | _SequentialBatch
