"""A cache that can keep some rows of its last forward and drop the rest.

`transformers` attention layers append the rows of a verify forward behind the committed ones;
`commit(path)` then moves the accepted rows into place:

    committed 0 1 2 | rows of the verify forward: 3 4 5 6 7   commit((0, 2, 4))
    committed 0 1 2 3 5 7 |                                   length 3 → 6

Rotary positions need no repair, because each row was computed at its final position. Recurrent
layers have a state where attention has rows: `engine.model.states` keeps those, and
`engine.model.recurrent` has one for every row until the path is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from engine.model.states import RecurrentStates, States
from engine.tree import upload

GROWTH = 512
"""Capacity grows to the next multiple of this many rows, at least doubling."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheCopy:
    """Committed rows of a cache, apart from it.

    Attributes:
        buffers, free, slots: as `TreeCache` keeps them, without room for more rows.
        states: of recurrent layers, by the number of rows that they are after; None without any.
    """

    length: int
    buffers: tuple[Tensor, ...]
    free: tuple[int, ...]
    slots: dict[int, tuple[tuple[int, int], tuple[int, int]]]
    states: dict[int, dict[int, States]] | None

    def usable(self, length: int) -> int:
        """How many of the first `length` rows a text can go on from."""
        length = min(length, self.length)
        if self.states is None:
            return length
        return max((at for at in self.states if at <= length), default=0)


class TreeCache(Cache):
    """Keys and values of all layers in a few preallocated buffers.

    Layers with the same shape share one buffer `(slots, kv_heads, capacity, head_dim)`, a slot for
    keys and one for values, so that `commit` is one gather and one copy per buffer. `length` rows
    are committed; rows behind them belong to the last forward.

    Attributes:
        num_layers: those with keys and values.
        recurrent: states of the recurrent layers; None where the model has none.
        shifts: `(rows,)` of the forward, position − committed rows − row number, for layers that
            count rows to know positions; None = all 0.
    """

    shifts: Tensor | None = None

    def __init__(
        self,
        num_layers: int,
        *,
        capacity: int = GROWTH,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.recurrent = recurrent
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
            num_slots = max(1, self.num_layers - len(self._slots)) * (2 if same else 1)
            self._slots[layer_idx] = (
                self._slot(key_states, num_slots),
                self._slot(value_states, num_slots),
            )
        key_slot, value_slot = self._slots[layer_idx]
        return self._write(key_slot, key_states), self._write(value_slot, value_states)

    def rows_of(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, to the buffers' ends: `(1, kv_heads, capacity, width)`."""
        (keys, i), (values, j) = self._slots[layer_idx]
        return self._buffers[keys][None, i], self._buffers[values][None, j]

    def _write(self, slot: tuple[int, int], states: Tensor) -> Tensor:
        buffer = self._buffers[slot[0]][slot[1]]
        end = self.length + states.shape[2]
        buffer[:, self.length : end] = states[0]
        return buffer[None, :, :end]

    def _slot(self, states: Tensor, num_slots: int) -> tuple[int, int]:
        """A free slot of the states' shape, in a new buffer if there is none."""
        heads, width = states.shape[1], states.shape[3]
        for i, buffer in enumerate(self._buffers):
            fits = (buffer.shape[1], buffer.shape[3]) == (heads, width)
            if fits and buffer.device == states.device and self._free[i] < buffer.shape[0]:
                self._free[i] += 1
                return i, self._free[i] - 1
        if states.shape[2] > self.capacity - self.length:
            self.reserve(states.shape[2])
        self._buffers.append(self._allocate(states, num_slots, heads, self.capacity, width))
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
        self._advance(path, lasting=False)

    def extend(self, count: int) -> None:
        """Keep all `count` rows of the last forward, which read a text."""
        self._advance(tuple(range(count)), lasting=count > 1)

    def _advance(self, path: tuple[int, ...], *, lasting: bool) -> None:
        self.length += len(path)
        if self.recurrent is not None and path:
            self.recurrent.commit(path, self.length, lasting=lasting)

    @property
    def rollback_s(self) -> float:
        """Seconds that the last commit took to restore recurrent states; 0 without any."""
        return 0.0 if self.recurrent is None else self.recurrent.commit_s

    def truncate(self, length: int) -> None:
        """Forget committed rows from `length` on, and more where a recurrent state needs it.

        Such a state goes back to the newest one kept; `self.length` says how far that is, and the
        rows in between have to be read again.
        """
        if length < self.length:
            self.length = length if self.recurrent is None else self.recurrent.rewind(length)

    @property
    def copied_bytes(self) -> int:
        """What `copy` takes."""
        states = 0 if self.recurrent is None else self.recurrent.num_bytes
        return states + sum(b.nbytes // b.shape[2] * self.length for b in self._buffers)

    @torch.inference_mode()
    def copy(self) -> CacheCopy:
        """The committed rows, and all states that it could go back to."""
        return CacheCopy(
            self.length,
            tuple(buffer[:, :, : self.length].clone() for buffer in self._buffers),
            tuple(self._free),
            dict(self._slots),
            None if self.recurrent is None else self.recurrent.copied(self.length),
        )

    @torch.inference_mode()
    def paste(self, copy: CacheCopy, length: int) -> None:
        """Begin with the first rows of a copy, `usable` ones; the cache is empty."""
        self.reserve(length)
        if not self._buffers:
            for like in copy.buffers:
                shape = (*like.shape[:2], self.capacity, like.shape[3])
                self._buffers.append(self._allocate(like, *shape))
            self._free.extend(copy.free)
            self._slots.update(copy.slots)
        for mine, theirs in zip(self._buffers, copy.buffers, strict=True):
            mine[:, :, :length] = theirs[:, :, :length]
        if self.recurrent is not None and copy.states is not None:
            self.recurrent.paste(copy.states, length)
        self.length = length

    def free(self) -> None:
        """Release the buffers; the cache is empty and usable again."""
        self.truncate(0)
        self._buffers.clear()
        self._free.clear()
        self._slots.clear()

    @property
    def num_bytes(self) -> int:
        states = 0 if self.recurrent is None else self.recurrent.num_bytes
        return states + sum(b.numel() * b.element_size() for b in self._buffers)

    # ---- what recurrent layers call, under transformers' names

    def _working(self, kind: str, number: int) -> Tensor | None:
        return None if self.recurrent is None else self.recurrent.working.get((kind, number))

    def _keep(self, kind: str, number: int, state: Tensor) -> Tensor:
        assert self.recurrent is not None
        self.recurrent.working[kind, number] = state
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._working("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._working("recurrent", state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._working("linear", 0)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert self.recurrent is not None
        return self.recurrent.convolve(state_idx, conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._keep("recurrent", state_idx, recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._keep("linear", 0, linear_cache)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.length > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # ---- what attention layers and masks ask

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.length if self.shifts is None else self.length + self.shifts

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        """Keys of the forward, and what to add to a key's number for its position."""
        shifts = 0 if self.shifts is None else pad(self.shifts, (self.length, 0))
        return self.length + query_length, shifts

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1
