"""The models that a process keeps loaded."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from engine.config import Limits
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.steps import Step
from engine.tuning.fit import Fit
from engine.tuning.latency import LatencyCurve
from playground.host.models import Models


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


def test_a_drafter_that_is_kept_goes_by_the_machine_as_it_is_now(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no run waits for the measurement."""
    row_ms, measured = [1e5], list[float]()

    def curve(*_: object, **how: object) -> LatencyCurve:
        if not how:
            measured.append(row_ms[0])
        return LatencyCurve((1, 2), (1e4 + row_ms[0], 1e4 + 2 * row_ms[0]))

    for name in ("measure_curve", "controller_curve"):
        monkeypatch.setattr(f"playground.host.models.{name}", curve)
    monkeypatch.setattr("playground.host.models.CHECK_S", 0.0)
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    models = Models(cache_dir=tmp_path, device="cpu", resolve=lambda name: spec)
    target = models.target(spec, "float32", lambda *told: None)
    config = parse_method(
        {"decoding_type": "Token_Recycling", "adaptive": True, "keep_matrix": False}
    )
    limits = Limits(max_new_tokens=40, ignore_eos=True)

    def drafted() -> int:
        *records, _ = decode(target, models.drafter(config), [72, 101, 108], limits=limits)
        return sum(record.num_drafted for record in records if isinstance(record, Step))

    slow = drafted()
    row_ms[0] = 0.0
    assert drafted() == slow and measured == [1e5]
    models.keep_up()
    assert measured == [1e5, 0.0]
    assert drafted() > 3 * slow and measured == [1e5, 0.0]
    models.close()


@pytest.mark.parametrize("idle_bytes", [0, 1 << 20])
def test_a_draft_model_goes_with_the_last_drafter_that_uses_it(
    idle_bytes: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those used last, of so many bytes: going back to them loads nothing."""
    monkeypatch.setattr("playground.host.models.IDLE_BYTES", idle_bytes)
    loaded: list[weakref.ref[Target]] = []

    def load(*args: Any, **how: Any) -> Target:
        loaded.append(weakref.ref(model := load_target(*args, **how)))
        return model

    monkeypatch.setattr("playground.host.models.load_target", load)
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    models = Models(
        cache_dir=tmp_path,
        device="cpu",
        resolve=lambda name: TargetSpec(name=name, path=str(tiny_folder)),
    )
    models.target(spec, "float32", lambda *told: None)
    draft = {"decoding_type": "Draft_Target", "speculative_model": "small"}
    short, long = (parse_method({**draft, "max_draft_len": length}) for length in (2, 3))
    for config in (short, long):
        models.drafter(config)
    assert len(loaded) == 2 and loaded[1]() is not None, "both draft with one model"
    models.drafter(parse_method({"decoding_type": "NGram"}))
    assert loaded[1]() is not None
    models.drafter(parse_method({"decoding_type": "Suffix"}))
    assert (loaded[1]() is not None) == (idle_bytes > 0)
    models.drafter(short)
    assert len(loaded) == (2 if idle_bytes else 3)
    models.close()
