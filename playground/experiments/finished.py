"""The finished requests of an experiment, read from their runs in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from engine.metrics import mat, tok_s
from playground.experiments.plan import ExperimentPlan, Key
from storage import RunDetail, RunLog, RunQuery

PARTS = ("draft_s", "verify_s", "accept_s", "other_s", "rollback_s")
LABELS = ("suite", "category", "group", "prompt", "configuration")
METRICS = (
    *("num_prompt_tokens", "num_new_tokens", "num_steps", "num_drafted", "num_accepted"),
    "ttft_s",
)
"""Figures of a run that its request takes over unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished request. Seconds; counts of accepted tokens are before any cut.

    Attributes:
        benchmark_id: its experiment; in a sweep its trial.
        decode_s: first commit → last commit; 0 where the first token was the only one.
        at_least: steps that accepted at least 1, 2, … draft tokens.
        split_s: seconds in each part of `PARTS`, over all steps.
        itl_s: mean over steps of step latency / tokens it committed.
        worker: which worker of a cluster answered; empty without one.
        device: the kind of device, by name.
    """

    run_id: str
    benchmark_id: str
    suite: str
    category: str
    group: str
    prompt: str
    turn: int
    repeat: int
    configuration: str
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    ttft_s: float
    decode_s: float
    itl_s: float | None
    at_least: tuple[int, ...]
    split_s: tuple[float, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    worker: str = ""
    device: str = ""

    @property
    def key(self) -> Key:
        return self.suite, self.prompt, self.turn, self.repeat, self.configuration

    @property
    def pair_key(self) -> tuple[str, str, int, int]:
        """Equal for the same request to another configuration."""
        return self.suite, self.prompt, self.turn, self.repeat

    @property
    def machine(self) -> tuple[str, str]:
        """Where it was timed. Ratios compare only times of one machine."""
        return self.worker, self.device

    @property
    def latency_s(self) -> float:
        """Request in the engine → last commit."""
        return self.ttft_s + self.decode_s

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
        metrics, labels = run.metrics, run.labels
        steps, itl_ms = int(metrics["num_steps"]), metrics["itl_ms"]
        split = metrics["time_split"] or {}
        labelled: dict[str, Any] = {name: labels[name] for name in LABELS}
        return cls(
            run_id=run.id,
            benchmark_id=run.benchmark_id or "",
            turn=int(labels["turn"]),
            repeat=int(labels["repeat"]),
            **labelled,
            **{name: metrics[name] for name in METRICS},
            itl_s=itl_ms / 1000 if itl_ms is not None else None,
            decode_s=metrics.get("decode_s", 0.0),
            at_least=tuple(metrics.get("at_least", ())),
            split_s=tuple(steps * split.get(part, 0.0) for part in PARTS),
            output_ids=run.output_ids,
            text=run.text,
            finish_reason=run.finish_reason,
            worker=labels.get("worker", ""),
            device=str(run.environment.get("device_name", "")),
        )


Pair = tuple[FinishedRequest, FinishedRequest]
"""A request as answered by a configuration, and by plain decoding."""


def pair_requests(own: Iterable[FinishedRequest], plain: Iterable[FinishedRequest]) -> list[Pair]:
    """The requests of both sides that are equal and ran on the same machine, in pairs."""
    partners = {(request.pair_key, request.machine): request for request in plain}
    both = ((request, partners.get((request.pair_key, request.machine))) for request in own)
    return [(request, partner) for request, partner in both if partner is not None]


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
        if "configuration" in run.labels:
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
