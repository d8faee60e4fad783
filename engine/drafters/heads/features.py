"""Bases of drafters on the target's features: the rows that they keep between steps."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from engine.drafters.base import Drafter, Start
from engine.drafters.texts import TargetTrace
from engine.proposal import Needs, Outcome, TargetOutput
from engine.tree import upload


def features_of(output: TargetOutput | TargetTrace) -> Tensor:
    """The features `(rows, width)` that the drafter needs."""
    features = output.hidden if output.layers is None else output.layers
    assert features is not None, "the drafter needs no features"
    return features


class FeatureDrafter(Drafter):
    """Collects the features of committed rows until its network reads them.

    These can be several steps' rows: some steps do not call `propose`.
    """

    has_network = True
    _unread: tuple[tuple[Tensor, Tensor], ...] = ()

    def start(self, start: Start) -> None:
        super().start(start)
        features, rows = features_of(start.output), self._resume(max(0, self.num_shared - 1))
        tokens = upload(torch.tensor(self.text[1 + rows :]), features.device)
        self._unread = ((features[rows:], tokens),)

    @abstractmethod
    def _resume(self, rows: int) -> int:
        """Keep at most `rows` rows of the previous run; returns how many are kept."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        features = features_of(outcome.output)
        rows = upload(torch.tensor([outcome.path, outcome.committed]), features.device)
        self._unread += ((features[rows[0]], rows[1]),)

    def unread(self) -> tuple[Tensor, Tensor]:
        """Features `(n, width)`, and the token after each of their positions `(n,)`."""
        features, tokens = zip(*self._unread, strict=True)
        return torch.cat(features), torch.cat(tokens)

    def finish(self) -> None:
        self._unread = ()


class LastRowDrafter(Drafter):
    """Drafts from the target's last hidden state at the last accepted row: `hidden (1, size)`."""

    has_network = True
    needs = Needs(hidden=True)
    hidden = torch.empty(0)

    def start(self, start: Start) -> None:
        super().start(start)
        self.hidden = features_of(start.output)[-1:]

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.hidden = features_of(outcome.output)[outcome.path[-1] :][:1]

    def finish(self) -> None:
        self.hidden = torch.empty(0)
