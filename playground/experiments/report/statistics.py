"""Figures over several requests: each formula stands here once.

Times and tokens are added up before they are divided, so that a long request counts for more than a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine import formats, metrics
from engine.metrics import TimeSplit, mat, percentile, tok_s
from playground.experiments.finished import SPLIT, FinishedRequest, Pair

PERCENTILES = (99, 90, 75, 95, 50, 25)
_T = "12.71 4.30 3.18 2.78 2.57 2.45 2.36 2.31 2.26 2.23 2.20 2.18 2.16 2.14 2.13 2.12 2.11 2.10"
QUANTILES = tuple(map(float, _T.split()))
"""Student's t at 97.5% for 1, 2, … degrees of freedom."""
WIDEST = 10.0
"""Upper over lower bound of the widest interval that is given: beyond it nothing is known."""
TOO_FEW = "too few answers for an interval"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def position_rates(requests: Sequence[FinishedRequest]) -> tuple[float, ...]:
    """Over all requests."""
    deepest = max((len(r.at_least) for r in requests), default=0)
    counts = [sum(r.at_least[i] for r in requests if i < len(r.at_least)) for i in range(deepest)]
    return metrics.position_rates(counts, sum(r.num_steps for r in requests))


@dataclass(frozen=True, slots=True)
class Pool:
    """Requests added up; figures are None where nothing defines them.

    Attributes:
        num_committed: tokens after each request's first, counted after any cut.
        decode_s: first commit → last commit.
        split_s: seconds in each part of `SPLIT`.
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
        return metrics.draft_acceptance(self.num_accepted, self.num_drafted)

    @property
    def step_s(self) -> float | None:
        """The step's own clock, without what lies between steps."""
        return None if self.time_split is None else self.time_split.total_s

    @property
    def time_split(self) -> TimeSplit | None:
        """Mean of a step."""
        steps = self.num_steps
        return TimeSplit(*(seconds / steps for seconds in self.split_s)) if steps else None


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster than plain decoding, over `num_pairs` requests that both answered.

    Attributes:
        ratio: of pooled tok/s.
        low, high: 95 % interval of `ratio`; None where a single measurement shows no scatter, or
            so few answers scatter so much that the interval would be wider than `WIDEST`.
    """

    ratio: float
    low: float | None
    high: float | None
    num_prompts: int
    num_repeats: int
    num_pairs: int

    @property
    def text(self) -> str:
        """The ratio as every table, race and sentence writes it."""
        return formats.speedup(self.ratio)

    @property
    def interval(self) -> str:
        """The interval as every table writes it, or why there is none."""
        return TOO_FEW if self.low is None else formats.interval(self.low, self.high)

    @property
    def faster(self) -> bool:
        """Whether the interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def slower(self) -> bool:
        """Whether the interval lies below 1."""
        return self.high is not None and self.high < 1


def speedup_of(pairs: Sequence[Pair]) -> Speedup | None:
    """Ratio of pooled tok/s with its interval, over the requests that both sides decoded.

    None where there is none. This is the one estimator of bars, tables, races and verdicts:

        ratio = (Σ tokens / Σ seconds) / (Σ plain tokens / Σ plain seconds)

    Requests of one prompt, its turns and its repeats, are no independent evidence, so that the
    scatter is that between prompts; of a single prompt it is that between its repeats, and the
    interval then holds for this prompt alone. With u the change of log ratio that a prompt
    accounts for (its share of the tokens less its share of the seconds, less the same of plain
    decoding), se = sqrt(n / (n - 1) · Σ u²) and the interval is ratio · exp(± t · se), t being
    Student's 97.5 % quantile for n - 1 degrees of freedom.

    A percentile bootstrap over prompts, which one might expect here, is too narrow for the few
    prompts that people wait for. In 1,500 simulated benchmarks whose prompts differ by 35 %, two
    repeats each, this interval held the truth in 94, 93, 92, 92 and 94 % with 2, 3, 5, 10 and 24
    prompts, the bootstrap in 51, 72, 80, 87 and 91 %.
    Source: Cochran, Sampling Techniques (1977), 6.4: the variance of a ratio by linearisation.

    Where several workers of a cluster have measured, every worker's seconds count in units of its
    own plain decoding (`on_one_clock`): one that is slow at everything moves no ratio.

    Worked example: one prompt of 10 tokens, plain decoding 1 s, in two repeats 0.5 s and 0.48 s:
    ratio 2 / 0.98 = 2.04; u = ±(0.5 - 0.48 / 0.98) = ±0.0102, se = 0.0204, t = 12.71: 1.57 … 2.65.
    With 0.4 s in the second it would be 0.54 … 9.12, which is wider than `WIDEST`: none is given.
    """
    both = [(own, plain) for own, plain in pairs if own.decode_s > 0 and plain.decode_s > 0]
    if not both:
        return None
    both = on_one_clock(both)
    ratio = pooled_ratio(both)
    prompts = in_units(both, lambda own: (own.suite, own.prompt))
    repeats = in_units(both, lambda own: own.repeat)
    units = prompts if len(prompts) > 1 else repeats
    low, high = _interval(ratio, units)
    return Speedup(ratio, low, high, len(prompts), len(repeats), len(both))


