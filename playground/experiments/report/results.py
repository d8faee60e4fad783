"""An experiment as the log has it: its plan, its finished requests, and the report over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from playground.experiments.finished import FinishedRequest, Pair, finished_requests, pairs_of
from playground.experiments.plan import ExperimentPlan, Types
from playground.experiments.report.audits import audits_of
from playground.experiments.report.report import Report, make_report
from storage import Benchmark, RunDetail, RunLog, RunQuery


@dataclass(frozen=True, slots=True)
class Results:
    """An experiment, its finished requests and the report over them.

    Attributes:
        environment: where its first request ran; empty before it.
    """

    benchmark: Benchmark
    plan: ExperimentPlan
    requests: tuple[FinishedRequest, ...]
    report: Report
    environment: Mapping[str, Any]

    @property
    def about(self) -> str:
        """What is the same for every configuration."""
        plan, here = self.plan, self.environment
        sampling = plan.sampling
        parts = (
            plan.target.title or plan.target.name,
            here.get("dtype", plan.dtype),
            here.get("device_name", ""),
            sampling.words if sampling.greedy else f"{sampling.words}, seed {sampling.seed}",
            f"at most {plan.limits.max_new_tokens} tokens",
        )
        return " · ".join(filter(None, map(str, parts)))

    def pairs(self, name: str) -> list[Pair]:
        """A configuration's answers beside plain decoding's."""
        return pairs_of(self.requests, name, self.plan)


def read_results(
    log: RunLog,
    benchmark_id: str,
    requests: Iterable[FinishedRequest] | None = None,
    types: Types | None = None,
    faults: Mapping[str, str] | None = None,
) -> Results:
    """Everything that an experiment has shown so far.

    Args:
        requests: its finished requests where they are at hand; else they are read from the log.
        faults: configurations that could not go on, where the experiment is not over.
    """
    row, plan = stored_experiment(log, benchmark_id, types)
    runs = RunQuery(benchmark_id=benchmark_id)
    finished = tuple(finished_requests(log, runs) if requests is None else requests)
    faults = row.summary.get("faults", {}) if faults is None else faults
    planned = None if row.status == "completed" else plan.num_requests
    audits = audits_of(log, benchmark_id)
    report = make_report(plan, finished, audits, planned=planned, faults=faults)
    return Results(row, plan, finished, report, environment_of(log, runs))


def stored_experiment(
    log: RunLog, benchmark_id: str, types: Types | None = None
) -> tuple[Benchmark, ExperimentPlan]:
    """Its row, and its plan.

    Raises ConfigError: no such experiment is in the log, or it is a sweep, which has a store.
    """
    row = log.benchmarks.get(benchmark_id)
    if row is None or row.plan.get("kind") == "sweep":
        raise unknown_experiment(benchmark_id)
    return row, ExperimentPlan.stored(row.plan, types)


def unknown_experiment(benchmark_id: str) -> ConfigError:
    return ConfigError(f"No experiment {benchmark_id!r:.80} is in the log. Was it deleted?")


def first_run(log: RunLog, benchmark_id: str) -> RunDetail:
    """Raises ConfigError: no such experiment is in the log, or none of its runs."""
    ids = log.ids(RunQuery(benchmark_id=benchmark_id, descending=False))
    run = log.get(ids[0]) if ids else None
    if run is None:
        raise unknown_experiment(benchmark_id)
    return run


def environment_of(log: RunLog, runs: RunQuery) -> Mapping[str, Any]:
    """Where the first of an experiment's runs was made; empty before it."""
    first = next(iter(log.rows(replace(runs, descending=False, limit=1))), None)
    detail = None if first is None else log.get(first.id)
    return {} if detail is None else detail.environment


def default_name(plan: ExperimentPlan) -> str:
    """What an experiment is called that nobody named."""
    words = " ".join(plan.items[0].turns[0].split())[:40]
    if plan.kind in ("compare", "fastest"):
        return f"{'Comparison' if plan.kind == 'compare' else 'Fastest method'} · {words}"
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    return f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"
