"""A key/value cache at fixed addresses, lent to one generation after another.

Graphs write to these addresses, so the buffers outlive a generation; they are zeroed when the next
one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.model.cache import Slots, TreeCache

SMALLEST_CONTEXT = 256


def context_bucket(rows: int) -> int:
    """The smallest bucket for this many rows of context, new ones included.

    Powers of two and the halves between them: 256, 384, 512, 768, 1024, 1536, …

    Example: 300 → 384, 400 → 512.
    """
    bucket = SMALLEST_CONTEXT
    while bucket < rows:
        bucket *= 2
    between = bucket * 3 // 4
    return between if bucket > SMALLEST_CONTEXT and between >= rows else bucket


class StaticCache(TreeCache):
    """A `TreeCache` whose buffers belong to a `CacheStore`.

    Within `static_rows`, rows are stored at given positions, and all rows of a context returned.
    """

    def __init__(self, num_layers: int, store: CacheStore) -> None:
        super().__init__(num_layers, capacity=store.capacity)
        self._store: CacheStore | None = store
        self.buffers, self._slots = store.buffers, store.slots
        self._static: tuple[Tensor, int] | None = None

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        needed = self.length + rows
        if self._store is None:
            super().reserve(rows)
        elif needed > self.capacity:
            self._resize(context_bucket(max(needed, 2 * self.capacity)))
            self._store.capacity = self.capacity

    @contextmanager
    def static_rows(self, positions: Tensor, context: int) -> Iterator[None]:
        """Rows are stored at `positions` `(rows,)` int64; attention reads `context` rows."""
        self._static = (positions, context)
        try:
            yield
        finally:
            self._static = None

    def _write(self, slot: tuple[int, int], states: Tensor) -> Tensor:
        if self._static is None:
            return super()._write(slot, states)
        positions, context = self._static
        buffer = self.buffers[slot[0]][slot[1]]
        buffer.index_copy_(1, positions, states[0])
        return buffer[None, :, :context]

    @staticmethod
    def _allocate(like: Tensor, *shape: int) -> Tensor:
        # Masked rows are multiplied by zero: they must not be NaN.
        return like.new_zeros(shape)

    def free(self) -> None:
        """Return the buffers; the empty cache allocates buffers of its own if used again."""
        self.length = 0
        self.buffers, self._slots = [], {}
        self._store = None


class CacheStore:
    """Owns the buffers that graphs use.

    Attributes:
        capacity: their rows; grows as needed.
        buffers, slots: as `TreeCache` keeps them; empty before the first forward.
    """

    capacity: int
    buffers: list[Tensor]
    slots: Slots

    def __init__(self, num_layers: int) -> None:
        self.clear()
        self._num_layers = num_layers
        self._lent: weakref.ref[StaticCache] | None = None

    @torch.inference_mode()
    def lend(self, rows: int) -> StaticCache | None:
        """An empty cache with room for `rows` rows; None while another one is in use."""
        lent = None if self._lent is None else self._lent()
        if lent is not None and lent._store is self:
            return None
        capacity = context_bucket(rows)
        if capacity > self.capacity:
            self.clear()
            self.capacity = capacity
        for buffer in self.buffers:
            buffer.zero_()
        cache = StaticCache(self._num_layers, self)
        self._lent = weakref.ref(cache)
        return cache

    def clear(self) -> None:
        """Release the buffers; a lent cache keeps them."""
        self.capacity = 0
        self.buffers, self.slots = [], {}
