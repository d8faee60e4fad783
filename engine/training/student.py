"""What a drafter in training is: a module with a loss on packs, saved in its public layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from engine.proposal import Needs
from engine.training.packs import Pack, Teacher

NUM_RANKS = 10
"""Ranks that are told apart when counting which of a drafter's guesses was right."""


@dataclass(slots=True)
class Judged:
    """A loss, and how good the guesses behind it were, per drafted depth.

    Attributes:
        loss: scalar; what is minimised.
        hits: `(depths, NUM_RANKS)` float, rows whose true token had that rank.
        rows: `(depths,)` float, rows judged.
    """

    loss: Tensor
    hits: Tensor
    rows: Tensor

    @property
    def rates(self) -> list[list[float]]:
        """Per depth, the share of rows that each rank got right."""
        return (self.hits / self.rows[:, None].clamp_min(1)).tolist()


class Student(nn.Module):
    """A drafter that can be trained."""

    needs: Needs = Needs()

    @abstractmethod
    def judge(self, pack: Pack, teacher: Teacher, generator: torch.Generator | None) -> Judged:
        """Loss and hits on a pack.

        Args:
            generator: source of training noise; None when evaluating.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote there.

        Raises:
            DrafterError, SourceError: there are none, or they are of another shape.
        """

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config and weights in the layout that published drafters have."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What the training card says about the network."""


def no_hits(depths: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty counters for `Judged`."""
    return torch.zeros(depths, NUM_RANKS, device=device), torch.zeros(depths, device=device)


@torch.no_grad()
def count_hits(logits: Tensor, wanted: Tensor) -> Tensor:
    """`(NUM_RANKS,)` rows `(rows, vocabulary)` that rank the wanted id so; ids < 0 hit nothing."""
    k = min(NUM_RANKS, logits.shape[-1])
    found = logits.topk(k, dim=-1).indices == wanted[:, None]
    return nn.functional.pad(found.sum(dim=0).float(), (0, NUM_RANKS - k))


def hard_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy with the wanted ids; rows with ids < 0 count 0."""
    return nn.functional.cross_entropy(logits.float(), wanted, ignore_index=-1, reduction="sum")


def soft_loss(logits: Tensor, probs: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy with the teacher's distribution `probs`."""
    return -(probs * log_softmax(logits.float(), dim=-1)).sum()


class Vocabulary:
    """A subset of the target's tokens that a loss is computed over; None = all of them."""

    def __init__(self, ids: Tensor | None, vocab_size: int) -> None:
        self.ids = ids
        self._place: Tensor | None = None
        if ids is not None:
            self._place = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
            self._place[ids] = torch.arange(len(ids), device=ids.device)

    def place(self, tokens: Tensor) -> Tensor:
        """Token ids → their places in the subset, −1 for those outside."""
        return tokens if self._place is None else self._place[tokens]