def _interval(
    ratio: float, units: Sequence[Sequence[Pair]]
) -> tuple[float, float] | tuple[None, None]:
    """Of the pooled ratio; None of fewer than two units, and where it would be too wide."""
    se = _log_ratio_error(units)
    if se is None or 2 * student_t(len(units) - 1) * se > math.log(WIDEST):
        return None, None
    reach = math.exp(student_t(len(units) - 1) * se)
    return ratio / reach, ratio * reach


def on_one_clock(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with each machine's seconds times the tok/s of plain decoding there.

    Pairs of a single machine stay as they are. Worked example: a prompt of 10 tokens takes one
    worker 1 s plain and 0.5 s with the method, another worker 4 s and 2 s. Both become 10 and 5.
    """
    machines = in_units(pairs, lambda own: own.machine)
    if len(machines) < 2:
        return list(pairs)
    scale = {group[0][0].machine: Pool.of([p for _, p in group]).tok_s or 1.0 for group in machines}

    def scaled(request: FinishedRequest) -> FinishedRequest:
        return replace(request, decode_s=request.decode_s * scale[request.machine])

    return [(scaled(own), scaled(plain)) for own, plain in pairs]


def in_units(
    pairs: Sequence[Pair], unit: Callable[[FinishedRequest], Hashable]
) -> list[list[Pair]]:
    """Pairs by what `unit` says of them, in the order of their first."""
    found: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(unit(pair[0]), []).append(pair)
    return list(found.values())


def pooled_ratio(pairs: Sequence[Pair]) -> float:
    """Of tok/s; all of these pairs decoded something."""
    ratio = metrics.speedup(*(Pool.of(side).tok_s for side in zip(*pairs, strict=True)))
    assert ratio is not None
    return ratio


def _log_ratio_error(units: Sequence[Sequence[Pair]]) -> float | None:
    """Standard error of the logarithm of the pooled ratio; None of fewer than two units."""
    if len(units) < 2:
        return None
    own, plain = (_excess([[pair[side] for pair in unit] for unit in units]) for side in (0, 1))
    squares = math.fsum((ours - theirs) ** 2 for ours, theirs in zip(own, plain, strict=True))
    return math.sqrt(len(units) / (len(units) - 1) * squares)


def _excess(units: Sequence[Sequence[FinishedRequest]]) -> list[float]:
    """Share of all tokens less share of all seconds, of every unit."""
    pools = [Pool.of(unit) for unit in units]
    tokens, seconds = sum(p.num_committed for p in pools), math.fsum(p.decode_s for p in pools)
    return [p.num_committed / tokens - p.decode_s / seconds for p in pools]


def student_t(freedom: int) -> float:
    """Student's 97.5 % quantile."""
    return QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 1.96 + 2.5 / freedom


@dataclass(frozen=True, slots=True)
class Statistic:
    """A row of genai-perf's table, and of its files beside it."""

    avg: float
    min: float
    max: float
    p99: float
    p90: float
    p75: float
    p95: float
    p50: float
    p25: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there is no value."""
        if not values:
            return None
        shares = {f"p{q}": percentile(values, q) for q in PERCENTILES}
        return cls(mean(values), min(values), max(values), std=std(values), **shares)


LATENCY_ROWS: dict[str, tuple[str, str]] = {
    "request_latency_ms": ("Request latency (ms)", "request in the engine → last token committed"),
    "time_to_first_token_ms": (
        "Time to first token (ms)",
        "request in the engine → first token committed",
    ),
    "inter_token_latency_ms": (
        "Time per output token (ms)",
        "(request latency - time to first token) / (output tokens - 1)",
    ),
    "output_sequence_length": ("Output sequence length", "new tokens of a request"),
    "input_sequence_length": ("Input sequence length", "prompt tokens of a request"),
}
"""Rows of genai-perf's table: title and definition. Its inter-token latency is what vLLM calls time
per output token; ITL is a step's latency per token, everywhere."""


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
            tpot
            for r in requests
            if (tpot := metrics.tpot_ms(r.num_new_tokens, r.decode_s)) is not None
        ],
        "output_sequence_length": [float(r.num_new_tokens) for r in requests],
        "input_sequence_length": [float(r.num_prompt_tokens) for r in requests],
    }
    tokens, seconds = sum(r.num_new_tokens for r in requests), sum(r.latency_s for r in requests)
    return LatencyTable(
        rows={key: Statistic.of(values[key]) for key in LATENCY_ROWS},
        output_token_throughput=metrics.throughput(tokens, seconds) or 0.0,
        request_throughput=metrics.throughput(len(requests), seconds) or 0.0,
        num_requests=len(requests),
    )
