"""EAGLE's levels as recordings: what its layer launches, per number of entries and of rows.

The layer's rows lie at fixed addresses that outlast a generation. Prompts run as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.drafters.eagle_head import DraftHead, HeadCache, look
from engine.drafters.eagle_session import HeadSession
from engine.kernels.cuda.buckets import context_bucket, row_bucket
from engine.kernels.cuda.inputs import RowInputs
from engine.kernels.cuda.recorder import CaptureError, Recorder, Recording
from engine.model.target import Target

LOG = logging.getLogger(__name__)
WIDTH = 256
"""Most tree entries since the last base entry; a larger tree runs eagerly."""


class Size(NamedTuple):
    """What a recording is for."""

    entries: int
    context: int


class StaticHeadCache(HeadCache):
    """Rows at fixed addresses, as long as they suffice."""

    @torch.inference_mode()
    def clear(self) -> None:
        """Begin anew; what is there is wiped."""
        self.num_base = self.num_tree = 0
        if self._rows is not None:
            self._rows.zero_()

    def room(self, more: int) -> Tensor | None:
        """`(2, kv_heads, capacity, head_dim)` with room for so many rows more.

        None before the first entry, which makes them.
        """
        if self._rows is None:
            return None
        used = self.num_base + self.num_tree
        return self._reserve(self._rows[0], used, used + more)

    def _reserve(self, like: Tensor, used: int, end: int) -> Tensor:
        if self._rows is None or self._rows.shape[2] < end:
            capacity = context_bucket(max(end, 2 * used))
            # Rows that nobody sees are multiplied with zero: they must not be NaN.
            grown = like.new_zeros(2, like.shape[0], capacity, like.shape[2])
            if self._rows is not None:
                grown[:, :, :used] = self._rows[:, :, :used]
            self._rows = grown
        return self._rows


class _Places:
    """The past of a recorded layer: rows go where a tensor says."""

    def __init__(self, rows: Tensor, places: Tensor, context: int) -> None:
        self._rows, self._places, self._context = rows, places, context

    def attend(
        self, layer: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        self._rows.index_copy_(2, self._places, torch.stack([keys, values]))
        seen = self._rows[:, :, : self._context]
        return look(layer, query, seen[0], seen[1], mask)


class RecordedHead:
    """A head's layer, recorded; lives as long as its drafter.

    Attributes:
        cache: the rows of the generation that is going on.
        fault: why it was given up; None while it works.
    """

    def __init__(self, head: DraftHead, recorder: Recorder) -> None:
        self.cache = StaticHeadCache()
        self.fault: str | None = None
        self._head = head
        self._recorder = recorder
        self._inputs: dict[int, tuple[RowInputs, Tensor]] = {}
        self._made: dict[Size, Recording[Tensor]] = {}
        self._address = 0

    @property
    def sizes(self) -> tuple[Size, ...]:
        """What has been recorded."""
        return tuple(self._made)

    def entries(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor | None
    ) -> Tensor | None:
        """Outputs `(n, hidden)` of n entries behind the cache's; None where eager is the way.

        Arguments as `DraftHead.forward`; `visible` `(n, m)` over the tree's m entries so far.
        """
        cache, n = self.cache, len(tokens)
        bucket = row_bucket(n)
        start = cache.num_base + cache.num_tree
        rows = None if bucket is None else cache.room(bucket)
        if bucket is None or rows is None or self.fault or cache.num_tree + bucket > WIDTH:
            return None
        if rows.data_ptr() != self._address:
            self._made.clear()
            self._address = rows.data_ptr()
        if bucket not in self._inputs:
            self._inputs[bucket] = (
                RowInputs(bucket, tokens.device, width=WIDTH),
                hidden.new_zeros(bucket, hidden.shape[1]),
            )
        inputs, held = self._inputs[bucket]
        inputs.load(tokens, positions, visible, base=cache.num_base, start=start)
        held[:n].copy_(hidden)
        size = Size(bucket, context_bucket(start + bucket))
        if size not in self._made and not self._record(size, inputs, held, rows):
            return None
        self._made[size].replay()
        cache.num_tree += n
        return self._made[size].results[:n].clone()

    def _record(self, size: Size, inputs: RowInputs, held: Tensor, rows: Tensor) -> bool:
        def run() -> Tensor:
            past = _Places(rows, inputs.places(), size.context)
            mask = inputs.visible(size.context)
            out: Tensor = self._head(held, inputs.tokens, inputs.positions, past, mask)
            return out

        try:
            self._made[size] = self._recorder.record(run)
        except CaptureError as error:
            self.fault = str(error)
            LOG.warning("Drafting without %s from here on: %s", self._recorder.name, error)
            return False
        return True

    def close(self) -> None:
        """Let the recordings go."""
        self._made.clear()
        self._inputs.clear()


class RecordedSession(HeadSession):
    """A generation whose entries run by recordings where they fit."""

    def __init__(self, recorded: RecordedHead, head: DraftHead) -> None:
        super().__init__(head)
        self._recorded = recorded
        self._cache = recorded.cache
        recorded.cache.clear()

    def feed_base(self, features: Tensor, tokens: Tensor) -> None:
        cache = self._cache
        cache.drop()
        positions = torch.arange(cache.num_base, cache.num_base + len(tokens), device=tokens.device)
        fused = self.head.fuse(features)
        outputs = self._recorded.entries(fused, tokens, positions, None)
        if outputs is None:
            self.output = self.head(fused, tokens, positions, cache, last_only=True)
        else:
            self.output = outputs[-1:]
        self.root = tokens[-1:]
        cache.keep()

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> Tensor:
        position = torch.full((1,), self._cache.num_base + depth - 1, device=tokens.device)
        outputs = self._recorded.entries(hidden, tokens, position, ancestors)
        return super().expand(hidden, tokens, depth, ancestors) if outputs is None else outputs


def sessions_for(target: Target) -> Callable[[DraftHead], HeadSession]:
    """Makes the sessions of one drafter, recorded where the target's forwards are."""
    recorder = target.recorder
    if recorder is None:
        return HeadSession
    made: list[RecordedHead] = []

    def session(head: DraftHead) -> HeadSession:
        if not made:
            made.append(RecordedHead(head, recorder))
        return RecordedSession(made[0], head)

    return session
