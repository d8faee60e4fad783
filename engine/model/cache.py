"""A cache that can keep some rows of its last forward and drop the rest.

`transformers` attention layers append the rows of a verify forward behind the committed ones;
`commit(path)` then moves the accepted rows into place:

    committed 0 1 2 | rows of the verify forward: 3 4 5 6 7   commit((0, 2, 4))
    committed 0 1 2 3 5 7 |                                   length 3 → 6

Rotary positions need no repair, because each row was computed at its final position. Recurrent
layers have a state where attention has rows. `RecurrentStates` keeps the committed ones, which are
never modified: every forward works on a copy. After a forward each layer leaves a function that
returns its state after any accepted path (`StateAfterPath`); `commit` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from engine.model.clock import Span, now, seconds
from engine.model.kv import KVBuffers, WritePlan, append

States = dict[tuple[str, int], Tensor]
"""`(kind, number)` → `(batch, …)`: a layer's recurrent states."""
StateAfterPath = Callable[[tuple[int, ...]], States]
"""Path of accepted rows of the last forward → the states `(1, …)` after them."""
MAX_CHECKPOINTS = 4
"""States at the ends of prompts that are kept to rewind to."""


class RecurrentStates:
    """The recurrent half of a cache: committed states, those of the last forward, and older ones.

    Attributes:
        committed: by layer, after all committed rows; the tensors are never modified.
        commit_span: when the last commit restored them.
        after: how to compute each layer's states after the last forward.
        working: states of the running layer, which reads and writes them through the cache.
        conv_inputs: inputs of its convolutions, with the previous state prepended.
    """

    def __init__(self, device: torch.device, rewinds: int = 0) -> None:
        """`rewinds`: number of most recent commits that can be undone exactly."""
        self._device = device
        self.commit_span: Span | None = None
        self.committed: dict[int, States] = {}
        self.working: States = {}
        self.conv_inputs: States = {}
        self._rewinds = rewinds
        self.after: dict[int, StateAfterPath] = {}
        self._earlier: dict[int, dict[int, States]] = {}
        self._checkpoints: list[int] = []

    def commit(self, path: tuple[int, ...], length: int, *, is_checkpoint: bool) -> None:
        """Commit the states after these rows; `length`: committed rows in all from then on."""
        began = now(self._device)
        self.committed = {layer: after(path) for layer, after in self.after.items()}
        self.commit_span = began, now(self._device)
        self.after.clear()
        self.conv_inputs = {}
        if is_checkpoint:
            self._checkpoints = [*self._checkpoints, length][-MAX_CHECKPOINTS:]
        self._earlier[length] = self.committed
        lengths = {*self._checkpoints, *list(self._earlier)[len(self._earlier) - self._rewinds :]}
        self._earlier = {at: states for at, states in self._earlier.items() if at in lengths}

    def rewind(self, length: int) -> int:
        """Go back to the newest stored state at or before `length` rows; return its length."""
        self.after.clear()
        at = max((at for at in self._earlier if at <= length), default=0)
        self.committed = self._earlier.get(at, {})
        self._earlier = {old: states for old, states in self._earlier.items() if old <= at}
        self._checkpoints = [old for old in self._checkpoints if old <= at]
        return at

    def snapshot(self, length: int) -> dict[int, dict[int, States]]:
        """All states by their length in rows; the committed ones, of `length`, are copied."""
        own = {
            layer: {key: state.clone() for key, state in states.items()}
            for layer, states in self.committed.items()
        }
        return {**self._earlier, length: own}

    def restore(self, states: Mapping[int, dict[int, States]], length: int) -> None:
        """Continue from the states after `length` rows; earlier ones remain to rewind to."""
        self._checkpoints = sorted(at for at in states if at <= length)[-MAX_CHECKPOINTS:]
        self._earlier = {at: states[at] for at in self._checkpoints}
        self.committed = states[length]

    @property
    def num_bytes(self) -> int:
        of_layers = (self.committed, *self._earlier.values())
        tensors = {id(t): t for layers in of_layers for s in layers.values() for t in s.values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """A copy of a cache's committed rows.

    Attributes:
        kv: keys and values, without spare capacity.
        states: of recurrent layers, by their length in rows; None without such layers.
        rope_len: as in `TreeCache`; only a cache with the same can be filled.
    """

    kv: KVBuffers
    states: dict[int, dict[int, States]] | None
    rope_len: int

    def usable_len(self, length: int) -> int:
        """The longest prefix, of at most `length` of its rows, that a text can continue from."""
        if self.states is None:
            return length
        return max((at for at in self.states if at <= length), default=0)


class TreeCache(Cache):
    """Keys and values of all layers; `length` rows are committed.

    Rows behind them belong to the last forward.

    Attributes:
        kv: where they are; a graph's forwards lend theirs to one generation after another.
        plan: how the rows of a forward are stored; None = behind the committed ones.
        recurrent: states of the recurrent layers; None where the model has none.
        position_shifts: `(rows,)` of the forward, position − committed rows − row index, for
            layers that derive positions from row counts; None = all 0.
        rope_len: a length of text whose rotary frequencies its rows have; see `LongRope`.
    """

    plan: WritePlan | None = None
    position_shifts: Tensor | None = None
    rope_len = 1

    def __init__(
        self,
        num_layers: int,
        *,
        capacity: int = 512,
        recurrent: RecurrentStates | None = None,
        kv: KVBuffers | None = None,
    ) -> None:
        """An empty cache; `num_layers`: those with keys and values."""
        super().__init__(layers=[])
        self.kv = kv or KVBuffers(num_layers, capacity)
        self.recurrent = recurrent
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows behind the committed ones, before they are stored."""
        self.kv.reserve(self.length + rows, kept=self.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's rows `(1, kv_heads, rows, head_dim)`; return those to attend to."""
        plan = self.plan or append(self.length)
        return self.kv.store(layer_idx, key_states, value_states, plan)

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep these rows of the last forward (ascending numbers) and drop the others."""
        self.kv.keep(path, self.length)
        self._advance(path, is_checkpoint=False)

    def extend(self, count: int) -> None:
        """Keep all `count` rows of the last forward, which were a text."""
        self._advance(tuple(range(count)), is_checkpoint=count > 1)

    @torch.inference_mode()
    def _advance(self, path: tuple[int, ...], *, is_checkpoint: bool) -> None:
        self.length += len(path)
        if self.recurrent is not None and path:
            self.recurrent.commit(path, self.length, is_checkpoint=is_checkpoint)

    @property
    def rollback_s(self) -> float:
        """Seconds that the last commit took to restore recurrent states; waits for the device."""
        span = None if self.recurrent is None else self.recurrent.commit_span
        return 0.0 if span is None else seconds(span)

    def truncate(self, length: int) -> None:
        """Drop committed rows from `length` on, and more where a recurrent state requires it.

        A recurrent state is reset to the newest stored one; `self.length` is its length, and the
        rows in between have to be recomputed.
        """
        if length < self.length:
            self.length = length if self.recurrent is None else self.recurrent.rewind(length)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that `snapshot` takes."""
        states = 0 if self.recurrent is None else self.recurrent.num_bytes
        return states + self.kv.row_bytes * self.length

    @torch.inference_mode()
    def snapshot(self) -> CacheSnapshot:
        """A copy of the committed rows, and all states that can be rewound to."""
        states = None if self.recurrent is None else self.recurrent.snapshot(self.length)
        return CacheSnapshot(self.kv.copy(self.length), states, self.rope_len)

    def restore(self, snapshot: CacheSnapshot, length: int) -> None:
        """Fill the empty cache with a snapshot's first `length` rows; see `usable_len`."""
        self.reserve(length)
        self.kv.fill(snapshot.kv, length)
        if self.recurrent is not None and snapshot.states is not None:
            self.recurrent.restore(snapshot.states, length)
        self.length = length

    def free(self) -> None:
        """Release the memory, to who lent it; the cache is empty and usable again."""
        self.truncate(0)
        self.kv = self.kv.fresh(self.kv.capacity)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

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
        """The state with `(batch, channels, rows)` appended, of which the last rows are kept."""
        old = self._working("conv", state_idx)
        if old is None:
            width = conv_kernel_size or conv_states.shape[-1]
            full = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = old.shape[-1]
            full = torch.cat([old, conv_states], dim=-1)
        assert self.recurrent is not None
        self.recurrent.conv_inputs["conv", state_idx] = full
        self._keep("conv", state_idx, full[..., full.shape[-1] - width :].clone())
        return full

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

    # ---- what attention layers and mask builders call

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.length if self.position_shifts is None else self.length + self.position_shifts

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        """Number of keys of the forward, and the offset from a key's index to its position."""
        shifts = 0 if self.position_shifts is None else pad(self.position_shifts, (self.length, 0))
        return self.length + query_length, shifts
