"""What changes from step to step, in tensors at fixed addresses.

Rows of a forward lie in the cache behind those that are there to stay:

    0 … base-1          seen by every row
    base … start-1      rows of earlier forwards of this step (a drafter's levels)
    start … start+n-1   the n rows of this forward, then padding

`among` says who of the rows sees whom of those from `base` on. Padding sees what its neighbours
see, is seen by nobody, and what it leaves in the cache is written over later.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNSEEN = -30000.0
"""Added to the score of what a row does not see; finite, so that no row is without a maximum."""


class RowInputs:
    """Inputs of one recorded forward over `rows` rows, `width` of which may follow `base`."""

    def __init__(self, rows: int, device: torch.device, *, width: int | None = None) -> None:
        self.rows, self.width = rows, width or rows
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.among = torch.zeros(rows, self.width, dtype=torch.bool, device=device)
        self._base = torch.zeros(1, dtype=torch.int64, device=device)
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._order = torch.arange(rows, device=device)
        self._causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        self._seen: tuple[Tensor | None, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        held = (self.tokens, self.positions, self.among, self._causal, self._order)
        return sum(x.numel() * x.element_size() for x in held)

    def load(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        *,
        base: int,
        start: int | None = None,
    ) -> None:
        """Take the values of one forward.

        Args:
            tokens: `(n,)`, n ≤ rows; positions: `(n,)` or `(1,)`.
            visible: `(n, start - base + n)` bool; None = causal, and all rows before `start`.
        """
        n, start = len(tokens), base if start is None else start
        self.tokens[:n].copy_(tokens)
        self.positions[:n].copy_(positions.expand(n))
        self._base.fill_(base)
        self._start.fill_(start)
        self._see(visible, n, start - base)

    def _see(self, visible: Tensor | None, n: int, earlier: int) -> None:
        # A static tree shows the same tensor in every step: then nothing is copied.
        if self._seen is not None and self._seen[0] is visible and self._seen[1:] == (n, earlier):
            return
        self._seen = (visible, n, earlier)
        self.among.zero_()
        if visible is None:
            self.among[:n, :earlier] = True
            self.among[:n, earlier : earlier + n].copy_(self._causal[:n, :n])
        else:
            self.among[:n, : earlier + n].copy_(visible)

    # ---- inside the recording

    def places(self) -> Tensor:
        """Rows of the cache that the forward's rows go to, `(rows,)` int64."""
        return self._start + self._order

    def visible(self, context: int) -> Tensor:
        """Who sees whom of the cache's first `context` rows, `(rows, context)` bool."""
        offset = torch.arange(context, device=self.among.device) - self._base
        columns = offset.clamp(0, self.width - 1).expand(self.rows, context)
        new = self.among.gather(1, columns) & (offset < self.width)
        return new | (offset < 0)

    def added(self, context: int, dtype: torch.dtype) -> Tensor:
        """The same, to be added to scores: 0 or `UNSEEN`, `(rows, context)`."""
        zeros = torch.zeros(self.rows, context, dtype=dtype, device=self.among.device)
        return zeros.masked_fill_(~self.visible(context), UNSEEN)
