"""Logits → probabilities, and the random draws of a run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.config import Sampling
from engine.errors import TargetError

NOT_FINITE = (
    "The model's logits are not finite, so no token can be chosen. Load it with dtype float32 or "
    "bfloat16; where that does not help, its weights are damaged."
)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution the next token is drawn from.

    Temperature, then top-k, then top-p, each as transformers' warper of that name.

    Args:
        logits: `(…, vocab)`, any float dtype.

    Returns:
        `(…, vocab)` float32 summing to 1. Greedy sampling gives a point mass on the argmax. Of
        logits that are not finite nothing can be drawn: they give no numbers.
    """
    scores = logits.float()
    if sampling.greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0 + 0.0 * scores.gather(-1, best))
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1.0:
        scores = _nucleus(scores, sampling.top_p)
    return scores.softmax(dim=-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches `top_p`; always the best one."""
    ascending, order = scores.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The index that a uniform number in [0, 1) selects from `probs` `(vocab,)`, on their device.

    Example: probs `[0.2, 0.0, 0.8]` → 0 below 0.2, else 2.
    """
    cdf = probs.double().cumsum(dim=-1)
    index = torch.searchsorted(cdf, uniform.double() * cdf[-1], right=True)
    return index.clamp_max(len(cdf) - 1)


class Draws(Protocol):
    """Source of a run's randomness; tests replay recorded ones."""

    def uniform(self) -> float:
        """A number in [0, 1)."""

    def pick(self, probs: Tensor) -> int:
        """An index drawn from `probs` `(vocab,)`, which sum to 1."""


class SeededDraws:
    """Draws from one seeded generator on the CPU, so a seed means the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def pick(self, probs: Tensor) -> int:
        weights = probs.detach().to("cpu", torch.float64)
        if not weights.isfinite().all():
            raise TargetError(NOT_FINITE)
        return int(torch.multinomial(weights, 1, generator=self.generator))
