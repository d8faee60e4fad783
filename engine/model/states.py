"""What recurrent layers carry from token to token, and what it takes to roll it back.

Committed states are never changed: whoever goes on from one gets a copy. After a forward every
layer says how the state after any accepted path is had (`AfterPath`); a commit takes it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.model.clock import Span, now, seconds

States = dict[tuple[str, int], Tensor]
"""`(kind, number)` → `(batch, …)`: what a layer carries from token to token."""
AfterPath = Callable[[tuple[int, ...]], States]
"""The state `(1, …)` after these rows of the last forward."""
LayerKind = tuple[str, int]
"""A layer's class, and how many rows it reads."""
AsText = dict[LayerKind, deque[Span]]
"""When such layers read so many rows as one text."""
LASTING = 4
"""So many states after texts that were read are kept to come back to."""
TIMED, AGAIN = 5, 32
"""Reading rows as one text is timed so many times, then once in so many steps; the median counts,
of the last ones: machines change their speed."""


class RollBack(NamedTuple):
    """Seconds of a step.

    Attributes:
        forward_s: that recurrent layers took for a tree beyond what as many rows of one text take:
            copies of states, calls level by level, rows read in several branches.
        commit_s: for having the state after the accepted path.
        timing_s: for knowing the former: reading the rows as one text, now and then.
    """

    forward_s: float = 0.0
    commit_s: float = 0.0
    timing_s: float = 0.0


class RollbackClock:
    """Times what recurrent layers do in one step; nothing is waited for until it is read.

    Copies of states are timed as they are made, within a layer's time for a tree. What reading it
    level by level, or branch by branch, takes beyond them is a difference: as many rows are given
    to the layer as one text, of which nothing would be dropped, a few times and then now and again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_read = 0
        self.begin({})

    def begin(self, as_text: AsText) -> None:
        """A forward begins; what was not read of the last one is forgotten.

        Args:
            as_text: of the model; what is timed here is added.
        """
        self._as_text = as_text
        self._layers: list[tuple[LayerKind, Span]] = []
        self._texts: list[Span] = []
        self._commits: list[Span] = []

    def wants(self, kind: LayerKind) -> bool:
        """Whether rows of one text are to be timed in such a layer."""
        again = self._num_read % AGAIN == AGAIN - 1 and not self._texts
        return again or len(self._as_text.get(kind, ())) < TIMED

    @contextlib.contextmanager
    def text(self, kind: LayerKind) -> Iterator[None]:
        """A layer reads as many rows of one text."""
        with self._timed(self._texts):
            yield
        self._as_text.setdefault(kind, deque(maxlen=TIMED)).append(self._texts[-1])

    @contextlib.contextmanager
    def layer(self, kind: LayerKind) -> Iterator[None]:
        """A layer reads the rows of a tree."""
        spans: list[Span] = []
        with self._timed(spans):
            yield
        self._layers.append((kind, spans[0]))

    def commit(self) -> contextlib.AbstractContextManager[None]:
        """The states after the accepted path are had."""
        return self._timed(self._commits)

    @contextlib.contextmanager
    def _timed(self, spans: list[Span]) -> Iterator[None]:
        began = now(self._device)
        yield
        spans.append((began, now(self._device)))

    def read(self) -> RollBack:
        """Of the last forward and what was committed of it; waits for the device."""
        self._num_read += 1
        kinds = {kind for kind, _ in self._layers}
        as_text = {kind: statistics.median(map(seconds, self._as_text[kind])) for kind in kinds}
        beyond_s = sum(seconds(span) - as_text[kind] for kind, span in self._layers)
        commit_s, timing_s = (sum(map(seconds, spans)) for spans in (self._commits, self._texts))
        return RollBack(max(0.0, beyond_s), commit_s, timing_s)


class RecurrentStates:
    """The recurrent half of a cache: committed states, those of the last forward, and older ones.

    Attributes:
        committed: by layer, after all committed rows; its tensors are never changed.
        working: of the layer that is running, which reads and writes it through the cache.
        seen: what its convolutions saw, their state in front.
        pending_bytes: that the last forward holds until its path is known.
        clock: what roll-back took since the last forward began.
    """

    def __init__(self, device: torch.device, rewinds: int = 0) -> None:
        """`rewinds`: so many of the last commits can be taken back exactly."""
        self.clock = RollbackClock(device)
        self.committed: dict[int, States] = {}
        self.working: States = {}
        self.seen: States = {}
        self.pending_bytes = 0
        self._rewinds = rewinds
        self._after: dict[int, AfterPath] = {}
        self._earlier: dict[int, dict[int, States]] = {}
        self._lasting: list[int] = []

    def begin(self, as_text: AsText) -> None:
        """A forward begins, of a model whose layers were timed before."""
        self.pending_bytes = 0
        self.clock.begin(as_text)

    def ran(self, layer: int, after: AfterPath, *held: Mapping[str, Any] | States) -> None:
        """A layer ran over the rows of a forward; `held`: the tensors that `after` needs."""
        tensors = (value for each in held for value in each.values() if isinstance(value, Tensor))
        self.pending_bytes += sum(tensor.nbytes for tensor in tensors)
        self._after[layer] = after

    def commit(self, path: tuple[int, ...], length: int, *, lasting: bool) -> None:
        """Go on from after these rows, of `length` in all."""
        with self.clock.commit():
            self.committed = {layer: after(path) for layer, after in self._after.items()}
        self._after.clear()
        self.seen = {}
        if lasting:
            self._lasting = [*self._lasting, length][-LASTING:]
        self._earlier[length] = self.committed
        kept = {*self._lasting, *list(self._earlier)[len(self._earlier) - self._rewinds :]}
        self._earlier = {at: states for at, states in self._earlier.items() if at in kept}

    def rewind(self, length: int) -> int:
        """Go back to the newest state kept of at most `length` rows; return how many it is of."""
        self._after.clear()
        at = max((at for at in self._earlier if at <= length), default=0)
        self.committed = self._earlier.get(at, {})
        self._earlier = {old: states for old, states in self._earlier.items() if old <= at}
        self._lasting = [old for old in self._lasting if old <= at]
        return at

    def copied(self, length: int) -> dict[int, dict[int, States]]:
        """All states that there are, by the number of rows that they are after.

        `length`: of the committed ones, which may be parts of larger tensors.
        """
        own = {
            layer: {key: state.clone() for key, state in states.items()}
            for layer, states in self.committed.items()
        }
        return {**self._earlier, length: own} if length else {}

    def paste(self, states: Mapping[int, dict[int, States]], length: int) -> None:
        """Go on from the states after `length` rows; earlier ones can be gone back to."""
        self._lasting = sorted(at for at in states if at <= length)[-LASTING:]
        self._earlier = {at: states[at] for at in self._lasting}
        self.committed = states[length]

    @property
    def num_bytes(self) -> int:
        of_layers = (self.committed, *self._earlier.values())
        held = {id(t): t for layers in of_layers for s in layers.values() for t in s.values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    # ---- what transformers' layers call, through the cache

    def convolve(self, number: int, new: Tensor, width: int | None) -> Tensor:
        """`new` `(batch, channels, rows)` behind the state; its last `width` are the next one."""
        key = ("conv", number)
        old = self.working.get(key)
        if old is None:
            width = width or new.shape[-1]
            full = pad(new, (max(0, width - new.shape[-1]), 0))
        else:
            width = old.shape[-1]
            full = torch.cat([old, new], dim=-1)
        self.working[key] = full[..., full.shape[-1] - width :].clone()
        self.seen[key] = full
        return full
