"""What a drafter in training is: a module with a loss on packs, saved in its public layout."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from engine.model.target import Target
from engine.proposal import Needs

if TYPE_CHECKING:
    from engine.training.packs import Pack

NUM_RANKS = 10
"""Ranks that are told apart when counting which of a drafter's guesses was right."""
CHUNK = 512
"""Rows whose logits are in memory together."""
ROWS = 128
"""Rows are learnt in multiples of this."""
HITS_SAMPLE = 64
"""Rows per pack and depth whose hits are counted while training."""


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
    vocabulary: Vocabulary

    @abstractmethod
    def judge(self, pack: Pack, generator: torch.Generator | None) -> Judged:
        """Loss and hits on a pack.

        Args:
            pack: shows what `needs` and `vocabulary` ask for.
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


@dataclass(frozen=True, slots=True)
class Likely:
    """A distribution per row, of which only the likeliest tokens are known.

    Attributes:
        places: `(rows, k)` int64, their places in the vocabulary that is learnt.
        probs: `(rows, k)` float32; a row may add up to less than 1, and then counts less.
    """

    places: Tensor
    probs: Tensor

    def __getitem__(self, rows: Tensor) -> Likely:
        return Likely(self.places[rows], self.probs[rows])

    def weighted(self, weights: Tensor) -> Likely:
        """Rows `(rows,)` times these weights."""
        return Likely(self.places, self.probs * weights[:, None])

    def mixed(self, wanted: Tensor, share: float) -> Likely:
        """With so much of every row put on its wanted token; ids < 0 add nothing."""
        hard = (wanted >= 0).float() * share
        places = torch.cat([self.places, wanted.clamp_min(0)[:, None]], dim=-1)
        return Likely(places, torch.cat([self.probs * (1 - share), hard[:, None]], dim=-1))


@dataclass(frozen=True, slots=True)
class Output:
    """What turns a hidden vector into logits of the tokens that are learnt.

    Attributes:
        weight: `(vocabulary, hidden)`.
        softcap: logits are `softcap · tanh(logits / softcap)`; None = as they are.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        logits = linear(x.to(self.weight.dtype), self.weight, self.bias)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    @classmethod
    def of(cls, target: Target, ids: Tensor | None) -> Output:
        """The target's `lm_head`, of these tokens only if some are given."""
        head = target.lm_head
        weight, bias = head.weight, getattr(head, "bias", None)
        assert isinstance(weight, Tensor)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return cls(weight, bias, getattr(target.config, "final_logit_softcapping", None))


@dataclass(frozen=True, slots=True)
class Lesson:
    """What some rows are to learn.

    Attributes:
        x: `(rows, hidden)`, what `output` is applied to.
        theirs: the distributions to learn.
        wanted: `(rows,)` int64 places of the text's own tokens; < 0 = not in the vocabulary.
        count: rows that count; those behind them only fill up.
    """

    x: Tensor
    output: Output
    theirs: Likely
    wanted: Tensor
    count: int

    def judge(self, *, sample: int | None) -> tuple[Tensor, Tensor, int]:
        """Sum over rows of the cross-entropy, hits by rank `(NUM_RANKS,)`, and rows counted.

        Args:
            sample: hits are counted on the first so many rows; None = on all.
        """
        output, count = self.output, self.count if sample is None else min(sample, self.count)
        theirs = self.theirs.weighted((torch.arange(len(self.x)) < self.count).to(self.x))
        hits = torch.zeros(NUM_RANKS, device=self.x.device)
        with torch.no_grad():
            for i in range(0, count, CHUNK):
                at = slice(i, min(i + CHUNK, count))
                hits += count_hits(output(self.x[at]), self.wanted[at])
        if output.bias is None and output.softcap is None:
            x = self.x.to(output.weight.dtype) if not output.weight.requires_grad else self.x
            cross_entropy: Any = _CrossEntropy.apply
            loss: Tensor = cross_entropy(x, output.weight, theirs.places, theirs.probs)
        else:
            logs = log_softmax(output(self.x).float(), dim=-1)
            loss = -(theirs.probs * logs.gather(1, theirs.places)).sum()
        return loss, hits, count


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy through an output matrix, chunk by chunk.

    The logits of a chunk give its loss and its gradient at once, and are dropped: a vocabulary's
    worth of logits for every row of a pack is never in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor, probs: Tensor) -> Tensor:
        half = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            matrix, rows = weight.to(half), x.to(half)
            loss = x.new_zeros((), dtype=torch.float32)
            grad_x = torch.empty_like(rows)
            grad_weight = None
            if ctx.needs_input_grad[1]:
                grad_weight = torch.zeros(weight.shape, device=x.device)
            for i in range(0, len(x), CHUNK):
                at = slice(i, i + CHUNK)
                logits = linear(rows[at], matrix).float()
                picked, mass = logits.gather(1, places[at]), probs[at].sum(dim=-1)
                highest = logits.amax(dim=-1, keepdim=True)
                logits.sub_(highest).exp_()
                total = logits.sum(dim=-1, keepdim=True)
                loss += (mass * (total.log() + highest)[:, 0]).sum() - (probs[at] * picked).sum()
                logits.mul_(mass[:, None] / total).scatter_add_(1, places[at], -probs[at])
                slope = logits.to(half)
                torch.mm(slope, matrix, out=grad_x[at])
                if grad_weight is not None:
                    grad_weight += (slope.T @ rows[at]).float()
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        of_x, of_weight = ctx.dtypes
        return (
            (grad_x * grad).to(of_x),
            None if grad_weight is None else (grad_weight * grad).to(of_weight),
            None,
            None,
        )


def fill_up(rows: Tensor) -> Tensor:
    """Rows `(m,)`, the last one repeated up to a multiple of `ROWS`.

    Kernels are made for a number of rows; with few different numbers they are made once.
    """
    lacking = -len(rows) % ROWS
    return torch.cat([rows, rows[-1:].expand(lacking)]) if len(rows) else rows


def count_hits(logits: Tensor, wanted: Tensor) -> Tensor:
    """`(NUM_RANKS,)` rows `(rows, vocabulary)` that rank the wanted id so; ids < 0 hit nothing."""
    theirs = logits.gather(1, wanted.clamp_min(0)[:, None])
    ranks = (logits > theirs).sum(dim=-1)[wanted >= 0]
    return torch.bincount(ranks[ranks < NUM_RANKS], minlength=NUM_RANKS).float()


class Vocabulary:
    """A subset of the target's tokens that a loss is computed over; None = all of them."""

    def __init__(self, ids: Tensor | None, vocab_size: int) -> None:
        self.ids = ids
        self._place: Tensor | None = None
        if ids is not None:
            self._place = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
            self._place[ids] = torch.arange(len(ids), device=ids.device)

    @property
    def key(self) -> str:
        """A short name of just these tokens."""
        if self.ids is None:
            return "all"
        return hashlib.sha256(self.ids.cpu().numpy().tobytes()).hexdigest()[:16]

    def place(self, tokens: Tensor) -> Tensor:
        """Token ids → their places in the subset, −1 for those outside."""
        return tokens if self._place is None else self._place[tokens]
