"""An experiment as the log has it: its plan, its finished requests, and the report over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from playground.experiments.finished import FinishedRequest, Pair, finished_requests, pairs_of
from playground.experiments.plan import ExperimentPlan, Item, Types
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
    runs = runs_of(log, benchmark_id)
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
    if row is None:
        return _from_runs(log, benchmark_id, types)
    if row.plan.get("kind") == "sweep":
        raise unknown_experiment(benchmark_id)
    return row, ExperimentPlan.stored(row.plan, types)


def unknown_experiment(benchmark_id: str) -> ConfigError:
    return ConfigError(f"No experiment {benchmark_id!r:.80} is in the log. Was it deleted?")


def runs_of(log: RunLog, benchmark_id: str) -> RunQuery:
    """Selects an experiment's runs; comparisons of older versions have a label and no row."""
    if log.benchmarks.head(benchmark_id) is None:
        return RunQuery(labels={"compare": benchmark_id}, descending=False)
    return RunQuery(benchmark_id=benchmark_id, descending=False)


def first_run(log: RunLog, benchmark_id: str) -> RunDetail:
    """Raises ConfigError: no such experiment is in the log, or none of its runs."""
    ids = log.ids(replace(runs_of(log, benchmark_id), limit=1))
    run = log.get(ids[0]) if ids else None
    if run is None:
        raise unknown_experiment(benchmark_id)
    return run


def environment_of(log: RunLog, runs: RunQuery) -> Mapping[str, Any]:
    """Where the first of an experiment's runs was made; empty before it."""
    first = next(iter(log.rows(replace(runs, descending=False, limit=1))), None)
    detail = None if first is None else log.get(first.id)
    return {} if detail is None else detail.environment


# ---- comparisons of older versions, which stored runs and no plan


def _from_runs(
    log: RunLog, compare_id: str, types: Types | None
) -> tuple[Benchmark, ExperimentPlan]:
    details = log.details(log.ids(runs_of(log, compare_id)))
    runs = [run for run in details if {"place", "prompt"} <= set(run.labels)]
    if not runs:
        raise unknown_experiment(compare_id)
    plan = plan_of_runs(runs, types)
    row = Benchmark(
        id=compare_id,
        name=default_name(plan),
        status="completed" if all(run.status == "completed" for run in runs) else "interrupted",
        created_at=runs[0].created_at,
        finished_at=None,
        summary={},
        plan={},
    )
    return row, plan


def plan_of_runs(runs: Sequence[RunDetail], types: Types | None) -> ExperimentPlan:
    """What a comparison did, by its runs in order."""
    first, by_place = runs[0], dict[int, RunDetail]()
    prompts: dict[str, Item] = {}
    for run in runs:
        labels = run.labels
        by_place.setdefault(int(labels["place"]), run)
        history = tuple(dict(message) for message in run.messages[:-1])
        names = labels.get("suite", ""), labels["prompt"], labels["category"]
        group = labels.get("group", labels["category"])
        item = Item(*names, group, (run.prompt_text,), not run.messages, history)
        prompts.setdefault(labels["prompt"], item)
    configurations = [
        {
            "name": run.labels["configuration"],
            "title": run.labels["configuration"],
            "lossless": run.lossless,
            "config": dict(run.method),
        }
        for _, run in sorted(by_place.items())
    ]
    values = {
        "kind": "compare",
        "target": {"name": first.target, "hub": first.target},
        "dtype": first.dtype,
        "configurations": configurations,
        "items": list(prompts.values()),
        "repeats": 1 + max(int(run.labels["repeat"]) for run in runs),
        "sampling": dict(first.sampling),
        "limits": dict(first.limits),
    }
    return ExperimentPlan.stored(values, types)


def default_name(plan: ExperimentPlan) -> str:
    """What an experiment is called that nobody named."""
    words = " ".join(plan.items[0].turns[0].split())[:40]
    if plan.kind in ("compare", "fastest"):
        return f"{'Comparison' if plan.kind == 'compare' else 'Fastest method'} · {words}"
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    return f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"
