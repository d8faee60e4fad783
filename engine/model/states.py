"""The states of recurrent layers, and how they are rolled back to the accepted path.

Committed states are never modified: every forward works on a copy. After a forward each layer
leaves a function that returns its state after any accepted path (`AfterPath`); `commit` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.model.clock import Span, now, seconds

States = dict[tuple[str, int], Tensor]
"""`(kind, number)` → `(batch, …)`: what a layer carries from token to token."""
AfterPath = Callable[[tuple[int, ...]], States]
"""The state `(1, …)` after these rows of the last forward."""
LASTING = 4
"""How many states at the ends of prompts are kept to return to."""


class RecurrentStates:
    """The recurrent half of a cache: committed states, those of the last forward, and older ones.

    Attributes:
        committed: by layer, after all committed rows; its tensors are never changed.
        working: of the layer that is running, which reads and writes it through the cache.
        seen: what its convolutions saw, their state in front.
    """

    def __init__(self, device: torch.device, rewinds: int = 0) -> None:
        """`rewinds`: how many of the last commits can be undone exactly."""
        self._device = device
        self._commit: Span | None = None
        self.committed: dict[int, States] = {}
        self.working: States = {}
        self.seen: States = {}
        self._rewinds = rewinds
        self._after: dict[int, AfterPath] = {}
        self._earlier: dict[int, dict[int, States]] = {}
        self._lasting: list[int] = []

    def ran(self, layer: int, after: AfterPath) -> None:
        """Register a layer's states of the forward that is running."""
        self._after[layer] = after

    def commit(self, path: tuple[int, ...], length: int, *, lasting: bool) -> None:
        """Continue after these rows; `length` rows are then committed in all."""
        began = now(self._device)
        self.committed = {layer: after(path) for layer, after in self._after.items()}
        self._commit = began, now(self._device)
        self._after.clear()
        self.seen = {}
        if lasting:
            self._lasting = [*self._lasting, length][-LASTING:]
        self._earlier[length] = self.committed
        lengths = {*self._lasting, *list(self._earlier)[len(self._earlier) - self._rewinds :]}
        self._earlier = {at: states for at, states in self._earlier.items() if at in lengths}

    @property
    def commit_s(self) -> float:
        """Seconds that the last commit took to restore the states; waits for the device."""
        return 0.0 if self._commit is None else seconds(self._commit)

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
        tensors = {id(t): t for layers in of_layers for s in layers.values() for t in s.values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

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
