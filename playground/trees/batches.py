"""How much of a comparison's speedups is left when several texts are decoded in lock-step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import Balance, StepParts
from engine.model.target import Target
from engine.tuning import OnProgress, ignore
from engine.tuning.latency import BatchLatency
from engine.tuning.timing import measure_batch
from playground.experiments.report.report import first_run, read_results
from playground.experiments.report.statistics import Totals
from playground.host.baseline import Evidence, doubt_of
from playground.host.catalog import Catalog
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.trees.measurements import Jobs, progress_of
from storage import RunDetail, RunLog

KIND = "latency"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Predicted speedups over plain decoding of as many texts, and what verified the batches.

    Attributes:
        speedups: of each configuration, one per batch size.
    """

    batches: tuple[int, ...]
    speedups: Mapping[str, Sequence[float]]
    by: str


def batch_report(log: RunLog, catalog: Catalog, compare_id: str) -> BatchReport | None:
    """From the comparison's own steps; None while no batch was measured where it ran.

    Raises ConfigError: no such comparison is in the log, or nothing of it is finished.
    """
    batched = stored_batch_latency(log, first_run(log, compare_id))
    if batched is None:
        return None
    results = read_results(log, compare_id, types=catalog.types)
    pools = {
        name: Totals.of([r for r in results.requests if r.configuration == name])
        for name in results.plan.names
    }
    plain, *others = results.plan.configurations
    base, speedups = pools[plain.name], dict[str, tuple[float, ...]]()
    for other in others:
        own = pools[other.name]
        if own.num_steps and base.num_steps and not doubt_of(Evidence(own.step_s, base.step_s)):
            speedups[other.name] = batch_speedups(own, base, other.config, batched)
    if not speedups:
        raise ConfigError(
            "Nothing besides plain decoding has a reliable speedup yet. Compare something first."
        )
    return BatchReport(batched.batches, speedups, batched.by)


def batch_speedups(
    own: Totals, plain: Totals, config: MethodConfig, batched: BatchLatency
) -> tuple[float, ...]:
    """Speedup by batch size, of steps as they were: MAT, rows and times are their means."""
    width = None
    if config.offline and not config.looks_up:
        depth, nodes = config.largest_draft
        width = nodes / depth
    rows = 1 + own.num_drafted / own.num_steps
    assert own.mat is not None and own.time_split is not None and plain.time_split is not None
    mat, parts, plain_parts = own.mat, own.time_split.parts, plain.time_split.parts

    def grown(parts: StepParts, batch: int, rows: float) -> StepParts:
        return StepParts(
            parts.draft * batched.drafting(batch, width),
            parts.verify * batched.growth(batch, rows),
            parts.other * batched.drafting(batch, None),
        )

    return tuple(
        Balance.of(mat, grown(parts, batch, rows), grown(plain_parts, batch, 1)).formula
        for batch in batched.batches
    )


def measure_for(host: EngineHost, jobs: Jobs, compare_id: str, *, owner: str) -> str:
    """Queue timing of batches on the target of a comparison; id of the job.

    Raises ConfigError: no such comparison, or its target is not on offer any more.
    """
    run = first_run(host.log, compare_id)
    if run.target not in host.catalog.targets:
        raise ConfigError(f"{run.target} is no longer offered here, so it cannot be measured.")
    spec = host.catalog.target(run.target)

    def work(job: LiveRun) -> dict[str, str]:
        target = host.prepare(job, spec, run.dtype)
        tell = progress_of(job, "timing verify forwards of several texts")
        measure_batches(host.log, target, on_progress=tell)
        return {"text": "measured"}

    return jobs.start(work, owner=owner)


# ---- kept in the log


def _batch_key(target: str, weights: object, dtype: str, device: object) -> dict[str, Any]:
    names = ("what", "target", "weights", "dtype", "device", "context_len")
    return dict(zip(names, ("batch", target, weights, dtype, device, 256), strict=True))


def measure_batches(
    log: RunLog, target: Target, *, on_progress: OnProgress = ignore
) -> BatchLatency:
    """Measure texts in lock-step and store the latency.

    Raises StoppedError: somebody stopped it.
    """
    latency, where = measure_batch(target, on_progress=on_progress), target.environment()
    key = _batch_key(target.name, where.get("weights"), target.dtype_name, where.get("device_name"))
    figures = {"batch": latency.to_dict()}
    log.artifacts.put(KIND, key, meta=figures, payload=json.dumps(figures).encode())
    return latency


def stored_batch_latency(log: RunLog, run: RunDetail) -> BatchLatency | None:
    """The newest measurement of texts in lock-step where a run was made."""
    where = run.environment
    key = _batch_key(run.target, where.get("weights"), run.dtype, where.get("device_name"))
    artifact = next(iter(log.artifacts.find(KIND, key)), None)
    return None if artifact is None else BatchLatency.from_dict(artifact.meta["batch"])
