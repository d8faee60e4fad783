"""Latency curves: measured on real forwards, stored as JSON, and what they predict."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.drafters import parse_method
from engine.drafters.eagle.methods import EagleConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import TargetError
from engine.model.target import Target
from engine.proposal import Proposal
from engine.tree import ChoiceTree
from engine.tuning import StoppedError, timing
from engine.tuning.costs import Costs
from engine.tuning.experience import ExperienceStore
from engine.tuning.latency import BatchLatency, LatencyCurve, StepLatency, TreeLatency
from engine.tuning.timing import measure_batch, measure_curve
from tests.engine.methods import METHODS, drafter_for, target_of
from tests.engine.tuning.runs import golden, stopped
from tests.models import tiny_target

CURVE, BATCH = TypeAdapter(LatencyCurve), TypeAdapter(BatchLatency)
LATENCY = StepLatency(LatencyCurve((1, 11, 101), (10.0, 20.0, 200.0), 256), 2.0, 1.5)


def test_a_tree_s_time_goes_by_its_depth_where_that_was_measured() -> None:
    by_depth = replace(LATENCY.verify, trees=TreeLatency((4, 16), (30.0, 60.0), (5.0, 10.0)))
    assert CURVE.validate_python(asdict(by_depth)) == by_depth
    assert by_depth.at(11) == by_depth.at(11, 10) == LATENCY.verify.at(11, 3) == 20.0
    assert [by_depth.at(16, depth) for depth in (1, 2, 4)] == [60.0, 70.0, 90.0]
    assert by_depth.at(10, 3) == 45.0 + 2 * 7.5
    timed = replace(LATENCY, verify=by_depth)
    config = EagleConfig()
    wide, chain = ChoiceTree.parse([[0], [1], [0, 0], [2]]), ChoiceTree.chain(4)
    assert timed.predict_config(config.with_tree(chain), 2.0).verify_ms == by_depth.at(5)
    assert timed.predict_config(config.with_tree(wide), 2.0).verify_ms == by_depth.at(5, 2)


def test_curves_survive_json() -> None:
    assert CURVE.validate_json(json.dumps(asdict(LATENCY.verify))) == LATENCY.verify
    kept = {"rows": [1, 11, 101], "verify_ms": [10.0, 20.0, 200.0], "context_len": 256}
    assert CURVE.validate_python(kept) == LATENCY.verify


BATCHED = BatchLatency(
    (1, 8),
    (LatencyCurve((1, 11), (5.0, 10.0)), LatencyCurve((1, 11), (10.0, 60.0))),
    "modules",
)


def test_texts_in_lock_step_slow_every_part_as_measured() -> None:
    assert BATCH.validate_python(asdict(BATCHED)) == BATCHED
    assert [BATCHED.growth(batch, 1) for batch in (1, 8)] == [1.0, 2.0]
    assert BATCHED.growth(8, 11) == 6.0 == BATCHED.drafting(8, 11)
    assert BATCHED.drafting(8, None) == 8  # text by text


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_verify_forwards_of_several_texts_are_timed(seconds: float) -> None:
    target = tiny_target("llama")
    fractions: list[float] = []
    latency = measure_batch(
        target,
        rows=(1, 2, 8),
        context_len=16,
        repeats=2,
        seconds=seconds,
        on_progress=fractions.append,
    )
    assert latency.batches == (1, 2, 4, 8, 16, 32) and "modules" in latency.by
    # Out of time, what a slope needs is measured all the same.
    assert {curve.rows for curve in latency.curves} == {(1, 2, 8) if seconds else (1, 2)}
    assert all(ms > 0 for curve in latency.curves for ms in curve.ms)
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1


def test_what_is_read_one_text_after_the_other_is_no_batch() -> None:
    with pytest.raises(TargetError, match="one text after the other"):
        measure_batch(tiny_target("lfm2"))


def test_batches_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    one = target.kv_bytes * (16 + 2)
    monkeypatch.setattr("engine.tuning.timing.MAX_BATCH_BYTES", 5 * one)
    latency = measure_batch(target, rows=(1, 2), context_len=16, repeats=1)
    assert latency.batches == (1, 2, 4)


def test_prediction_is_mat_over_the_step_s_time() -> None:
    prediction = LATENCY.predict(2.5, num_nodes=10, depth=3)
    assert (prediction.draft_ms, prediction.verify_ms) == (2.0 + 3 * 1.5, 20.0)
    assert prediction.tok_s == pytest.approx(1000 * 2.5 / 26.5)
    assert prediction.speedup == pytest.approx(prediction.tok_s / (1000 / 10.0))


@pytest.mark.parametrize(
    "name", ["medusa", "eagle", "eagle-dynamic", "eagle3", "redrafter", "draft-model", "ngram"]
)
def test_drafting_is_timed_for_every_method(name: str) -> None:
    target, costs = target_of(name), Costs(LatencyCurve((1, 2), (1.0, 1.0)))
    drafter = drafter_for(target, name)
    costs.time_drafts(drafter, target)
    assert set(costs.draft_times) == ({"chain", "tree"} if drafter.traits.branches else {"chain"})
    deepest = parse_method(METHODS[name]).largest_draft.depth
    assert {depth for seen in costs.draft_times.values() for depth in seen} <= {*range(deepest + 1)}
    latency = costs.latency()
    assert latency.start_ms + latency.level_ms > 0


def test_measuring_can_be_stopped(tmp_path: Path) -> None:
    case = golden("medusa")
    with pytest.raises(StoppedError):
        measure_curve(tiny_target(), rows=(1, 2), context_len=8, on_progress=stopped)
    store, told = ExperienceStore(tmp_path), list[float]()
    with pytest.raises(StoppedError):
        store.measure(case.config, case.bench, on_progress=stopped)
    assert store.step_latency(case.bench.target.name, case.config) is None
    latency = store.measure(case.config, case.bench, on_progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0
    other = case.config.with_tree(ChoiceTree.chain(2))
    for config in (case.config, other):
        known = ExperienceStore(tmp_path).step_latency(case.bench.target.name, config)
        assert known == latency, "a tree changes nothing about the machine"
    assert store.step_latency(case.bench.target.name, NGramConfig()) is None
    assert store.step_latency("another", case.config) is None


def test_a_slower_machine_scales_what_was_measured() -> None:
    curve = replace(LATENCY.verify, trees=TreeLatency((4, 16), (30.0, 60.0), (5.0, 10.0)))
    costs = Costs(curve)
    costs.plain_ms, costs.row_scale = 2 * curve.at(1), 3.0
    now = costs.latency().verify
    assert [now.at(n, d) for n, d in ((1, None), (11, None), (16, 2))] == [20.0, 40.0, 140.0]


def test_rows_that_are_timed_are_those_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows would choose the same experts."""
    target, verify, timed = tiny_target(), Target.verify, list[list[int]]()

    def verified(self: Target, proposal: Proposal, *rest: Any) -> Any:
        timed.append(proposal.tokens.tolist())
        return verify(self, proposal, *rest)

    monkeypatch.setattr(Target, "verify", verified)
    measure_curve(target, rows=(1, 8), context_len=8, repeats=1)
    text = target.encode(timing.TEXT)
    assert timed[0] == text[8:16] and len(set(timed[0])) > 5


def test_one_row_that_was_held_up_takes_no_longer_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = {1: 0.009, 2: 0.004, 4: 0.005}
    monkeypatch.setattr(timing, "_time_verify", lambda target, cache, shape: held_up[len(shape)])
    curve = measure_curve(tiny_target(), rows=(1, 2, 4), context_len=8)
    assert curve.ms == pytest.approx((4.0, 4.0, 5.0))


def test_a_disturbed_measurement_of_the_curve_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([0.9, 0.9, 0.030, 0.004, 0.005, 0.012, 0.005, 0.004, 0.005, 0.009])
    monkeypatch.setattr(timing, "_time_verify", lambda target, cache, shape: next(times_s))
    curve = measure_curve(tiny_target(), rows=(1, 2), context_len=8, repeats=2)
    assert curve.ms == pytest.approx((4.0, 5.0)) and list(times_s) == [0.005, 0.009]
