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
from engine.tuning.latency import DraftLatency, LatencyCurve, StepLatency, bucket_of
from engine.tuning.timing import measure_curve, measure_draft, measure_other
from playground.trees.methods import TreeMethod
from playground.trees.tables import table_key
from storage import Artifact, RunLog

KIND = "latency"
TWO_PATHS = ChoiceTree(((0,), (1,), (0, 0), (1, 0)))


def machine_key(target: Target, context_len: int) -> dict[str, Any]:
    """What a target's curve depends on."""
    return {
        "what": "verify",
        "target": target.name,
        "weights": target.provenance.get("weights"),
        "dtype": target.dtype_name,
        "device": target.device_name,
        "context_len": bucket_of(context_len),
    }


def draft_key(config: MethodConfig, target: Target, context_len: int) -> dict[str, Any]:
    """What a method's draft latency depends on: the machine, the weights, how it drafts."""
    machine = machine_key(target, context_len)
    return {**machine, "what": "draft", "method": draft_method(config)}


def draft_method(config: MethodConfig) -> dict[str, Any]:
    """A method's settings without those that the latency is asked for."""
    method: dict[str, Any] = table_key(config, "", "")["method"]
    return {**method, "use_dynamic_tree": getattr(config, "use_dynamic_tree", False)}


def find_clock(
    log: RunLog, config: MethodConfig, target: Target, *, context_len: int = 256
) -> StepLatency | None:
    """The curves of a method on this machine; None where some were never measured."""
    machine = _newest(log, machine_key(target, context_len))
    draft = _newest(log, draft_key(config, target, context_len))
    if machine is None or draft is None:
        return None
    return _clock(machine, draft)


def _clock(machine: Mapping[str, Any], draft: Mapping[str, Any]) -> StepLatency:
    return StepLatency(
        LatencyCurve.from_dict(machine["verify"]),
        LatencyCurve.from_dict(machine["other"]),
        DraftLatency.from_dict(draft["draft"]),
    )


def known_clock(
    log: RunLog, config: MethodConfig, target: str, *, dtype: str | None = None
) -> tuple[StepLatency, Artifact] | None:
    """The newest curves of a method on a target that need not be loaded, and their verify curve.

    None where there are no curves of both the target and the method from one machine. The curves
    say themselves on which device and dtype they were measured.

    Args:
        dtype: only curves of this one.
    """
    method = draft_method(config)
    found = [a for a in log.artifacts.find(KIND) if a.key.get("target") == target]
    for verify in found:
        if verify.key.get("what") != "verify" or dtype not in (None, verify.key.get("dtype")):
            continue
        machine = {**verify.key, "what": "draft", "method": method}
        draft = next((a for a in found if _json(a.key) == _json(machine)), None)
        if draft is not None:
            return _clock(verify.meta, draft.meta), verify
    return None


def measure_clock(
    log: RunLog,
    config: MethodConfig,
    bench: BuildContext,
    *,
    context_len: int = 256,
    again: bool = False,
    on_progress: OnProgress = ignore,
) -> StepLatency:
    """Measure what is missing, keep it, and return all of it.

    Args:
        context_len: tokens of context that texts have; its bucket is measured.
        again: measure what is there as well.

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
        _keep(log, key, {"verify": verify.to_dict(), "other": other.to_dict()})
    key = draft_key(config, target, context_len)
    if again or _newest(log, key) is None:
        draft = measure_draft(
            config, bench, context_len=bucket, on_progress=part(on_progress, 0.75, 1.0)
        )
        _keep(log, key, {"draft": draft.to_dict()})
    clock = find_clock(log, config, target, context_len=context_len)
    assert clock is not None
    return clock


def _json(value: object) -> str:
    """Comparable text: what is stored has lists where settings have tuples."""
    return json.dumps(value, sort_keys=True)


def _newest(log: RunLog, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = log.artifacts.find(KIND, key)
    return found[0].meta if found else None


def _keep(log: RunLog, key: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Curves are small: they are kept in `meta`, and as JSON for whoever reads the bytes."""
    payload = json.dumps(figures).encode()
    log.artifacts.put(KIND, key, meta=figures, payload=payload)


# ---- for the page


def speed_row(clock: StepLatency, method: TreeMethod, where: Artifact) -> dict[str, Any]:
    """The curves as the page's `predict` reads them; plain JSON."""
    key = where.key
    day = where.created_at.date().isoformat()
    words = (
        f"Measured on {key.get('device')} in {key.get('dtype')} with about "
        f"{clock.verify.context_len} tokens of context, {day}."
    )
    return {
        "verify": _points(clock.verify.rows, clock.verify.ms),
        "other": _points(clock.other.rows, clock.other.ms),
        "draft": {
            "start_ms": clock.draft.start_ms,
            "points": _points(clock.draft.rows, clock.draft.level_ms),
        },
        "levels": levels_kind(method),
        "text": words,
    }


def _points(rows: tuple[int, ...], ms: tuple[float, ...]) -> list[list[float]]:
    return [list(pair) for pair in zip(rows, ms, strict=True)]


def levels_kind(method: TreeMethod) -> str:
    """How a tree's levels count for drafting: see `levelsOf` in the page's script."""
    config = method.config
    if not config.draft_shape().levels:
        return "none"
    # Two paths of two nodes: level 2 runs a row per path, or one for the whole depth.
    drafts_trees = config.choices_field() is not None
    shape = config.with_tree(TWO_PATHS).draft_shape() if drafts_trees else None
    return "expanded" if shape is not None and shape.levels == (1, 2) else "depth"
