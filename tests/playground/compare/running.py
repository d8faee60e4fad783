"""A comparison started and waited for."""

from __future__ import annotations

import json
from typing import Any

from playground.experiments.compare.job import Comparison
from playground.experiments.compare.plan import read_plan
from playground.host.runner import EngineHost
from tests.playground.compare.corrupted import held

WAIT_S = 60.0
Slot = tuple[str, dict[str, Any]]


def begun(host: EngineHost, *slots: Slot, owner: str = "tab", **changes: Any) -> Comparison:
    plan = read_plan(host.catalog, held(*slots, **changes))
    return Comparison.start(host, plan, owner=owner)


def ended(comparison: Comparison) -> dict[str, Any]:
    """Its report, once it is over."""
    assert comparison.whole.over.wait(WAIT_S), comparison.whole.words
    found: dict[str, Any] = json.loads(comparison.report or "{}")
    return found


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One configuration of a report."""
    return next(r for r in report["configurations"] if r["name"] == name)
