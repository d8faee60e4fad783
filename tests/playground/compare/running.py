"""A comparison started and waited for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from playground.experiments.compare.form import CompareForm
from playground.experiments.compare.report import ComparisonResults
from playground.experiments.compare.stream import view_of
from playground.experiments.experiment import Experiment
from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from tests.playground.compare.corrupted import held

WAIT_S = 60.0
SERVICES: WeakKeyDictionary[EngineHost, Experiments] = WeakKeyDictionary()
Slot = tuple[str, dict[str, Any]]


def experiments_of(host: EngineHost) -> Experiments:
    return SERVICES.setdefault(host, Experiments(host))


def begun(host: EngineHost, *slots: Slot, owner: str = "tab", **changes: Any) -> Experiment:
    plan = CompareForm.parse(held(*slots, **changes)).plan(host.catalog)
    return experiments_of(host).start(plan, owner=owner)


def ended(comparison: Experiment) -> dict[str, Any]:
    """Its report, once it is over."""
    assert comparison.over.wait(WAIT_S), comparison.message
    results = view_of(comparison).results
    return {} if results is None else values_of(results)


def values_of(results: ComparisonResults) -> dict[str, Any]:
    """All that the page shows under the panels, as plain values."""
    report, drawn = results.report, json.loads(results.to_json())
    rows = [
        asdict(section) | asdict(remarks) | own
        for section, remarks, own in zip(
            report.configurations, results.remarks, drawn["configurations"], strict=True
        )
    ]
    said = {"headline": report.headline, "fastest": report.fastest}
    return {**drawn, **said, "configurations": rows}


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One configuration of a report."""
    return next(r for r in report["configurations"] if r["name"] == name)
