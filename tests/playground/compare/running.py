"""A comparison started and waited for."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from playground.experiments.compare.form import CompareForm
from playground.experiments.compare.job import CompareJob
from playground.experiments.job import Jobs
from playground.host.runner import EngineHost
from tests.playground.compare.corrupted import held

WAIT_S = 60.0
JOBS: WeakKeyDictionary[EngineHost, Jobs] = WeakKeyDictionary()
Slot = tuple[str, dict[str, Any]]


def jobs_of(host: EngineHost) -> Jobs:
    return JOBS.setdefault(host, Jobs(host))


def begun(host: EngineHost, *slots: Slot, owner: str = "tab", **changes: Any) -> CompareJob:
    plan = CompareForm.parse(held(*slots, **changes)).plan(host.catalog)
    return CompareJob.start(host, jobs_of(host), plan, owner=owner)


def ended(comparison: CompareJob) -> dict[str, Any]:
    """Its report, once it is over."""
    assert comparison.over.wait(WAIT_S), comparison.message
    found: dict[str, Any] = json.loads(comparison.report or "{}")
    return found


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One configuration of a report."""
    return next(r for r in report["configurations"] if r["name"] == name)
