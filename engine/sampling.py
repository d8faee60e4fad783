"""Logits → probabilities, and the random draws of a run."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.config import Sampling
from engine.errors import TargetError
from engine.tree import upload

NOT_FINITE = (
    "The model's logits are not finite, so no token can be chosen. Load it with dtype float32 or "
    "bfloat16; where that does not help, its weights are damaged."
)

NUCLEUS_CANDIDATES = 1024
"""Top tokens in which the nucleus is looked for first; it seldom has more."""
BLOCK = 256
"""Probabilities that `inverse_cdf` sums at a time."""


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it, such as MPS; both hold ids of tokens exactly."""
    if device.type not in ("cpu", "cuda"):
        try:
            torch.ones(1, dtype=torch.float64, device=device).sum()
        except (RuntimeError, TypeError):
            return torch.float32
    return torch.float64


def upload_numbers(numbers: Sequence[float], device: torch.device) -> Tensor:
    """As `upload`, in the widest float of the device."""
    return upload(torch.tensor(numbers, dtype=widest_float(device)), device)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution the next token is drawn from.

    Temperature, then top-k, top-p and min-p, each as transformers' warper of that name.

    Args:
        logits: `(…, vocab)`, any float dtype.

    Returns:
        `(…, vocab)` float32 summing to 1. Greedy sampling gives a point mass on the argmax. For
        logits that are not finite, nor are these.
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
    if sampling.min_p > 0.0:
        threshold = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    return scores.softmax(dim=-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches `top_p`; always the best one."""
    if scores.device.type == "cpu" and scores.shape[-1] > NUCLEUS_CANDIDATES:
        # Sorting the whole vocabulary takes longer than a plain step of a small model.
        probs, order = scores.softmax(dim=-1).topk(NUCLEUS_CANDIDATES, dim=-1)
        cumulative = probs.cumsum(dim=-1)
        if bool((cumulative[..., -1] > top_p).all()):
            outside = cumulative - probs >= top_p
            outside[..., 0] = False
            nucleus = scores.gather(-1, order).masked_fill_(outside, -torch.inf)
            return torch.full_like(scores, -torch.inf).scatter_(-1, order, nucleus)
    ascending, order = scores.sort(dim=-1)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    return scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def normalize(weights: Tensor, fallback: Tensor) -> Tensor:
    """`weights (…, vocab)` scaled to sum to 1; `fallback` where rounding left nothing of them."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / total, fallback)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Indices `(…)` that uniform numbers `(…)` in [0, 1) select from `probs (…, vocab)`.

    The block is selected first, by block sums, so that cumulative sums stay short. The host waits
    for nothing.

    Example: probs `[0.2, 0.0, 0.8]` → 0 below 0.2, else 2.
    """
    blocks = _blocks(probs)
    wide = widest_float(probs.device)
    sums = blocks.sum(dim=-1, dtype=wide)
    block, left = locate(sums, uniform.to(wide) * sums.sum(dim=-1))
    # Not `blocks[block]`: an index without dimensions is read by the host.
    chosen = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, BLOCK))
    index, _ = locate(chosen[..., 0, :].to(wide), left)
    # Probabilities that are not finite select the last block's padding.
    return (block * BLOCK + index).clamp_max(probs.shape[-1] - 1)


def _blocks(probs: Tensor) -> Tensor:
    """`(…, blocks, BLOCK)`, the last one filled up with zeros."""
    num_missing = -probs.shape[-1] % BLOCK
    if num_missing:
        probs = pad(probs, (0, num_missing))
    blocks: Tensor = probs.unflatten(-1, (-1, BLOCK))
    return blocks


def locate(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The weight that holds a point, all laid end to end, never an empty one; and its offset there.

    Args:
        weights: `(…, n)`, of `widest_float`. at: `(…)`, from 0 to their sum, up to rounding.
    """
    ends = weights.cumsum(dim=-1)
    at = torch.minimum(at, torch.nextafter(ends[..., -1], torch.zeros_like(at))).clamp_min(0.0)
    index = torch.searchsorted(ends, at[..., None], right=True).clamp_max(weights.shape[-1] - 1)
    begin = ends.gather(-1, index) - weights.gather(-1, index)
    return index[..., 0], at - begin[..., 0]


class SeededDraws:
    """Draws from one seeded generator on the CPU, so a seed means the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def peek(self, count: int) -> list[float]:
        """The next numbers of `uniform`, without drawing them."""
        copy = SeededDraws(0)
        copy.generator.set_state(self.generator.get_state())
        return [copy.uniform() for _ in range(count)]

    def pick(self, probs: Tensor) -> int:
        """An index drawn from `probs` `(vocab,)`, which sum to 1.

        As `inverse_cdf`, but decided on the host: a score of small operations takes 5% of a small
        model's step.
        """
        weights = probs.detach().cpu()
        ends = _blocks(weights).sum(dim=-1, dtype=torch.float64).cumsum(dim=-1).tolist()
        if not math.isfinite(ends[-1]):
            raise TargetError(NOT_FINITE)
        block, left = _locate_on_host(ends, self.uniform() * ends[-1])
        ends = weights[block * BLOCK :][:BLOCK].double().cumsum(dim=-1).tolist()
        return block * BLOCK + _locate_on_host(ends, left)[0]


def _locate_on_host(ends: list[float], at: float) -> tuple[int, float]:
    """`locate` by the sums up to each weight."""
    at = max(0.0, min(at, math.nextafter(ends[-1], 0.0)))
    index = min(bisect_right(ends, at), len(ends) - 1)
    return index, at - (ends[index - 1] if index else 0.0)
