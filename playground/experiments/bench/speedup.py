"""How much faster than plain decoding, over requests that both answered, with its spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from playground.experiments.bench.measured import Measured
from playground.experiments.bench.stats import mean, percentile, std

Pair = tuple[Measured, Measured]
"""A request as a configuration answered it, and as the reference did."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster than the reference, over `num_pairs` requests that both answered.

    Attributes:
        ratio: of pooled tok/s.
        mean_of_ratios: over requests.
        low, high: spread of `ratio` over the repeats, lowest and highest; with a single repeat the
            quartiles of the requests' own ratios.
        std: over the repeats; None with a single one.
    """

    ratio: float
    mean_of_ratios: float
    low: float
    high: float
    spread_over: str
    std: float | None
    num_pairs: int


def pooled_tok_s(requests: Iterable[Measured]) -> float | None:
    """Σ(new tokens - 1) / Σ decoding time; None where nothing was decoded."""
    decoded = [r for r in requests if r.decode_s > 0]
    seconds = sum(r.decode_s for r in decoded)
    return sum(r.num_new_tokens - 1 for r in decoded) / seconds if seconds else None


def speedup_of(pairs: Sequence[Pair]) -> Speedup | None:
    """Over the requests that both sides decoded; None where there is none."""
    both = [(ours, plain) for ours, plain in pairs if ours.decode_s > 0 and plain.decode_s > 0]
    if not both:
        return None
    ratios = [_ratio([pair]) for pair in both]
    repeats = sorted({ours.repeat for ours, _ in both})
    over = [_ratio([pair for pair in both if pair[0].repeat == repeat]) for repeat in repeats]
    many = len(over) > 1
    return Speedup(
        ratio=_ratio(both),
        mean_of_ratios=mean(ratios),
        low=min(over) if many else percentile(ratios, 25),
        high=max(over) if many else percentile(ratios, 75),
        spread_over="repeats" if many else "requests",
        std=std(over),
        num_pairs=len(both),
    )


def _ratio(pairs: Sequence[Pair]) -> float:
    ours, plain = pooled_tok_s(o for o, _ in pairs), pooled_tok_s(p for _, p in pairs)
    assert ours is not None and plain
    return ours / plain
