"""A method that claims to be lossless and commits a wrong token; and comparisons, waited for."""

from __future__ import annotations

from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from pydantic import Field

from engine.accept import Acceptance, Rule, VerifiedTree
from engine.drafters.base import BuildContext
from engine.sampling import SeededDraws
from playground.experiments.comparison import Comparison, Race
from playground.experiments.forms import CompareForm
from playground.experiments.report.report import Section, read_results
from playground.experiments.service import Experiments
from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from tests.playground.asks import WAIT_S
from tests.playground.tiny import ScriptedConfig, ScriptedDrafter, offering


class CorruptedConfig(ScriptedConfig):
    """Drafts like the scripted method, and its verifier makes one mistake."""

    title: ClassVar[str] = "Corrupted"

    decoding_type: Literal["Corrupted"] = "Corrupted"  # type: ignore[assignment]
    wrong_at: int = Field(4, ge=1, description="step whose last token is wrong")

    def build(self, bench: BuildContext) -> CorruptedDrafter:
        return CorruptedDrafter(self, bench)


class CorruptedDrafter(ScriptedDrafter):
    """Its rule adds 1 to the token that follows the accepted path of step `wrong_at`."""

    def __init__(self, config: CorruptedConfig, bench: BuildContext) -> None:
        super().__init__(config, bench)
        self._wrong_at = config.wrong_at

    def rule(self) -> Rule:
        right, drafter = super().rule(), self

        class Corrupted(Rule):
            def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
                accepted = right(verified, draws)
                if drafter._step != drafter._wrong_at:
                    return accepted
                return Acceptance(accepted.path, (accepted.next_token + 1) % 256)

        return Corrupted()

    def close(self) -> None:
        self._step = 0


def with_corrupted(catalog: Catalog) -> Catalog:
    """The catalog with this method on offer."""
    return offering(catalog, corrupted=CorruptedConfig())


# ---- comparisons

SERVICES: WeakKeyDictionary[EngineHost, Experiments] = WeakKeyDictionary()
Slot = tuple[str, dict[str, Any]]
"""A method, and its changed settings."""


def held(*configurations: Slot, **changes: Any) -> dict[str, Any]:
    """What the Compare page's components hold."""
    given = configurations or (("scripted", {}),)
    raw = {
        "target": "tiny",
        "dtype": "float32",
        "mode": "chat",
        "system": "",
        "prompt": "Say hello.",
        "suite": "",
        "configurations": [{"method": key, "settings": settings} for key, settings in given],
        "compare": {"repeats": "2", **changes.pop("options", {})},
        "limits": {"max_new_tokens": "20", "ignore_eos": True, **changes.pop("limits", {})},
    }
    return {**raw, **changes}


def experiments_of(host: EngineHost) -> Experiments:
    return SERVICES.setdefault(host, Experiments(host))


def begun(host: EngineHost, *slots: Slot, owner: str = "tab", **changes: Any) -> Comparison:
    plan = CompareForm.parse(held(*slots, **changes)).plan(host.catalog)
    comparison = experiments_of(host).start(plan, owner=owner)
    assert isinstance(comparison, Comparison)
    return comparison


def ended(comparison: Comparison) -> Comparison:
    assert comparison.over.wait(WAIT_S), comparison.status_text
    return comparison


def raced(comparison: Comparison) -> Race:
    race = ended(comparison).race
    assert race is not None
    return race


def section(comparison: Comparison, name: str) -> Section:
    """One configuration of its report."""
    return raced(comparison).results.report.section(name)


def stored_race(host: EngineHost, compare_id: str) -> Race:
    """The same from the log alone."""
    return Race.of(host.log, read_results(host.log, compare_id, types=host.catalog.types))
