"""Figures over several requests; each formula is defined here once.

Times and tokens are added up before they are divided, so that a long request weighs more than a
short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

from engine import metrics
from engine.metrics import TimeSplit, mat, percentile, tok_s
from playground.experiments.finished import PARTS, FinishedRequest, Pair

PERCENTILES = (99, 90, 75, 95, 50, 25)


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
    def draft_acceptance(self) -> float | None:
        return metrics.ratio(self.num_accepted, self.num_drafted)

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
        output_token_throughput=metrics.ratio(tokens, seconds) or 0.0,
        request_throughput=metrics.ratio(len(requests), seconds) or 0.0,
        num_requests=len(requests),
    )
