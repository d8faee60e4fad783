"""Distillation losses of drafters, against the target's likeliest tokens.

Cross-entropy, and `-log α` of the acceptance rate `α = Σ min(p, q)` that the target's distribution
p gives to drafts of q (arXiv:2211.17192, theorem 3.5; as a loss: arXiv:2602.23881).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from engine.drafters.heads.vocabulary import Vocabulary
from engine.model.target import Target

NUM_RANKS = 10
"""Ranks that are told apart when counting which of a drafter's guesses was right."""
CHUNK = 512
"""Rows whose logits are in memory together."""
ROW_MULTIPLE = 128
"""Rows are learnt in multiples of this: kernels are made for a number of rows, and so once."""


@dataclass(frozen=True, slots=True, eq=False)
class TopProbs:
    """A distribution per row, of which only the likeliest tokens are known.

    Attributes:
        indices: `(rows, k)` int64, in the vocabulary that is learnt.
        probs: `(rows, k)` float32; a row may add up to less than 1, and then counts less.
    """

    indices: Tensor
    probs: Tensor

    def __getitem__(self, rows: Tensor) -> TopProbs:
        return TopProbs(self.indices[rows], self.probs[rows])

    def weighted(self, weights: Tensor) -> TopProbs:
        """Rows times these weights `(rows,)`."""
        return TopProbs(self.indices, self.probs * weights[:, None])

    def sharpened(self, temperature: float) -> TopProbs:
        """As they are when the target samples at this temperature; a row's sum is kept."""
        if temperature == 1.0:
            return self
        mass, highest = self.probs.sum(dim=-1, keepdim=True), self.probs.amax(-1, keepdim=True)
        powers = (self.probs / highest.clamp_min(1e-9)) ** (1 / temperature)
        return TopProbs(
            self.indices, powers * (mass / powers.sum(-1, keepdim=True).clamp_min(1e-9))
        )

    def mixed(self, labels: Tensor, share: float) -> TopProbs:
        """With so much of every row put on its label; labels < 0 add nothing."""
        hard = ((labels >= 0).float() * share)[:, None]
        same = self.indices == labels[:, None]
        new = hard * ~same.any(dim=-1, keepdim=True)
        indices = torch.cat([self.indices, labels.clamp_min(0)[:, None]], dim=-1)
        return TopProbs(indices, torch.cat([self.probs * (1 - share) + hard * same, new], dim=-1))


@dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """What turns a hidden vector into logits of the tokens that are learnt.

    Attributes:
        weight: `(vocabulary, hidden)`.
        softcap: logits are `softcap · tanh(logits / softcap)`; None = as they are.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    @classmethod
    def of(cls, target: Target, vocabulary: Vocabulary) -> LMHead:
        """The target's, of these tokens only."""
        head, ids = target.lm_head, vocabulary.ids
        weight, bias = head.weight, getattr(head, "bias", None)
        assert isinstance(weight, Tensor)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return cls(weight, bias, getattr(target.config, "final_logit_softcapping", None))


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a drafter predicts at one depth, and what it should.

    Attributes:
        hidden: `(rows, hidden)`, what `lm_head` is applied to.
        teacher: the target's distributions.
        labels: `(rows,)` int64, the text's own tokens in the vocabulary; < 0 = not in it.
        num_rows: rows that count; those behind them only fill up.
        weight: of the cross-entropy in the loss.
        auxiliary: another loss, added as it is.
    """

    hidden: Tensor
    lm_head: LMHead
    teacher: TopProbs
    labels: Tensor
    num_rows: int
    weight: float = 1.0
    auxiliary: Tensor | None = None

    def loss(self, acceptance_weight: float = 0.0) -> Tensor:
        """Summed over the rows that count.

        Args:
            acceptance_weight: share of `-log α` in it; the rest is the cross-entropy.
        """
        hidden, head = self.hidden, self.lm_head
        counts = (torch.arange(len(hidden)) < self.num_rows).to(hidden)
        teacher = self.teacher.weighted(counts)
        if head.bias is None and head.softcap is None:
            hidden = hidden if head.weight.requires_grad else hidden.to(head.weight.dtype)
            chunked: Any = _ChunkedLoss.apply
            parts = (teacher.indices, teacher.probs, acceptance_weight)
            loss: Tensor = chunked(hidden, head.weight, *parts)
            return loss
        log_probs = log_softmax(head(hidden).float(), dim=-1).gather(1, teacher.indices)
        entropy = -(teacher.probs * log_probs).sum()
        mass = teacher.probs.sum(dim=-1)
        rate = torch.minimum(teacher.probs, log_probs.exp() * mass[:, None]).sum(dim=-1)
        missed = mass * ((mass + _TINY).log() - (rate + _TINY).log())
        return entropy.lerp(missed.sum(), acceptance_weight)

    @torch.no_grad()
    def rank_hits(self, num_rows: int) -> Tensor:
        """`(NUM_RANKS,)`: of the first rows, how many rank their label so."""
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
    """A loss, and how good the predictions behind it were, per drafted depth.

    Attributes:
        loss: scalar; what is minimised.
        hits: `(depths, NUM_RANKS)` float, rows whose label had that rank.
        rows: `(depths,)` float, rows counted.
    """

    loss: Tensor
    hits: Tensor
    rows: Tensor


_TINY = 1e-9


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy and `-log α` through an output matrix, chunk by chunk.

    The logits of a chunk give its loss and its gradient at once, and are dropped: a vocabulary's
    worth of logits for every row of a pack is never in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, indices: Tensor, probs: Tensor, share: float
    ) -> Tensor:
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
                picked, aim = logits.gather(1, indices[at]), probs[at]
                mass = aim.sum(dim=-1, keepdim=True)
                highest = logits.amax(dim=-1, keepdim=True)
                logits.sub_(highest).exp_()
                total = logits.sum(dim=-1, keepdim=True)
                entropy = (mass * (total.log() + highest)).sum() - (aim * picked).sum()
                loss += (1 - share) * entropy
                if share:
                    missed, aim = _towards_acceptance(picked - highest - total.log(), aim, share)
                    loss += share * missed
                    mass = aim.sum(dim=-1, keepdim=True)
                logits.mul_(mass / total).scatter_add_(1, indices[at], -aim)
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
            None,
        )


def _towards_acceptance(log_q: Tensor, p: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`-log α` in sum, and the distributions whose cross-entropy has the mixed loss's gradient.

    The gradient of `-log Σ min(p, q)` is that of a cross-entropy towards `q / α` where `q < p` and
    0 elsewhere: what is overrated teaches nothing more.
    """
    mass = p.sum(dim=-1, keepdim=True)
    q = log_q.exp() * mass
    rate = torch.minimum(p, q).sum(dim=-1, keepdim=True) + _TINY
    missed = (mass * ((mass + _TINY) / rate).log()).sum()
    return missed, (1 - share) * p + share * torch.where(q < p, q, 0.0) * (mass / rate)


def pad_rows(rows: Tensor) -> Tensor:
    """Rows `(m,)`, the last one repeated up to a multiple of `ROW_MULTIPLE`."""
    lacking = -len(rows) % ROW_MULTIPLE
    return torch.cat([rows, rows[-1:].expand(lacking)]) if len(rows) else rows
