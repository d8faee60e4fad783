"""Benchmarks in the log: begin one, go on with one, finish it, read its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.errors import ConfigError
from engine.model.audit import audit
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.bench.audits import audits_of, store_audit
from playground.experiments.bench.measured import Measured, measured_runs
from playground.experiments.bench.plan import Plan, Types
from playground.experiments.bench.progress import Outcome, Progress
from playground.experiments.bench.report import Report, make_report
from playground.experiments.bench.runner import Bench, run_plan
from playground.experiments.bench.verdict import Divergence
from storage import Benchmark, RunLog, RunQuery

KIND = "benchmark"
"""`kind` of a plan in the log that is a benchmark of this package."""
MAX_AUDITS = 8
"""Answers of a configuration that are looked into, where they differ from plain decoding's."""


def begin(log: RunLog, plan: Plan, name: str = "") -> str:
    """Write a plan down before its first request; returns the benchmark's id."""
    return log.benchmarks.begin(name or default_name(plan), {"kind": KIND, **plan.to_dict()})


def default_name(plan: Plan) -> str:
    suites = " + ".join(dict.fromkeys(item.suite for item in plan.items))
    return f"{suites}: {', '.join(c.name for c in plan.configurations[1:]) or 'plain'}"


def stored_plan(log: RunLog, benchmark_id: str) -> Benchmark:
    """A benchmark as it stands in the log.

    Raises:
        ConfigError: there is none of this id.
    """
    found = log.benchmarks.get(benchmark_id)
    if found is None or found.plan.get("kind") != KIND:
        raise ConfigError(f"No benchmark {benchmark_id!r:.80} is in the log.")
    return found


def plan_to_resume(log: RunLog, benchmark_id: str, types: Types | None = None) -> Plan:
    """The plan of a benchmark, to go on with.

    Raises:
        ConfigError: there is none of this id, or it names methods that are not here.
    """
    return Plan.from_dict(stored_plan(log, benchmark_id).plan, types)


def environment_of(log: RunLog, benchmark_id: str) -> Mapping[str, Any]:
    """Where the benchmark's first request ran; empty before it."""
    query = RunQuery(benchmark_id=benchmark_id, descending=False, limit=1)
    first = next(iter(log.find(query).rows), None)
    detail = None if first is None else log.get(first.id)
    return {} if detail is None else detail.environment


def check_same_target(stored: Mapping[str, Any], target: Target) -> None:
    """Refuse to go on with a benchmark on other weights or in another dtype.

    Args:
        stored: has the `environment` of a run, or an empty one.

    Raises:
        ConfigError: naming what differs.
    """
    then, now = stored.get("environment") or target.environment(), target.environment()
    for key in ("weights", "revision", "dtype"):
        if then.get(key) != now.get(key):
            raise ConfigError(
                f"The benchmark began with {key} {then.get(key)!r}, but the target here has "
                f"{now.get(key)!r}: the figures could not be compared. Begin a new one."
            )


def conduct(
    plan: Plan,
    bench: Bench,
    log: RunLog,
    benchmark_id: str,
    *,
    tell: Callable[[Progress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what is missing of a benchmark and write down how it ended."""
    outcome: Outcome | None = None
    try:
        outcome = run_plan(plan, bench, log, benchmark_id, tell=tell, cancelled=cancelled)
        if not outcome.cancelled:
            look_into_differences(bench.target, log, benchmark_id, tell=tell, cancelled=cancelled)
        return outcome
    finally:
        status: Literal["completed", "cancelled", "failed"]
        status = "failed" if outcome is None else outcome.status
        skipped = [] if outcome is None else [asdict(skip) for skip in outcome.skipped]
        log.benchmarks.finish(
            benchmark_id,
            status,
            {"skipped": skipped, "num_failed": 0 if outcome is None else outcome.num_failed},
        )


def look_into_differences(
    target: Target,
    log: RunLog,
    benchmark_id: str,
    *,
    tell: Callable[[Progress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Audit the first answers of every configuration that differ from plain decoding's.

    The first of a configuration is also asked of a float32 copy, where the target is small.
    """
    report = read_results(log, benchmark_id).report
    for section in report.configurations:
        verdict = section.verdict
        for n, one in enumerate(() if verdict is None else verdict.divergences[:MAX_AUDITS]):
            if cancelled():
                return
            if one.near_tie is None:
                words = f"looking into differences · {section.name}"
                tell(Progress(report.num_done, report.num_done, 0, words, None))
                _look_into(target, log, benchmark_id, one, in_float32=n == 0)


def _look_into(
    target: Target, log: RunLog, benchmark_id: str, one: Divergence, *, in_float32: bool
) -> None:
    own, plain = log.get(one.run_id), log.get(one.reference_run_id)
    if own is None or plain is None:
        return
    texts = plain.output_ids, own.output_ids
    found = attempt(
        lambda: audit(target, plain.prompt_ids, *texts, in_float32=in_float32),
        where=f"the audit of {one.run_id}",
    )
    if found is not None and not isinstance(found, Fault):
        store_audit(log, own.id, plain.id, found, benchmark_id=benchmark_id)


@dataclass(frozen=True, slots=True)
class Results:
    """A benchmark, its finished requests and the report over them."""

    benchmark: Benchmark
    requests: tuple[Measured, ...]
    report: Report
    environment: Mapping[str, Any]


def read_results(
    log: RunLog, benchmark_id: str, requests: Iterable[Measured] | None = None
) -> Results:
    """Everything that a benchmark has shown so far.

    Args:
        requests: its finished requests where they are at hand; else they are read from the log.

    Raises:
        ConfigError: there is none of this id.
    """
    benchmark = stored_plan(log, benchmark_id)
    found = tuple(measured_runs(log, benchmark_id) if requests is None else requests)
    report = make_report(benchmark.plan, found, audits_of(log, benchmark_id))
    return Results(benchmark, found, report, environment_of(log, benchmark_id))
