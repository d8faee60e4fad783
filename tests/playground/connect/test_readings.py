"""What engines' counters say: recorded answers of their documented shapes, and times between.

The draft length that is advised, against a machine whose times are known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.formats import DASH
from engine.metrics import chain_mat
from playground.connect.client import DraftCounts, Reply
from playground.connect.readings import ENGINES, ModelList, Reading, between, engine_of
from playground.connect.replay import Level, Outcome
from playground.connect.report import (
    LengthAdvice,
    Report,
    batch_schedule,
    best_length,
    equal_rates,
    reading_figures,
)
from playground.experiments.plan import Item

RECORDED = {file.stem: file.read_text() for file in Path(__file__).parent.glob("recorded/*.*")}
del RECORDED["README"]
BY_NAME = {engine.name: engine for engine in ENGINES}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_counters_are_the_same_figures(name: str) -> None:
    reading = BY_NAME[name].read(RECORDED[name].encode())
    assert reading.mat == 2.5 and reading.draft_acceptance == 0.5
    assert (reading.running, reading.waiting) == (2.0, 1.0)
    assert reading.generated == (None if name == "trtllm" else 100)
    if name in ("vllm", "llamacpp"):
        assert reading.position_rates == (0.75, 0.5, 0.25)
    assert reading.draft_len == 3
    assert Reading(steps=1, drafted=2.0**53).draft_len == 256  # an engine may say anything


def test_sglang_s_own_mat_is_recent_and_that_of_its_counters_is_of_the_window() -> None:
    """Releases before 0.5.20 have the mean only; what a window drafted comes from two readings."""
    engine, text = BY_NAME["sglang"], RECORDED["sglang"]
    first = engine.read(text.encode())
    later = text.replace("} 40.0", "} 50.0").replace("} 70.0", "} 110.0")
    grown, restarted = between(first, engine.read(later.encode()))
    assert not restarted and (grown.steps, grown.generated) == (10, 40)
    assert grown.mat == 4 and first.mat == 2.5
    shown = {title: text for title, text, _ in reading_figures(grown, 2.0)}
    assert shown["MAT"] == "4.00" and shown["drafter's steps"] == "3.0"
    assert shown["draft tokens"] == "4.0"
    assert shown["verified window"] == "3.50" and "MAT of blocks" not in shown
    old = engine.read(text.replace("sglang:spec_verify_calls", "x").encode())
    assert old.steps is None and old.mat == old.mean_mat == 2.5


def test_the_owner_of_its_models_identifies_an_engine() -> None:
    for engine in ENGINES:
        models = ModelList.parse({"data": [{"id": "m", "owned_by": engine.owner}]})
        assert engine_of(models) is engine


@pytest.mark.parametrize(
    "answer", [[], {}, {"data": 3}, {"data": [3]}, {"data": []}, {"data": [{"id": "x"}]}, None]
)
def test_an_answer_of_no_known_engine_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match="vLLM|data|ModelList"):
        engine_of(ModelList.parse(answer))


def test_figures_are_of_the_time_between_two_readings() -> None:
    before = Reading(steps=10, drafted=30, accepted=10, at_least=(8, 2), generated=20)
    after = Reading(steps=30, drafted=90, accepted=40, at_least=(20, 15, 5), generated=70)
    grown, restarted = between(before, after)
    assert not restarted and (grown.steps, grown.drafted, grown.generated) == (20, 60, 50)
    assert grown.mat == 2.5 and grown.at_least == (12, 13, 5)


def test_a_counter_that_fell_is_a_restart() -> None:
    before = Reading(steps=10, drafted=30, accepted=10, generated=20, at_least=(8, 2))
    of_all_steps = Reading(steps=2, drafted=6, accepted=1, generated=40)
    of_a_position = Reading(steps=12, drafted=36, accepted=12, generated=40, at_least=(3, 1))
    for after in (of_all_steps, of_a_position):
        assert between(before, after) == (after, True)


# ---- the advice


RATES = (0.8, 0.5, 0.2, 0.05)


@pytest.mark.parametrize("per_token_s", [0.0, 0.001, 0.004, 0.02])
def test_the_best_length_is_the_best_of_all(per_token_s: float) -> None:
    """On a machine on which a plain step takes 10 ms, and each drafted token adds its own."""
    measured_s = 0.01 + 4 * per_token_s
    choice = best_length(1, 100.0, chain_mat(RATES, 4) / measured_s, RATES)
    speeds = [chain_mat(RATES, k) / (0.01 + k * per_token_s) for k in range(5)]
    assert choice.tok_s == pytest.approx(max(speeds))
    assert choice.draft_len == speeds.index(max(speeds))
    assert choice.speedup == pytest.approx(max(speeds) * 0.01)


SCHEDULES = {
    "vllm": '"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 7, 6], [8, 16, 0]]',
    "sglang": '{"1": {"candidate_steps": [4]}, "4": {"candidate_steps": [6]}, '
    '"8": {"candidate_steps": [0]}}',
    "trtllm": "max_draft_len: 4 and draft_len_schedule: {3: 4, 7: 4}, without drafts above",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_written_as_the_engine_takes_it(name: str) -> None:
    """SGLang names the least batch size, TensorRT-LLM the largest, and none is above the first."""
    lengths, schedule = ((1, 4), (2, 4), (4, 6), (8, 0), (16, 0)), BY_NAME[name].schedule
    assert schedule is not None
    advice = [LengthAdvice(concurrency, length, 1.0, 1.0) for concurrency, length in lengths]
    assert SCHEDULES[name] in schedule(batch_schedule(advice))


def test_without_positions_equal_acceptance_is_assumed() -> None:
    assert equal_rates(1.75, 2) == pytest.approx((0.5, 0.25))
    assert equal_rates(None, 3) == equal_rates(2.0, 0) == ()
    assert equal_rates(9.0, 3) == pytest.approx((1, 1, 1))


def level(seconds: float, *, mat: float | None = None) -> Level:
    """One answer of 41 tokens that took so long after its first."""
    drafting = mat and DraftCounts(steps=20, drafted=80, accepted=round(20 * (mat - 1)))
    counts: dict[str, Any] = {"num_prompt_tokens": 5, "num_new_tokens": 41, "drafting": drafting}
    times: dict[str, Any] = {"ttft_s": 0.1, "latency_s": 0.1 + seconds}
    reply = Reply(text="x", finish_reason="length", **counts, **times)
    return Level(1, seconds, (Outcome(Item("s", "p", "chat", "chat", ("x",)), reply),))


def test_an_engine_that_is_faster_than_its_mat_has_no_speedup() -> None:
    for plain_s, gain, verdict in (
        (1.6, "1.60×", "Concurrency 1: 1.60× plain decoding"),
        (2.1, DASH, "Concurrency 1: no speedup is given"),
    ):
        report = Report(BY_NAME["vllm"], (level(1.0, mat=2.0),), (level(plain_s),))
        assert report.rows()[1][-3] == gain and report.sentences()[0].startswith(verdict)
