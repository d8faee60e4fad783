"""Keys and values of a layer stack in a few preallocated tensors, which a plan writes.

A plan says where the rows of a forward are stored, and which rows the forward attends to:

    append(5)             rows 5, 6, 7, …                    all rows up to the last new one
    at(places, 768)       rows at these places, as graphs    the first 768
    in_texts, as_texts    every text in its own segment      the segment's first rows, or new ones

Rows that are stored but not kept, such as those of rejected drafts, are overwritten later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.tree import upload

SMALLEST = 256
WritePlan = Callable[[Tensor, Tensor], Tensor]
"""Stores states `(batch, kv_heads, n, head_dim)` in a slot `(kv_heads, capacity, head_dim)`;
returns the rows `(batch, kv_heads, rows, head_dim)` to attend to."""
Slot = tuple[int, int]
"""A tensor's index, and the index of the slot in it."""


def append(length: int) -> WritePlan:
    """Store rows behind the first `length` ones."""

    def write(slot: Tensor, states: Tensor) -> Tensor:
        end = length + states.shape[2]
        slot[:, length:end] = states[0]
        return slot[None, :, :end]

    return write


def at(places: Tensor, context: int) -> WritePlan:
    """Store rows at `places (n,)` int64; attend to the first `context` rows."""

    def write(slot: Tensor, states: Tensor) -> Tensor:
        slot.index_copy_(1, places, states[0])
        return slot[None, :, :context]

    return write


def in_texts(columns: Tensor, width: int, *, every: int) -> WritePlan:
    """Store rows of the first texts, in segments of `every` rows, at `columns (texts, n)`."""

    def write(slot: Tensor, states: Tensor) -> Tensor:
        segments: Tensor = slot.unflatten(1, (-1, every))
        own = columns.to(slot.device)
        texts = torch.arange(len(own), device=slot.device)[:, None]
        segments[:, texts, own] = states.transpose(0, 1)
        return segments.transpose(0, 1)[: len(own), :, :width]

    return write


def as_texts(texts: Tensor, *, every: int) -> WritePlan:
    """Store whole texts in the segments numbered `texts (batch,)`; attend to the new rows only."""

    def write(slot: Tensor, states: Tensor) -> Tensor:
        segments = slot.unflatten(1, (-1, every))
        segments[:, texts.to(slot.device), : states.shape[2]] = states.transpose(0, 1)
        return states

    return write


def context_bucket(rows: int) -> int:
    """The smallest bucket for this many rows of context, new ones included.

    Powers of two and the halves between them: 256, 384, 512, 768, 1024, 1536, …

    Example: 300 → 384, 400 → 512.
    """
    bucket = SMALLEST
    while bucket < rows:
        bucket *= 2
    between = bucket * 3 // 4
    return between if bucket > SMALLEST and between >= rows else bucket


