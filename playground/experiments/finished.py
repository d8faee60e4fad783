"""The finished requests of an experiment, read from their runs in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.metrics import mat, tok_s
from playground.experiments.plan import ExperimentPlan
from playground.host.speedup import pair_requests
from storage import RunDetail, RunLog, RunQuery, TimedRequest, request_of

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
        return tok_s([(self.num_new_tokens, self.decode_s)])

    @property
    def mat(self) -> float | None:
        return mat(self.num_accepted, self.num_steps)

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
        request = request_of(run.id, run.benchmark_id, run.labels, run.environment)
        assert request is not None
        metrics, labels = run.metrics, run.labels
        steps, itl_ms = int(metrics["num_steps"]), metrics["itl_ms"]
        split = metrics["time_split"] or {}
        return cls(
            **request,
            category=labels.get("category", ""),
            group=labels.get("group", ""),
            **{name: metrics[name] for name in METRICS},
            itl_s=itl_ms / 1000 if itl_ms is not None else None,
            decode_s=metrics.get("decode_s", 0.0),
            at_least=tuple(metrics.get("at_least", ())),
            split_s=tuple(steps * split.get(part, 0.0) for part in PARTS),
            output_ids=run.output_ids,
            text=run.text,
            finish_reason=run.finish_reason,
        )


Pair = tuple[FinishedRequest, FinishedRequest]
"""A request as answered by a configuration, and by plain decoding."""


def runs_of(benchmark_id: str, *, sweep: bool = False) -> RunQuery:
    """Selects the runs of an experiment; those of a sweep carry the ids of its trials."""
    if sweep:
        return RunQuery(experiment=f"sweep:{benchmark_id}")
    return RunQuery(benchmark_id=benchmark_id)


def finished_requests(
    log: RunLog, benchmark_id: str, known: Iterable[FinishedRequest] = (), *, sweep: bool = False
) -> list[FinishedRequest]:
    """The completed requests of an experiment, each once (its newest run).

    Args:
        known: requests that were read before and need not be read again.
    """
    runs = runs_of(benchmark_id, sweep=sweep)
    ids = log.ids(replace(runs, status="completed", descending=False))
    requests = {request.run_id: request for request in known}
    for run in log.details([run_id for run_id in ids if run_id not in requests]):
        if request_of(run.id, run.benchmark_id, run.labels, run.environment):
            requests[run.id] = FinishedRequest.of(run)
    read = [requests[run_id] for run_id in ids if run_id in requests]
    return list({(request.benchmark_id, request.key): request for request in read}.values())


def plain_pairs(requests: Sequence[FinishedRequest], name: str, plan: ExperimentPlan) -> list[Pair]:
    """A configuration's requests paired with plain decoding's."""
    own = [r for r in requests if r.configuration == name]
    return pair_requests(own, [r for r in requests if r.configuration == plan.reference.name])


def newest_tok_s(log: RunLog, target: str) -> float | None:
    """The decoding speed of a target's newest completed run."""
    query = RunQuery(target=target, status="completed", limit=1)
    return next((run.tok_s for run in log.rows(query)), None)
