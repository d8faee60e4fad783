"""The models that a process keeps loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.sources import TargetSpec
from engine.model.target import Target
from playground.host.models import Models


def test_a_target_that_can_run_no_more_is_loaded_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    models = Models(cache_dir=tmp_path, device="cpu", resolve=lambda name: spec)
    first, again = (models.target(spec, "float32", lambda *told: None) for _ in range(2))
    assert again is first
    monkeypatch.setattr(Target, "fault", property(lambda t: "gone" if t is first else None))
    second = models.target(spec, "float32", lambda *told: None)
    assert second is not first and models.target(spec, "float32", lambda *told: None) is second
    models.close()
