"""Figures over several requests; each formula is defined here once.

Times and tokens are added up before they are divided, so that a long request weighs more than a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal, NamedTuple, Self, TypeVar

from engine import formats, metrics
from engine.metrics import TimeSplit, mat, percentile, tok_s
from playground.experiments.finished import PARTS, FinishedRequest, Pair
from playground.host import baseline

Unit = TypeVar("Unit")
PERCENTILES = (99, 90, 75, 95, 50, 25)
MAX_INTERVAL_RATIO = 10.0
"""Upper over lower bound of an interval; wider ones say nothing and are not given."""
NORMAL = 1.96
"""97.5% quantile of the normal distribution: Student's with any number of answers."""
NoIntervalCause = Literal["few", "scatter"]
NO_INTERVAL: dict[NoIntervalCause, str] = {
    "few": "too few answers for an interval",
    "scatter": "answers that scatter too widely for an interval",
}


def position_rates(requests: Sequence[FinishedRequest]) -> tuple[float, ...]:
    """Steps that accepted at least 1, 2, … draft tokens / steps, over all requests."""
    deepest = max((len(r.at_least) for r in requests), default=0)
    counts = [sum(r.at_least[i] for r in requests if i < len(r.at_least)) for i in range(deepest)]
    return metrics.position_rates(counts, sum(r.num_steps for r in requests))


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over requests; figures are None where they are undefined.

    Attributes:
        num_committed: tokens after each request's first, counted after any cut.
        decode_s: first commit → last commit.
        split_s: seconds in each part of `PARTS`.
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
            split_s=tuple(sum(r.split_s[part] for r in requests) for part in range(len(PARTS))),
        )

    @property
    def tok_s(self) -> float | None:
        return tok_s([(self.num_committed + 1, self.decode_s)])

    @property
    def mat(self) -> float | None:
        return mat(self.num_accepted, self.num_steps)

    @property
    def wall_step_s(self) -> float | None:
        """Mean time from one step to the next, the time between steps included."""
        return self.decode_s / self.num_steps if self.num_steps else None

    @property
    def draft_acceptance(self) -> float | None:
        return metrics.draft_acceptance(self.num_accepted, self.num_drafted)

    @property
    def step_s(self) -> float | None:
        """Mean duration of a step by its own clock, without the time between steps."""
        return None if self.time_split is None else self.time_split.total_s

    @property
    def time_split(self) -> TimeSplit | None:
        """Mean seconds of each part of a step."""
        steps = self.num_steps
        return TimeSplit(*(seconds / steps for seconds in self.split_s)) if steps else None


def totals_of(pairs: Sequence[Pair]) -> tuple[Totals, Totals]:
    """Totals of the requests as a configuration answered them, and as plain decoding did."""
    return Totals.of([own for own, _ in pairs]), Totals.of([plain for _, plain in pairs])


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster than plain decoding, over `num_pairs` requests that both answered.

    Attributes:
        ratio: of pooled tok/s; None where `doubt` says that the baseline is unreliable.
        low, high: 95% interval of `ratio`; None where there is none.
        cause: why there is no interval: the answers are too few (a single measurement, say),
            or scatter so widely that more of them would not help.
    """

    ratio: float | None
    low: float | None
    high: float | None
    num_prompts: int
    num_repeats: int
    num_pairs: int
    cause: NoIntervalCause | None = None
    doubt: baseline.Doubt | None = None

    @property
    def text(self) -> str:
        """The ratio as every table, race and sentence writes it."""
        return formats.speedup(self.ratio)

    @property
    def interval(self) -> str:
        """The interval as every table writes it, or why there is none."""
        if self.doubt:
            return "unreliable baseline"
        if self.low is None:
            return NO_INTERVAL[self.cause or "few"]
        return formats.interval(self.low, self.high)

    @property
    def faster(self) -> bool:
        """Whether the interval lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def slower(self) -> bool:
        """Whether the interval lies below 1."""
        return self.high is not None and self.high < 1


def speedup_of(pairs: Sequence[Pair]) -> Speedup | None:
    """`ratio_of` over plain decoding; without a number where the baseline is unreliable."""
    both = _decoded(pairs)
    if (ratio := ratio_of(both)) is None:
        return None
    own, plain = totals_of(both)
    doubt = baseline.doubt_of(own.wall_step_s, plain.wall_step_s)
    return replace(ratio, ratio=None, low=None, high=None, doubt=doubt) if doubt else ratio


def request_speedup_of(pairs: Sequence[Pair]) -> float | None:
    """Ratio of output token throughputs, prefill included; None where `speedup_of` has none."""
    decoding = speedup_of(pairs)
    if decoding is None or decoding.ratio is None:
        return None
    own, plain = (
        sum(r.num_new_tokens for r in side) / sum(r.latency_s for r in side)
        for side in zip(*_decoded(pairs), strict=True)
    )
    return float(own / plain)


