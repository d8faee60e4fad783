"""The models that a process keeps loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.tuning.fit import Fit
from engine.tuning.latency import LatencyCurve
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


def test_a_size_is_fitted_again_between_runs_and_never_before_one(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_ms = [10.0]

    def curve(*_: object, **__: object) -> LatencyCurve:
        return LatencyCurve((1, 2), (step_ms[0], 2 * step_ms[0]))

    def fit_size(config: MethodConfig, tables: object, bench: object, curve: Any) -> Fit:
        return Fit(config, f"{curve().at(1):g} ms")

    for name, stands_in in (("measure_curve", curve), ("controller_curve", curve)):
        monkeypatch.setattr(f"playground.host.models.{name}", stands_in)
    monkeypatch.setattr("playground.host.models.fit_size", fit_size)
    monkeypatch.setattr("playground.host.models.CHECK_S", 0.0)
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    models = Models(cache_dir=tmp_path, device="cpu", resolve=lambda name: spec)
    models.target(spec, "float32", lambda *told: None)
    ngram = parse_method({"decoding_type": "NGram", "size": "fit"})
    assert models.fit(ngram).reason == "10 ms"
    step_ms[0] = 11.0
    models.keep_up()
    assert models.fit(ngram).reason == "10 ms", "a little faster or slower is noise"
    step_ms[0] = 20.0
    assert models.fit(ngram).reason == "10 ms", "a run does not wait for a measurement"
    models.keep_up()
    assert models.fit(ngram).reason == "20 ms"
    models.close()
