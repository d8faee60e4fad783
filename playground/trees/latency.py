"""What steps of several texts cost on this machine, kept in the log; and curves for the page."""

from __future__ import annotations

import json
from typing import Any

from engine.model.target import Target
from engine.tuning import OnProgress, ignore
from engine.tuning.latency import BatchLatency, StepLatency
from engine.tuning.timing import measure_batch
from storage import RunDetail, RunLog

KIND = "latency"


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


def speed_row(latency: StepLatency) -> dict[str, Any]:
    """The curves as the page's `predict` reads them; plain JSON."""
    verify, trees = latency.verify, latency.verify.trees
    return {
        "verify": _points(verify.rows, verify.ms),
        "trees": trees
        and {
            "star": _points(trees.rows, trees.star_ms),
            "level": _points(trees.rows, trees.level_ms),
        },
        "start_ms": latency.start_ms,
        "level_ms": latency.level_ms,
        "text": f"With about {verify.context_len} tokens of context, as measured on this machine "
        "and kept up to date by runs.",
    }


def _points(rows: tuple[int, ...], ms: tuple[float, ...]) -> list[list[float]]:
    return [list(pair) for pair in zip(rows, ms, strict=True)]
