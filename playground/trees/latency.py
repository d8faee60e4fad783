"""What a step costs on this machine: curves in the log, measured once per target, dtype, device
and context bucket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.tree import ChoiceTree
from engine.tuning import OnProgress, ignore, part
from engine.tuning.experience import ExperienceStore
from engine.tuning.latency import BatchLatency, DraftLatency, LatencyCurve, StepLatency, bucket_of
from engine.tuning.timing import measure_batch, measure_curve, measure_draft, measure_other
from playground.trees.methods import TreeMethod
from playground.trees.tables import as_json, method_key
from storage import Artifact, RunDetail, RunLog

KIND = "latency"
TWO_PATHS = ChoiceTree(((0,), (1,), (0, 0), (1, 0)))


def machine_key(target: Target, context_len: int) -> dict[str, Any]:
    """What a target's curve depends on."""
    return _machine_key(target.name, target.dtype_name, target.environment(), context_len)


def machine_of_run(run: RunDetail, *, context_len: int = 256) -> dict[str, Any]:
    """`machine_key` of the target that wrote a run of the log."""
    return _machine_key(run.target, run.dtype, run.environment, context_len)


def _machine_key(
    target: str, dtype: str, environment: Mapping[str, Any], context_len: int
) -> dict[str, Any]:
    return {
        "what": "verify",
        "target": target,
        "weights": environment.get("weights"),
        "dtype": dtype,
        "device": environment.get("device_name"),
        "context_len": bucket_of(context_len),
    }


def _draft_key(machine: Mapping[str, Any], config: MethodConfig) -> dict[str, Any]:
    """What a method's draft latency depends on: the machine, the weights, how it drafts."""
    dynamic = {"use_dynamic_tree": getattr(config, "use_dynamic_tree", False)}
    return {**machine, "what": "draft", "method": {**method_key(config), **dynamic}}


def find_latency(
    log: RunLog, config: MethodConfig, target: Target, *, context_len: int = 256
) -> StepLatency | None:
    """The curves of a method on this machine; None where some were never measured."""
    key = machine_key(target, context_len)
    return _latency(_newest(log, key), _newest(log, _draft_key(key, config)))


def _latency(machine: Artifact | None, draft: Artifact | None) -> StepLatency | None:
    if machine is None or draft is None:
        return None
    return StepLatency(
        LatencyCurve.from_dict(machine.meta["verify"]),
        LatencyCurve.from_dict(machine.meta["other"]),
        DraftLatency.from_dict(draft.meta["draft"]),
    )


def stored_latency(
    log: RunLog, config: MethodConfig, target: str, *, dtype: str | None = None
) -> tuple[StepLatency, Artifact] | None:
    """The newest curves of a method on a target that need not be loaded, and their verify curve.

    None where there are no curves of both the target and the method from one machine. The curves
    say themselves on which device they were measured.

    Args:
        dtype: only curves of this one.
    """
    curves = [a for a in log.artifacts.find(KIND) if a.key.get("target") == target]
    for verify in curves:
        if verify.key.get("what") != "verify" or dtype not in (None, verify.key.get("dtype")):
            continue
        draft_key = as_json(_draft_key(verify.key, config))
        draft = next((a for a in curves if as_json(a.key) == draft_key), None)
        latency = _latency(verify, draft)
        if latency is not None:
            return latency, verify
    return None


def measure_latency(
    log: RunLog,
    config: MethodConfig,
    bench: BuildContext,
    *,
    context_len: int = 256,
    again: bool = False,
    on_progress: OnProgress = ignore,
) -> StepLatency:
    """Measure curves that are missing (`again`: all of them), store and return them.

    Args:
        context_len: tokens of context that texts have; its bucket is measured.

    Raises:
        ConfigError: the method cannot draft without the target.
        SourceError, DrafterError: the drafter cannot be had.
        StoppedError: somebody stopped it.
    """
    target, bucket = bench.target, bucket_of(context_len)
    key = machine_key(target, context_len)
    if again or _newest(log, key) is None:
        verify = measure_curve(target, context_len=bucket, on_progress=part(on_progress, 0.0, 0.6))
        other = measure_other(target, context_len=bucket, on_progress=part(on_progress, 0.6, 0.75))
        _store(log, key, {"verify": verify.to_dict(), "other": other.to_dict()})
    key = _draft_key(key, config)
    if again or _newest(log, key) is None:
        tell = part(on_progress, 0.75, 1.0)
        draft = measure_draft(config, bench, context_len=bucket, on_progress=tell)
        _store(log, key, {"draft": draft.to_dict()})
    latency = find_latency(log, config, target, context_len=context_len)
    assert latency is not None
    return latency


