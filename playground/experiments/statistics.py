"""The finished requests of an experiment, and figures over several of them: each formula once.

Times and tokens are added up before they are divided, so that a long request weighs more than a
short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Self

from engine import metrics
from engine.metrics import TimeSplit, percentile
from playground.experiments.plan import ExperimentPlan
from playground.host.speedup import pair_requests
from storage import RunDetail, RunLog, RunQuery, TimedRequest, key_values

PERCENTILES = (99, 90, 75, 95, 50, 25)
PARTS = ("draft_s", "verify_s", "accept_s", "other_s", "rollback_s")
METRICS = (
    *("num_prompt_tokens", "num_new_tokens", "num_steps", "num_drafted", "num_accepted"),
    "ttft_s",
)
"""Figures of a run that its request takes over unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest(TimedRequest):
    """A finished request with all its figures. Seconds; counts of accepted are before any cut.

    Attributes:
        at_least: steps that accepted at least 1, 2, … draft tokens.
        split_s: seconds in each part of `PARTS`, over all steps.
        itl_s: mean over steps of step latency / tokens it committed.
    """

    category: str
    group: str
    num_prompt_tokens: int
    num_drafted: int
    num_accepted: int
    itl_s: float | None
    at_least: tuple[int, ...]
    split_s: tuple[float, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str | None

    @property
    def tok_s(self) -> float | None:
        """Decoding without prefill; None where nothing was decoded after the first token."""
        return metrics.tok_s([(self.num_new_tokens, self.decode_s)])

    @property
    def mat(self) -> float | None:
        return metrics.mat(self.num_accepted, self.num_steps)

    @property
    def step_s(self) -> float | None:
        """Mean seconds per step."""
        return sum(self.split_s) / self.num_steps if self.num_steps else None

    @property
    def context_len(self) -> float:
        """Mean length of the context while decoding."""
        return self.num_prompt_tokens + self.num_new_tokens / 2

    @classmethod
    def of(cls, run: RunDetail) -> Self:
        """From a completed run of an experiment."""
        figures, labels = run.metrics, run.labels
        steps, itl_ms = int(figures["num_steps"]), figures["itl_ms"]
        split = figures["time_split"] or {}
        return cls(
            **key_values(run),
            run_id=run.id,
            device=str(run.environment.get("device_name", "")),
            category=labels.get("category", ""),
            group=labels.get("group", ""),
            **{name: figures[name] for name in METRICS},
            itl_s=itl_ms / 1000 if itl_ms is not None else None,
            decode_s=figures.get("decode_s", 0.0),
            at_least=tuple(figures.get("at_least", ())),
            split_s=tuple(steps * split.get(part, 0.0) for part in PARTS),
            output_ids=run.output_ids,
            text=run.text,
            finish_reason=run.finish_reason,
        )


Pair = tuple[FinishedRequest, FinishedRequest]
"""A request as answered by a configuration, and by plain decoding."""


def finished_requests(
    log: RunLog, experiment_id: str, known: Iterable[FinishedRequest] = (), *, trial: str = ""
) -> list[FinishedRequest]:
    """The completed requests of an experiment, or of a sweep's trial, each once (its newest run).

    Args:
        known: requests that were read before and need not be read again.
    """
    query = RunQuery(experiment_id=experiment_id, trial=trial or None, status="completed")
    ids = log.ids(replace(query, descending=False))
    requests = {request.run_id: request for request in known}
    unread = log.details([run_id for run_id in ids if run_id not in requests])
    requests |= {run.id: FinishedRequest.of(run) for run in unread if run.configuration}
    read = [requests[run_id] for run_id in ids if run_id in requests]
    return list({(request.trial, request.key): request for request in read}.values())


def plain_pairs(requests: Sequence[FinishedRequest], name: str, plan: ExperimentPlan) -> list[Pair]:
    """A configuration's requests paired with plain decoding's."""
    own = [r for r in requests if r.configuration == name]
    return pair_requests(own, [r for r in requests if r.configuration == plan.reference.name])


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
        return metrics.tok_s([(self.num_committed + 1, self.decode_s)])

    @property
    def mat(self) -> float | None:
        return metrics.mat(self.num_accepted, self.num_steps)

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
