"""A tiny target ready for benchmarks, and plans for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import Limits
from engine.drafters.base import BuildContext
from engine.model.sources import TargetSpec
from playground.experiments.plan import Configuration, ExperimentPlan, Item
from playground.host.models import Models
from tests.playground.bench.requests import plan_of
from tests.playground.tiny import ScriptedConfig, ScriptedDrafter


@pytest.fixture(scope="package")
def bench(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildContext]:
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    cache = tmp_path_factory.mktemp("cache")
    models = Models(cache_dir=cache, device="cpu", resolve=lambda name: spec)
    models.target(spec, "float32", lambda words, share: None)
    yield models.build_context()
    models.close()


@pytest.fixture(autouse=True)
def quick_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have eight tokens here, so the scripted drafter need not know more."""
    monkeypatch.setattr(ScriptedDrafter, "KNOWN", 10)


def item(name: str, *turns: str, group: str = "chat") -> Item:
    return Item("s", name, group, group, turns or (f"Prompt {name}.",))


def scripted(name: str = "scripted", **settings: Any) -> Configuration:
    return Configuration(name, "Scripted", ScriptedConfig(**settings))


def tiny_plan(
    *configurations: Configuration, items: tuple[Item, ...] = (), repeats: int = 1
) -> ExperimentPlan:
    """Two prompts, one of two turns, of eight tokens each."""
    return plan_of(
        configurations=configurations or (scripted(),),
        items=items or (item("a"), item("b", "One?", "Two?", group="maths")),
        repeats=repeats,
        limits=Limits(max_new_tokens=8, ignore_eos=True),
    )
