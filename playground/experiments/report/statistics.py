"""Figures over several requests: each formula stands here once.

Times and tokens are added up before they are divided, so that a long request counts for more than a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from engine.metrics import mat, percentile, tok_s
from playground.experiments.finished import SPLIT, FinishedRequest, Pair

PERCENTILES = (99, 90, 75)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def position_rates(requests: Sequence[FinishedRequest]) -> tuple[float, ...]:
    """Rate i = steps that accepted at least i draft tokens / steps, over all requests."""
    steps = sum(r.num_steps for r in requests)
    deepest = max((len(r.at_least) for r in requests), default=0)
    counts = [sum(r.at_least[i] for r in requests if i < len(r.at_least)) for i in range(deepest)]
    return tuple(count / steps for count in counts)


@dataclass(frozen=True, slots=True)
class Pool:
    """Requests added up; figures are None where nothing defines them.

    Attributes:
        num_committed: tokens after each request's first, counted after any cut.
        decode_s: first commit → last commit.
        split_s: seconds in draft, verify, accept and other.
    """

    num_requests: int
    num_new_tokens: int
    num_committed: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    decode_s: float
    split_s: tuple[float, ...]

    @classmethod
    def of(cls, requests: Sequence[FinishedRequest]) -> Self:
        decoded = [r for r in requests if r.decode_s > 0]
        return cls(
            num_requests=len(requests),
            num_new_tokens=sum(r.num_new_tokens for r in requests),
            num_committed=sum(r.num_new_tokens - 1 for r in decoded),
            num_steps=sum(r.num_steps for r in requests),
            num_drafted=sum(r.num_drafted for r in requests),
            num_accepted=sum(r.num_accepted for r in requests),
            decode_s=sum(r.decode_s for r in decoded),
            split_s=tuple(sum(r.split_s[part] for r in requests) for part in range(len(SPLIT))),
        )

    @property
    def tok_s(self) -> float | None:
        return tok_s([(self.num_committed + 1, self.decode_s)])

    @property
    def mat(self) -> float | None:
        return mat(self.num_accepted, self.num_steps)

    @property
    def draft_acceptance(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def step_s(self) -> float | None:
        """The step's own clock, without what lies between steps."""
        return sum(self.split_s) / self.num_steps if self.num_steps else None

    @property
    def split_ms(self) -> dict[str, float] | None:
        """Milliseconds of a step in draft, verify, accept and other."""
        if not self.num_steps:
            return None
        return {
            part.removesuffix("_s"): 1000 * seconds / self.num_steps
            for part, seconds in zip(SPLIT, self.split_s, strict=True)
        }


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster than plain decoding, over `num_pairs` requests that both answered.

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
    ours, plain = (Pool.of(side).tok_s for side in zip(*pairs, strict=True))
    assert ours is not None and plain
    return ours / plain


@dataclass(frozen=True, slots=True)
class Statistic:
    """A row of genai-perf's table."""

    avg: float
    min: float
    max: float
    p99: float
    p90: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there is no value."""
        if not values:
            return None
        high = (percentile(values, q) for q in PERCENTILES)
        return cls(mean(values), min(values), max(values), *high)


LATENCY_ROWS: dict[str, tuple[str, str]] = {
    "request_latency_ms": ("Request latency (ms)", "request in the engine → last token committed"),
    "time_to_first_token_ms": (
        "Time to first token (ms)",
        "request in the engine → first token committed",
    ),
    "inter_token_latency_ms": (
        "Inter-token latency (ms)",
        "(request latency - time to first token) / (output tokens - 1)",
    ),
    "output_sequence_length": ("Output sequence length", "new tokens of a request"),
    "input_sequence_length": ("Input sequence length", "prompt tokens of a request"),
}
"""Rows of genai-perf's table: title and definition."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """genai-perf's table of one configuration at concurrency 1; `rows` by `LATENCY_ROWS`.

    A row is None where no request defines it: an answer of one token has no inter-token latency.
    """

    rows: dict[str, Statistic | None]
    output_token_throughput: float
    request_throughput: float
    num_requests: int
    concurrency: int = 1


def latency_table(requests: Sequence[FinishedRequest]) -> LatencyTable | None:
    """None without requests."""
    if not requests:
        return None
    values: dict[str, list[float]] = {
        "request_latency_ms": [1000 * r.latency_s for r in requests],
        "time_to_first_token_ms": [1000 * r.ttft_s for r in requests],
        "inter_token_latency_ms": [
            1000 * r.decode_s / (r.num_new_tokens - 1) for r in requests if r.num_new_tokens > 1
        ],
        "output_sequence_length": [float(r.num_new_tokens) for r in requests],
        "input_sequence_length": [float(r.num_prompt_tokens) for r in requests],
    }
    seconds = sum(r.latency_s for r in requests)
    return LatencyTable(
        rows={key: Statistic.of(values[key]) for key in LATENCY_ROWS},
        output_token_throughput=sum(r.num_new_tokens for r in requests) / seconds,
        request_throughput=len(requests) / seconds,
        num_requests=len(requests),
    )