def ratio_of(pairs: Sequence[Pair], num_comparisons: int = 1) -> Speedup | None:
    """Ratio of pooled tok/s with its interval, over the requests that both sides decoded.

    None without any. Bars, tables, races and verdicts all use this estimator:

        ratio = (Σ tokens / Σ seconds) / (Σ plain tokens / Σ plain seconds)

    Turns and repeats of one prompt are not independent, so the scatter is measured between
    prompts. With a single prompt it is measured between its repeats, and the interval holds for
    this prompt alone. With u a prompt's contribution to the log ratio (its share of the tokens
    minus its share of the seconds, minus the same for plain decoding), the standard error is
    se = sqrt(n / (n - 1) · Σ u²) and the interval is ratio · exp(± t · se), t being Student's 97.5%
    quantile for n - 1 degrees of freedom.

    It covers the true ratio in 92 to 94 % of simulated benchmarks of 2 to 24 prompts; a percentile
    bootstrap over prompts covers it in 51 to 91 %.
    Source: Cochran, Sampling Techniques (1977), 6.4: the variance of a ratio by linearisation.

    Where several workers of a cluster have measured, each worker's seconds are in units of its own
    plain decoding (`normalize_clocks`), so that a slow worker does not change the ratio.

    Worked example: one prompt of 10 tokens, plain decoding 1 s, in two repeats 0.5 s and 0.48 s:
    ratio 2 / 0.98 = 2.04; u = ±(0.5 - 0.48 / 0.98) = ±0.0102, se = 0.0204, t = 12.71: 1.57 … 2.64.
    With 0.4 s in the second it would be 0.54 … 9.12, which is too wide to be given.
    """
    both = _decoded(pairs)
    if not both:
        return None
    prompts, repeats = by_prompt(both), group_pairs(both, lambda own: own.repeat)
    units = [Counts.of(unit) for unit in (prompts if len(prompts) > 1 else repeats).values()]
    ratio = ratio_of_counts(units, num_comparisons)
    return replace(ratio, num_prompts=len(prompts), num_repeats=len(repeats), num_pairs=len(both))


def ratio_of_counts(units: Sequence[Counts], num_comparisons: int = 1) -> Speedup:
    """`ratio_of` units whose tokens and seconds are known, each a prompt that was answered once."""
    own_tok_s, plain_s_per_tok = _rates(units)
    ratio = own_tok_s * plain_s_per_tok
    low, high, cause = _interval(ratio, units, num_comparisons)
    return Speedup(ratio, low, high, len(units), 1, len(units), cause)


def _decoded(pairs: Sequence[Pair]) -> list[Pair]:
    return normalize_clocks([(o, p) for o, p in pairs if o.decode_s > 0 and p.decode_s > 0])


class Counts(NamedTuple):
    """Tokens and seconds of a prompt (or of a repeat of the only one), and of plain decoding."""

    num_tokens: int
    decode_s: float
    num_plain_tokens: int
    plain_decode_s: float

    @classmethod
    def of(cls, unit: Sequence[Pair]) -> Self:
        own, plain = totals_of(unit)
        return cls(own.num_committed, own.decode_s, plain.num_committed, plain.decode_s)


def prompt_counts(pairs: Sequence[Pair]) -> dict[str, Counts]:
    """Counts by prompt, as `differ` compares them."""
    prompts = by_prompt(_decoded(pairs))
    return {"/".join(prompt): Counts.of(unit) for prompt, unit in prompts.items()}


def differ(
    ours: Mapping[str, Counts], theirs: Mapping[str, Counts], num_comparisons: int = 1
) -> bool:
    """Whether two speedups on the same prompts differ by more than their scatter.

    Differences between prompts cancel out: with u a prompt's contribution to the ratio of the two
    speedups, as in `ratio_of`, they differ where |log ratio| > t · se. False for fewer than two
    prompts.
    """
    shared = [prompt for prompt in ours if prompt in theirs]
    if len(shared) < 2:
        return False
    a, b = ([side[prompt] for prompt in shared] for side in (ours, theirs))
    logs = [sign * math.log(rate) for sign, units in ((1, a), (-1, b)) for rate in _rates(units)]
    se = _standard_error([x - y for x, y in zip(_contributions(a), _contributions(b), strict=True)])
    return abs(math.fsum(logs)) > student_t(len(shared) - 1, num_comparisons) * se


def _rates(units: Sequence[Counts]) -> tuple[float, float]:
    """Pooled tok/s, and the seconds per token of plain decoding; their product is the speedup."""
    tokens, seconds, plain_tokens, plain_seconds = map(math.fsum, zip(*units, strict=True))
    return tokens / seconds, plain_seconds / plain_tokens


