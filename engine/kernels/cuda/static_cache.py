"""A key/value cache at fixed addresses, lent to one generation after another.

Graphs write to these addresses, so they outlive a generation; what a text left behind is wiped when
the next one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.model.cache import TreeCache

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

    While `fixed`, rows go to places that a tensor names, and all rows of a context come back.
    """

    def __init__(self, num_layers: int, store: CacheStore) -> None:
        super().__init__(num_layers, capacity=store.capacity)
        self._store: CacheStore | None = store
        self._buffers, self._free, self._slots = store.buffers, store.free, store.slots
        self._fixed: tuple[Tensor, int] | None = None

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        needed = self.length + rows
        if self._store is None:
            super().reserve(rows)
        elif needed > self.capacity:
            self._resize(context_bucket(max(needed, 2 * self.capacity)))
            self._store.capacity = self.capacity

    @contextmanager
    def fixed(self, places: Tensor, context: int) -> Iterator[None]:
        """Rows go to `places` `(rows,)` int64; the first `context` rows are what is seen."""
        self._fixed = (places, context)
        try:
            yield
        finally:
            self._fixed = None

    def _write(self, slot: tuple[int, int], states: Tensor) -> Tensor:
        if self._fixed is None:
            return super()._write(slot, states)
        places, context = self._fixed
        buffer = self._buffers[slot[0]][slot[1]]
        buffer.index_copy_(1, places, states[0])
        return buffer[None, :, :context]

    @staticmethod
    def _allocate(like: Tensor, *shape: int) -> Tensor:
        # Rows that nobody sees are multiplied with zero: they must not be NaN.
        return like.new_zeros(shape)

    @property
    def buffers(self) -> Sequence[Tensor]:
        """As of `TreeCache`: `(slots, kv_heads, capacity, head_dim)` each."""
        return self._buffers

    @property
    def has_room(self) -> bool:
        """Whether the buffers are there; the first forward makes them."""
        return bool(self._buffers)

    def free(self) -> None:
        """Give the buffers back; the cache is empty and grows buffers of its own if used again."""
        self.length = 0
        self._buffers, self._free, self._slots = [], [], {}
        if self._store is not None:
            self._store.take_back(self)
            self._store = None


class CacheStore:
    """Owns the buffers that graphs use.

    Attributes:
        capacity: rows that they hold; grows with what is asked for.
        buffers, free, slots: as `TreeCache` keeps them; empty before the first forward.
    """

    def __init__(self, num_layers: int) -> None:
        self.capacity = 0
        self.buffers: list[Tensor] = []
        self.free: list[int] = []
        self.slots: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._num_layers = num_layers
        self._holder: weakref.ref[Any] | None = None

    @torch.inference_mode()
    def lend(self, rows: int) -> StaticCache | None:
        """An empty cache with room for `rows` rows; None while another one is in use."""
        if self._holder is not None and self._holder() is not None:
            return None
        capacity = context_bucket(rows)
        if capacity > self.capacity:
            self.capacity = capacity
            self.buffers, self.free, self.slots = [], [], {}
        for buffer in self.buffers:
            buffer.zero_()
        cache = StaticCache(self._num_layers, self)
        self._holder = weakref.ref(cache)
        return cache

    def take_back(self, cache: StaticCache) -> None:
        if self._holder is not None and self._holder() is cache:
            self._holder = None

    def clear(self) -> None:
        """Let the buffers go; caches that are lent keep them."""
        self.capacity = 0
        self.buffers, self.free, self.slots = [], [], {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)