def measure_batches(
    log: RunLog, target: Target, *, context_len: int = 256, on_progress: OnProgress = ignore
) -> BatchLatency:
    """Measure texts in lock-step and store the latency.

    Raises StoppedError: somebody stopped it.
    """
    latency = measure_batch(target, context_len=bucket_of(context_len), on_progress=on_progress)
    _store(log, _batch_key(machine_key(target, context_len)), {"batch": latency.to_dict()})
    return latency


def stored_batch_latency(log: RunLog, machine: Mapping[str, Any]) -> BatchLatency | None:
    """The newest measurement of texts in lock-step on a machine, given by its `machine_key`."""
    artifact = _newest(log, _batch_key(machine))
    return None if artifact is None else BatchLatency.from_dict(artifact.meta["batch"])


def _batch_key(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {**machine, "what": "batch"}


def _newest(log: RunLog, key: Mapping[str, Any]) -> Artifact | None:
    return next(iter(log.artifacts.find(KIND, key)), None)


def _store(log: RunLog, key: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Curves are small: they go into `meta`, and as JSON into the payload."""
    log.artifacts.put(KIND, key, meta=figures, payload=json.dumps(figures).encode())


# ---- for the page


def known_latency(
    log: RunLog, experience: ExperienceStore, method: TreeMethod
) -> tuple[StepLatency, Artifact | None] | None:
    """The curves of a method on this machine: measured here, else what its runs have learnt."""
    stored = stored_latency(log, method.config, method.target)
    if stored is not None:
        return stored
    known = experience.stored(method.target, method.config)
    latency = known and known.latency(method.config)
    return (latency, None) if latency else None


def speed_row(
    latency: StepLatency,
    where: Artifact | None,
    method: TreeMethod,
    batched: BatchLatency | None = None,
) -> dict[str, Any]:
    """The curves as the page's `predict` reads them; plain JSON."""
    text = "As its runs here have learnt, with drafts of the usual width. Measure for more detail."
    if where is not None:
        about = f"on {where.key.get('device')} in {where.key.get('dtype')} with about "
        text = (
            f"Measured {about}{latency.verify.context_len} tokens of context, "
            f"{where.created_at.date().isoformat()}."
        )
    return {
        **_curves(latency),
        "levels": levels_kind(method.config),
        "text": text,
        "batches": batched
        and [{"batch": b, **_curves(latency.at_batch(batched, b))} for b in batched.batches],
        "by": batched and batched.by,
    }


def _curves(latency: StepLatency) -> dict[str, Any]:
    verify, other, draft = latency.verify, latency.other, latency.draft
    trees = verify.trees
    return {
        "verify": _points(verify.rows, verify.ms),
        "trees": trees
        and {
            "star": _points(trees.rows, trees.star_ms),
            "level": _points(trees.rows, trees.level_ms),
        },
        "other": _points(other.rows, other.ms),
        "draft": {"start_ms": draft.start_ms, "points": _points(draft.rows, draft.level_ms)},
    }


def _points(rows: tuple[int, ...], ms: tuple[float, ...]) -> list[list[float]]:
    return [list(pair) for pair in zip(rows, ms, strict=True)]


def levels_kind(config: MethodConfig) -> str:
    """How a tree's levels count for drafting: see `levelsOf` in the page's script."""
    if not config.draft_shape().levels:
        return "none"
    # Two paths of two nodes: level 2 runs a row per path, or one for the whole depth.
    drafts_trees = config.choices_field() is not None
    shape = config.with_tree(TWO_PATHS).draft_shape() if drafts_trees else None
    return "expanded" if shape is not None and shape.levels == (1, 2) else "depth"