def _interval(
    ratio: float, units: Sequence[Counts], num_comparisons: int
) -> tuple[float, float, None] | tuple[None, None, NoIntervalCause]:
    """The bounds of the pooled ratio, or why there are none."""
    if len(units) < 2:
        return None, None, "few"
    se = _standard_error(_contributions(units))
    reach = student_t(len(units) - 1, num_comparisons) * se
    if 2 * reach > math.log(MAX_INTERVAL_RATIO):
        return None, None, "scatter" if 2 * NORMAL * se > math.log(MAX_INTERVAL_RATIO) else "few"
    return ratio / math.exp(reach), ratio * math.exp(reach), None


def _standard_error(changes: Sequence[float]) -> float:
    """Standard error of a log ratio, from the contributions of at least two units."""
    squares = math.fsum(change**2 for change in changes)
    return math.sqrt(len(changes) / (len(changes) - 1) * squares)


def _contributions(units: Sequence[Counts]) -> list[float]:
    """The contribution of each unit to the log ratio, u of `ratio_of`."""
    tokens, seconds, plain_tokens, plain_seconds = map(math.fsum, zip(*units, strict=True))
    return [
        (u.num_tokens / tokens - u.decode_s / seconds)
        - (u.num_plain_tokens / plain_tokens - u.plain_decode_s / plain_seconds)
        for u in units
    ]


def normalize_clocks(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with each machine's seconds times the tok/s of plain decoding there.

    Pairs of a single machine stay as they are. Worked example: a prompt of 10 tokens takes one
    worker 1 s plain and 0.5 s with the method, another worker 4 s and 2 s. Both become 10 and 5.
    """
    machines = group_pairs(pairs, lambda own: own.machine)
    if len(machines) < 2:
        return list(pairs)
    scale = {machine: totals_of(own)[1].tok_s or 1.0 for machine, own in machines.items()}

    def scaled(request: FinishedRequest) -> FinishedRequest:
        unit = scale[request.machine]
        return replace(request, ttft_s=request.ttft_s * unit, decode_s=request.decode_s * unit)

    return [(scaled(own), scaled(plain)) for own, plain in pairs]


def by_prompt(pairs: Sequence[Pair]) -> dict[tuple[str, str], list[Pair]]:
    """Pairs by suite and prompt."""
    return group_pairs(pairs, lambda own: (own.suite, own.prompt))


def group_pairs(
    pairs: Sequence[Pair], unit: Callable[[FinishedRequest], Unit]
) -> dict[Unit, list[Pair]]:
    """Pairs by a key of the configuration's request, in order of first appearance."""
    units: dict[Unit, list[Pair]] = {}
    for pair in pairs:
        units.setdefault(unit(pair[0]), []).append(pair)
    return units


@lru_cache
def student_t(dof: int, num_comparisons: int = 1) -> float:
    """Student's quantile at 97.5%, or beyond 2.5% / `num_comparisons` (Bonferroni).

    Picking the largest of several compares it with all the others.
    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, by bisection of the angle atan(t / sqrt(n)).
    """
    inside, low, high = 1 - 0.05 / num_comparisons, 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _central_probability(angle, dof) < inside else (low, angle)
    return math.sqrt(dof) * math.tan(low)


def _central_probability(angle: float, dof: int) -> float:
    """P(|t| < sqrt(dof) · tan(angle)) of Student's distribution."""
    odd, squared = dof % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = term if dof > 1 else 0.0
    for k in range(2 + odd, dof, 2):
        term *= squared * (k - 1) / k
        total += term
    whole = math.sin(angle) * total
    return 2 / math.pi * (angle + whole) if odd else whole


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
    """None of a single value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there is no value."""
        if not values:
            return None
        shares = {f"p{q}": percentile(values, q) for q in PERCENTILES}
        std = stdev(values) if len(values) > 1 else None
        return cls(fmean(values), min(values), max(values), std=std, **shares)


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
THROUGHPUTS: dict[str, tuple[str, str]] = {
    "output_token_throughput": (
        "Output token throughput (per sec)",
        "Σ output tokens / Σ request latency: one request at a time",
    ),
    "request_throughput": (
        "Request throughput (per sec)",
        "requests / Σ request latency: one request at a time",
    ),
}
"""Its last rows, which have an average alone."""
LATENCY_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75")
"""Columns of the table that genai-perf prints."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """genai-perf's table of one configuration at concurrency 1; `rows` by `LATENCY_ROWS`.

    A row is None where no request defines it: an answer of one token has no inter-token latency.
    """

    rows: dict[str, Statistic | None]
    output_token_throughput: float
    request_throughput: float
    num_requests: int

    def lines(
        self, columns: Sequence[str] = LATENCY_COLUMNS
    ) -> Iterator[tuple[str, str, list[float | None]]]:
        """Title, definition and values of every row."""
        for key, (title, definition) in LATENCY_ROWS.items():
            yield title, definition, [getattr(self.rows[key], name, None) for name in columns]
        for key, (title, definition) in THROUGHPUTS.items():
            average = {"avg": getattr(self, key)}
            yield title, definition, [average.get(name) for name in columns]


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
