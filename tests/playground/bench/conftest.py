"""A tiny target ready for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.drafters.base import BuildContext
from engine.model.sources import TargetSpec
from playground.host.models import Models
from tests.playground.tiny import ScriptedDrafter


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
