"""What a step costs on this machine, for the Tree page's prediction."""

from __future__ import annotations

import json
from typing import Any

from engine.drafters.method import MethodConfig
from engine.tuning.latency import LatencyCurve
from engine.tuning.shape import draft_shape
from engine.tuning.step_latency import Clock, DraftLatency, OtherCurve
from playground.trees.editor_methods import TreeMethod
from playground.trees.latency import KIND, draft_method, find_curves
from storage import Artifact, RunLog


def stored_clock(log: RunLog, config: MethodConfig, target: str) -> tuple[Clock, Artifact] | None:
    """The newest curves of a method on a target, and where they were measured; None without any.

    Nothing need be loaded: the curves say themselves on which device and dtype they were measured.
    """
    method = draft_method(config)
    drafts = {
        _machine(found): found
        for found in reversed(log.artifacts.find(KIND))
        if found.key.get("what") == "draft" and _same(found.key.get("method"), method)
    }
    for verify in find_curves(log, target):
        draft = drafts.get(_machine(verify))
        if draft is not None:
            clock = Clock(
                LatencyCurve.from_dict(verify.meta["verify"]),
                OtherCurve.from_dict(verify.meta["other"]),
                DraftLatency.from_dict(draft.meta["draft"]),
            )
            return clock, verify
    return None


def _machine(artifact: Artifact) -> str:
    kept = {name: artifact.key[name] for name in artifact.key if name not in ("what", "method")}
    return json.dumps(kept, sort_keys=True)


def _same(stored: object, wanted: object) -> bool:
    # Compared as JSON: what is stored has lists where settings have tuples.
    return json.dumps(stored, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def speed_row(clock: Clock, method: TreeMethod, where: Artifact) -> dict[str, Any]:
    """The curves as the page's `predict` reads them; plain JSON."""
    key = where.key
    day = where.created_at.date().isoformat()
    words = (
        f"Measured on {key.get('device')} in {key.get('dtype')} with about "
        f"{clock.verify.context_len} tokens of context, {day}."
    )
    return {
        "verify": _points(clock.verify.rows, clock.verify.verify_ms),
        "other": _points(clock.other.rows, clock.other.other_ms),
        "draft": {
            "start_ms": clock.draft.start_ms,
            "points": _points(clock.draft.rows, clock.draft.level_ms),
        },
        "levels": levels_kind(method),
        "words": words,
    }


def _points(rows: tuple[int, ...], ms: tuple[float, ...]) -> list[list[float]]:
    return [list(pair) for pair in zip(rows, ms, strict=True)]


def levels_kind(method: TreeMethod) -> str:
    """How a tree's levels count for drafting: see `levelsOf` in the page's script."""
    if not draft_shape(method.config).levels:
        return "none"
    return "expanded" if method.config.decoding_type == "Eagle" else "depth"