class KVBuffers:
    """The tensors; layers with the same shape share one, so that keeping rows is one copy each.

    Attributes:
        capacity: rows of every tensor; grows to a `context_bucket`, at least doubling.
        tensors: `(slots, kv_heads, capacity, head_dim)` each, a slot for a layer's keys and one for
            its values; none before the first rows are stored.
        slots: by layer, of its keys and of its values.
    """

    def __init__(self, num_layers: int, capacity: int, *, zeroed: bool = False) -> None:
        """Allocate nothing yet.

        Args:
            num_layers: those with keys and values.
            zeroed: whether rows that were never stored are zeros: masked ones are multiplied by
                zero, so they must not be NaN.
        """
        self.num_layers, self.capacity, self._zeroed = num_layers, capacity, zeroed
        self.tensors: list[Tensor] = []
        self.slots: dict[int, tuple[Slot, Slot]] = {}

    def fresh(self, capacity: int) -> KVBuffers:
        """Empty ones for the same layers."""
        return KVBuffers(self.num_layers, capacity, zeroed=self._zeroed)

    # ---- memory

    @torch.inference_mode()
    def reserve(self, rows: int, *, kept: int) -> None:
        """Make room for `rows` rows; of those stored, the first `kept` remain."""
        if rows <= self.capacity:
            return
        self.capacity = context_bucket(max(rows, 2 * self.capacity))
        for i, old in enumerate(self.tensors):
            new = self._allocate(old, old.shape[0], old.shape[1], old.shape[3])
            new[:, :, :kept] = old[:, :, :kept]
            self.tensors[i] = new

    def _allocate(self, like: Tensor, num_slots: int, heads: int, width: int) -> Tensor:
        """A tensor on the device of `like`, in its dtype."""
        shape = (num_slots, heads, self.capacity, width)
        return like.new_zeros(shape) if self._zeroed else like.new_empty(shape)

    def shared(self, heads: int, head_dim: int) -> Tensor:
        """The single tensor of a model whose layers all have this shape, for compiled kernels.

        `(2 · layers, heads, capacity, head_dim)` bfloat16 on the CPU, each layer's keys, then its
        values.
        """
        if not self.tensors:
            like = torch.empty(0, dtype=torch.bfloat16)
            self.tensors.append(self._allocate(like, 2 * self.num_layers, heads, head_dim))
            self.slots = {i: ((0, 2 * i), (0, 2 * i + 1)) for i in range(self.num_layers)}
        return self.tensors[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all layers."""
        return sum(tensor.nbytes // tensor.shape[2] for tensor in self.tensors)

    # ---- rows

    def store(
        self, layer: int, keys: Tensor, values: Tensor, plan: WritePlan
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's rows `(batch, kv_heads, n, head_dim)`; return those to attend to."""
        if layer not in self.slots:
            same = keys.shape == values.shape
            num_slots = max(1, self.num_layers - len(self.slots)) * (2 if same else 1)
            own = self._free_slot(keys, num_slots)
            self.slots[layer] = own, self._free_slot(values, num_slots, beside=own)
        (i, key), (j, value) = self.slots[layer]
        return plan(self.tensors[i][key], keys), plan(self.tensors[j][value], values)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values at full capacity: `(1, kv_heads, capacity, head_dim)`."""
        (i, key), (j, value) = self.slots[number]
        return self.tensors[i][None, key], self.tensors[j][None, value]

    def _free_slot(self, states: Tensor, num_slots: int, beside: Slot | None = None) -> Slot:
        """A free slot of the states' shape, other than `beside`; in a new tensor if none is."""
        heads, width = states.shape[1], states.shape[3]
        used = Counter(i for slots in self.slots.values() for i, _ in slots)
        if beside is not None:
            used[beside[0]] += 1
        for i, tensor in enumerate(self.tensors):
            fits = (tensor.shape[1], tensor.shape[3]) == (heads, width)
            if fits and tensor.device == states.device and used[i] < tensor.shape[0]:
                return i, used[i]
        self.tensors.append(self._allocate(states, num_slots, heads, width))
        return len(self.tensors) - 1, 0

    @torch.inference_mode()
    def keep(self, path: Sequence[int], length: int) -> None:
        """Move these rows of those behind the first `length` (ascending) to their beginning."""
        if tuple(path) == tuple(range(len(path))):
            return
        source = torch.tensor(path) + length
        for tensor in self.tensors:
            rows = tensor.index_select(2, upload(source, tensor.device))
            tensor[:, :, length : length + len(path)] = rows

    def repeat(self, length: int, *, every: int) -> None:
        """Copy the first `length` rows to every multiple of `every`."""
        for tensor in self.tensors:
            texts = tensor.unflatten(2, (-1, every))
            texts[:, :, 1:, :length] = texts[:, :, :1, :length]

    @torch.inference_mode()
    def copy(self, length: int) -> KVBuffers:
        """A copy of the first `length` rows, without spare capacity."""
        copied = self.fresh(length)
        copied.tensors = [tensor[:, :, :length].clone() for tensor in self.tensors]
        copied.slots = dict(self.slots)
        return copied

    @torch.inference_mode()
    def fill(self, source: KVBuffers, length: int) -> None:
        """Take another's first `length` rows, for which there is room."""
        if not self.tensors:
            for like in source.tensors:
                self.tensors.append(
                    self._allocate(like, like.shape[0], like.shape[1], like.shape[3])
                )
            self.slots.update(source.slots)
        for tensor, rows in zip(self.tensors, source.tensors, strict=True):
            tensor[:, :, :length] = rows[:, :, :length]
