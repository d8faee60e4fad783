"""A comparison started and waited for."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from playground.experiments.comparison import Comparison, Race
from playground.experiments.forms import CompareForm
from playground.experiments.report.report import Section, read_results
from playground.experiments.service import Experiments
from playground.host.runner import EngineHost
from tests.playground.compare.corrupted import held

WAIT_S = 60.0
SERVICES: WeakKeyDictionary[EngineHost, Experiments] = WeakKeyDictionary()
Slot = tuple[str, dict[str, Any]]


def experiments_of(host: EngineHost) -> Experiments:
    return SERVICES.setdefault(host, Experiments(host))


def begun(host: EngineHost, *slots: Slot, owner: str = "tab", **changes: Any) -> Comparison:
    plan = CompareForm.parse(held(*slots, **changes)).plan(host.catalog)
    comparison = experiments_of(host).start(plan, owner=owner)
    assert isinstance(comparison, Comparison)
    return comparison


def ended(comparison: Comparison) -> Race | None:
    """What came of it, once it is over."""
    assert comparison.over.wait(WAIT_S), comparison.message
    return comparison.race


def raced(comparison: Comparison) -> Race:
    race = ended(comparison)
    assert race is not None
    return race


def section(comparison: Comparison, name: str) -> Section:
    """One configuration of its report."""
    return raced(comparison).results.report.section(name)


def stored_race(host: EngineHost, compare_id: str) -> Race:
    """The same from the log alone."""
    return Race.of(host.log, read_results(host.log, compare_id, types=host.catalog.types))
