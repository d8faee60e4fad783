"""A key/value cache that can keep some rows of its last forward and drop the rest.

`transformers` attention layers append the rows of a verify forward behind the committed ones;
`commit(path)` then moves the accepted rows into place:

    committed 0 1 2 | rows of the verify forward: 3 4 5 6 7   commit((0, 2, 4))
    committed 0 1 2 3 5 7 |                                   length 3 → 6

Rotary positions need no repair, because each row was computed at its final position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from engine.tree import upload

GROWTH = 512
"""Capacity grows to the next multiple of this many rows, at least doubling."""


class TreeCache(Cache):
    """Keys and values of all layers in a few preallocated buffers.

    Layers with the same shape share one buffer `(slots, kv_heads, capacity, head_dim)`, a slot for
    keys and one for values, so that `commit` is one gather and one copy per buffer. `length` rows
    are committed; rows behind them belong to the last forward.
    """

    def __init__(self, num_layers: int, *, capacity: int = GROWTH) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.length = 0
        self.capacity = capacity
        self._buffers: list[Tensor] = []
        self._free: list[int] = []
        self._slots: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows behind the committed ones."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        grown = max(needed, 2 * self.capacity)
        self._resize(-(-grown // GROWTH) * GROWTH)

    def _resize(self, capacity: int) -> None:
        """Move the committed rows to buffers of another capacity."""
        self.capacity = capacity
        for i, old in enumerate(self._buffers):
            new = self._allocate(old, *old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            self._buffers[i] = new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's rows `(1, kv_heads, rows, head_dim)`; return all rows up to there."""
        if layer_idx not in self._slots:
            same = key_states.shape == value_states.shape
            wanted = (self.num_layers - layer_idx) * (2 if same else 1)
            self._slots[layer_idx] = (
                self._slot(key_states, wanted),
                self._slot(value_states, wanted),
            )
        key_slot, value_slot = self._slots[layer_idx]
        return self._write(key_slot, key_states), self._write(value_slot, value_states)

    def _write(self, slot: tuple[int, int], states: Tensor) -> Tensor:
        buffer = self._buffers[slot[0]][slot[1]]
        end = self.length + states.shape[2]
        buffer[:, self.length : end] = states[0]
        return buffer[None, :, :end]

    def _slot(self, states: Tensor, wanted: int) -> tuple[int, int]:
        """A free slot of the states' shape, in a new buffer if there is none."""
        heads, width = states.shape[1], states.shape[3]
        for i, buffer in enumerate(self._buffers):
            fits = (buffer.shape[1], buffer.shape[3]) == (heads, width)
            if fits and buffer.device == states.device and self._free[i] < buffer.shape[0]:
                self._free[i] += 1
                return i, self._free[i] - 1
        if states.shape[2] > self.capacity - self.length:
            self.reserve(states.shape[2])
        self._buffers.append(self._allocate(states, wanted, heads, self.capacity, width))
        self._free.append(1)
        return len(self._buffers) - 1, 0

    @staticmethod
    def _allocate(like: Tensor, *shape: int) -> Tensor:
        """A buffer on the device of `like`, in its dtype."""
        return like.new_empty(shape)

    def whole(self, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """The one buffer of a model whose layers all have this shape; call `reserve` first.

        `(2 · layers, heads, capacity, head_dim)` on the processor, each layer's keys then values.
        """
        if not self._buffers:
            shape = (2 * self.num_layers, heads, self.capacity, head_dim)
            self._buffers.append(torch.empty(shape, dtype=dtype))
            self._free.append(2 * self.num_layers)
            slots = range(self.num_layers)
            self._slots = {i: ((0, 2 * i), (0, 2 * i + 1)) for i in slots}
        return self._buffers[0]

    @torch.inference_mode()
    def commit(self, path: tuple[int, ...]) -> None:
        """Keep these rows of the last forward (ascending numbers) and drop the others."""
        if path != tuple(range(len(path))):
            source = torch.tensor(path) + self.length
            for buffer in self._buffers:
                rows = buffer.index_select(2, upload(source, buffer.device))
                buffer[:, :, self.length : self.length + len(path)] = rows
        self.length += len(path)

    def truncate(self, length: int) -> None:
        """Forget committed rows from `length` on."""
        self.length = min(self.length, length)

    def free(self) -> None:
        """Release the buffers; the cache is empty and usable again."""
        self.length = 0
        self._buffers.clear()
        self._free.clear()
        self._slots.clear()

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1
