"""A tiny target ready for benchmarks, and plans for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import Limits
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.model.sources import TargetSpec
from playground.cli.bench import LoadedBench
from playground.experiments.bench.plan import Configuration, Plan, make_plan
from playground.experiments.bench.suites import Item
from playground.host.models import Models
from tests.playground.tiny import ScriptedConfig, ScriptedDrafter

TYPES = {"Autoregressive": AutoregressiveConfig, "Scripted": ScriptedConfig}


@pytest.fixture(scope="package")
def bench(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedBench]:
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    cache = tmp_path_factory.mktemp("cache")
    models = Models(cache_dir=cache, device="cpu", resolve=lambda name: spec)
    yield LoadedBench(models.target(spec, "float32", lambda words, share: None), models)
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
) -> Plan:
    """Two prompts, one of two turns, of eight tokens each."""
    return make_plan(
        TargetSpec(name="tiny", path="."),
        "float32",
        configurations or (scripted(),),
        items or (item("a"), item("b", "One?", "Two?", group="maths")),
        repeats=repeats,
        limits=Limits(max_new_tokens=8, ignore_eos=True),
    )
