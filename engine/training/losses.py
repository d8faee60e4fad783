"""The distillation loss of drafters: cross-entropy to the target's most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.logits import LogitTransform
from engine.model.packed import weight_of, weight_rows
from engine.model.target import Target

NUM_RANKS = 10
"""Ranks that are counted separately."""
CHUNK = 512
"""Rows whose logits are in memory at once."""
ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this, since kernels are compiled per number of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class TopProbs:
    """The most probable tokens of a distribution per row.

    Attributes:
        indices: `(rows, k)` int64, in the vocabulary of the loss.
        probs: `(rows, k)` float32; a row's sum is its weight in the loss.
    """

    indices: Tensor
    probs: Tensor

    def __getitem__(self, rows: Tensor) -> TopProbs:
        return TopProbs(self.indices[rows], self.probs[rows])

    def weighted(self, weights: Tensor) -> TopProbs:
        """Rows multiplied by weights `(rows,)`."""
        return TopProbs(self.indices, self.probs * weights[:, None])

    def mixed(self, labels: Tensor, share: float) -> TopProbs:
        """The distributions mixed with one-hot labels at this share; labels < 0 add nothing."""
        hard = ((labels >= 0).float() * share)[:, None]
        same = self.indices == labels[:, None]
        new = hard * ~same.any(dim=-1, keepdim=True)
        indices = torch.cat([self.indices, labels.clamp_min(0)[:, None]], dim=-1)
        return TopProbs(indices, torch.cat([self.probs * (1 - share) + hard * same, new], dim=-1))


@dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """Maps hidden vectors to logits over the vocabulary of the loss.

    Attributes:
        weight: `(vocabulary, hidden)`.
        transform: of the products with the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = LogitTransform()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.transform(linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    @classmethod
    def of(cls, target: Target, vocabulary: Vocabulary) -> LMHead:
        """The target's output matrix, restricted to a vocabulary."""
        head, ids = target.lm_head, vocabulary.ids

        def part(name: str) -> Tensor:
            if ids is not None:
                return weight_rows(head, ids, name)
            return weight_of(head, name).to(target.device)

        bias = None if getattr(head, "bias", None) is None else part("bias")
        return cls(part("weight"), bias, LogitTransform.of(target.config))


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A drafter's predictions at one depth and their targets.

    Attributes:
        hidden: `(rows, hidden)`, the input of `lm_head`.
        teacher: the target's distributions.
        labels: `(rows,)` int64, the text's tokens in the vocabulary; < 0 = not in it.
        num_rows: number of real rows; the others are padding.
        weight: of the cross-entropy in the loss.
        auxiliary: an additional loss, not weighted.
    """

    hidden: Tensor
    lm_head: LMHead
    teacher: TopProbs
    labels: Tensor
    num_rows: int
    weight: float = 1.0
    auxiliary: Tensor | None = None

    def loss(self) -> Tensor:
        """The cross-entropy, summed over the real rows."""
        hidden, head = self.hidden, self.lm_head
        counts = (torch.arange(len(hidden)) < self.num_rows).to(hidden)
        teacher = self.teacher.weighted(counts)
        if head.bias is None and head.transform.softcap is None:
            hidden = hidden * head.transform.factor
            hidden = hidden if head.weight.requires_grad else hidden.to(head.weight.dtype)
            chunked: Any = _ChunkedLoss.apply
            loss: Tensor = chunked(hidden, head.weight, teacher.indices, teacher.probs)
            return loss
        log_probs = log_softmax(head(hidden).float(), dim=-1).gather(1, teacher.indices)
        return -(teacher.probs * log_probs).sum()

    @torch.no_grad()
    def rank_hits(self, num_rows: int) -> Tensor:
        """`(NUM_RANKS,)`: number of the first `num_rows` rows whose label has each rank."""
        hits = torch.zeros(NUM_RANKS, device=self.hidden.device)
        for i in range(0, num_rows, CHUNK):
            at = slice(i, min(i + CHUNK, num_rows))
            logits, labels = self.lm_head(self.hidden[at]), self.labels[at]
            score = logits.gather(1, labels.clamp_min(0)[:, None])
            ranks = (logits > score).sum(dim=-1)[labels >= 0]
            hits += torch.bincount(ranks[ranks < NUM_RANKS], minlength=NUM_RANKS)
        return hits


@dataclass(slots=True, eq=False)
class LossOutput:
    """A loss, and the accuracy of its predictions per drafted depth.

    Attributes:
        loss: scalar.
        hits: `(depths, NUM_RANKS)` float, rows whose label has that rank.
        rows: `(depths,)` float, rows counted.
    """

    loss: Tensor
    hits: Tensor
    rows: Tensor


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy through an output matrix, chunk by chunk.

    A chunk's loss and gradient are computed together and its logits dropped: those of a whole pack
    are never in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            matrix, rows = weight.to(dtype), x.to(dtype)
            loss = x.new_zeros((), dtype=torch.float32)
            grad_x = torch.empty_like(rows)
            grad_weight = None
            if ctx.needs_input_grad[1]:
                grad_weight = torch.zeros(weight.shape, device=x.device)
            for i in range(0, len(x), CHUNK):
                at = slice(i, i + CHUNK)
                logits = linear(rows[at], matrix).float()
                label_logits, teacher = logits.gather(1, indices[at]), probs[at]
                mass = teacher.sum(dim=-1, keepdim=True)
                highest = logits.amax(dim=-1, keepdim=True)
                logits.sub_(highest).exp_()
                total = logits.sum(dim=-1, keepdim=True)
                loss += (mass * (total.log() + highest)).sum() - (teacher * label_logits).sum()
                logits.mul_(mass / total).scatter_add_(1, indices[at], -teacher)
                grad_logits = logits.to(dtype)
                torch.mm(grad_logits, matrix, out=grad_x[at])
                if grad_weight is not None:
                    grad_weight += (grad_logits.T @ rows[at]).float()
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        return (
            (grad_x * grad).to(x_dtype),
            None if grad_weight is None else (grad_weight * grad).to(weight_dtype),
            None,
            None,
        )


def pad_rows(rows: Tensor) -> Tensor:
    """Rows `(m,)`, the last one repeated up to a multiple of `ROW_MULTIPLE`."""
    padding = -len(rows) % ROW_MULTIPLE
    return torch.cat([rows, rows[-1:].expand(padding)]) if len(rows) else rows
