"""Predicts a comparison's speedups at larger batch sizes, with texts decoded in lock-step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.metrics import StepParts
from engine.tuning.latency import BatchLatency
from engine.tuning.timing import measure_batch
from playground.experiments.report.report import read_results, stored_experiment
from playground.experiments.statistics import Totals
from playground.host.balance import Balance
from playground.host.catalog import Catalog
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from playground.host.speedup import doubt_of
from storage import RunLog

KIND = "latency"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Predicted speedups over plain decoding at the same batch size.

    Attributes:
        speedups: of each configuration, one per batch size.
        by: the forward that verified the timed batches.
    """

    batches: tuple[int, ...]
    speedups: Mapping[str, Sequence[float]]
    by: str


def batch_report(log: RunLog, catalog: Catalog, compare_id: str) -> BatchReport | None:
    """Prediction from the comparison's own steps; None until batches are timed on its target.

    Raises ConfigError: no such comparison is in the log, or nothing of it is finished.
    """
    results = read_results(log, compare_id, types=catalog.types)
    stored = log.artifacts.find(KIND, _batch_key(results.environment))
    if not stored:
        return None
    batched = TypeAdapter(BatchLatency).validate_python(stored[0].meta["batch"])
    totals = {
        name: Totals.of([r for r in results.requests if r.configuration == name])
        for name in results.plan.names
    }
    plain, *others = results.plan.configurations
    base, speedups = totals[plain.name], dict[str, tuple[float, ...]]()
    for other in others:
        own = totals[other.name]
        if own.num_steps and base.num_steps and not doubt_of(own.step_s, base.step_s):
            speedups[other.name] = batch_speedups(own, base, other.config, batched)
    if not speedups:
        raise ConfigError(
            "Nothing besides plain decoding has a reliable speedup yet. Compare something first."
        )
    return BatchReport(batched.batches, speedups, batched.by)


def batch_speedups(
    own: Totals, plain: Totals, config: MethodConfig, batched: BatchLatency
) -> tuple[float, ...]:
    """Speedup by batch size; MAT, rows and times are means of the measured steps."""
    width = None
    if config.offline and not config.looks_up:
        depth, nodes = config.largest_draft
        width = nodes / depth
    rows = 1 + own.num_drafted / own.num_steps
    assert own.mat is not None and own.time_split is not None and plain.time_split is not None
    mat, parts, plain_parts = own.mat, own.time_split.parts, plain.time_split.parts

    def scaled(parts: StepParts, batch: int, rows: float) -> StepParts:
        return StepParts(
            parts.draft * batched.drafting(batch, width),
            parts.verify * batched.growth(batch, rows),
            parts.other * batched.drafting(batch, None),
        )

    return tuple(
        Balance.of(mat, scaled(parts, batch, rows), scaled(plain_parts, batch, 1)).formula
        for batch in batched.batches
    )


def measure_for(host: EngineHost, compare_id: str, *, owner: str) -> LiveRun:
    """Queue the timing of batches on a comparison's target.

    Raises ConfigError: no such comparison, or its target is no longer in the catalog.
    """
    _, plan = stored_experiment(host.log, compare_id, host.catalog.types)
    name = plan.target.name
    if name not in host.catalog.targets:
        raise ConfigError(f"{name} is no longer offered here, so it cannot be measured.")
    spec = host.catalog.target(name)

    def work(job: LiveRun) -> dict[str, Any]:
        target = host.prepare(job, spec, plan.dtype)
        tell = job.reporter("timing verify forwards of several texts")
        latency = measure_batch(target, on_progress=tell)
        key = _batch_key(target.environment())
        host.log.artifacts.put(KIND, key, meta={"batch": asdict(latency)}, payload=b"")
        return {"text": "measured"}

    return host.submit(work, owner=owner)


def _batch_key(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The key of the stored latency."""
    return {
        "what": "batch",
        "target": environment.get("target"),
        "weights": environment.get("weights"),
        "dtype": environment.get("dtype"),
        "device": environment.get("device_name"),
        "context_len": 256,
    }
