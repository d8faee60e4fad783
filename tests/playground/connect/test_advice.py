"""The draft length that is advised, against a machine whose times are known."""

from __future__ import annotations

from typing import Any

import pytest

from engine.metrics import chain_mat
from playground.connect.client import DraftCounts, Reply
from playground.connect.readings import ENGINES
from playground.connect.replay import Level, Outcome, ReplayPrompt
from playground.connect.report import (
    LengthAdvice,
    _speedup,
    _verdict,
    batch_schedule,
    best_length,
    equal_rates,
)

RATES = (0.8, 0.5, 0.2, 0.05)


@pytest.mark.parametrize("per_token_s", [0.0, 0.001, 0.004, 0.02])
def test_the_best_length_is_the_best_of_all(per_token_s: float) -> None:
    """On a machine on which a plain step takes 10 ms, and each drafted token adds its own."""
    measured_s = 0.01 + 4 * per_token_s
    choice = best_length(1, 100.0, chain_mat(RATES, 4) / measured_s, RATES)
    speeds = [chain_mat(RATES, k) / (0.01 + k * per_token_s) for k in range(5)]
    assert choice.tok_s_by_len == pytest.approx(speeds)
    assert choice.draft_len == speeds.index(max(speeds))
    assert choice.speedup == pytest.approx(max(speeds) * 0.01)


def choice(concurrency: int, length: int) -> LengthAdvice:
    return LengthAdvice(concurrency, length, 1.0, 1.0, ())


def test_lengths_become_vllms_table_without_gaps() -> None:
    choices = [choice(1, 4), choice(2, 4), choice(4, 2), choice(8, 0), choice(16, 0)]
    assert batch_schedule(choices) == [[1, 3, 4], [4, 7, 2], [8, 16, 0]]


SCHEDULES = {
    "vllm": '"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 7, 6], [8, 16, 0]]',
    "sglang": '{"1": {"candidate_steps": [4]}, "4": {"candidate_steps": [6]}, '
    '"8": {"candidate_steps": [0]}}',
    "trtllm": "max_draft_len: 4 and draft_len_schedule: {3: 4, 7: 4}, without drafts above",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_written_as_the_engine_takes_it(name: str) -> None:
    """SGLang names the least batch size, TensorRT-LLM the largest, and none is above the first."""
    engine = next(engine for engine in ENGINES if engine.name == name)
    lengths = ((1, 4), (2, 4), (4, 6), (8, 0), (16, 0))
    assert engine.schedule is not None
    assert SCHEDULES[name] in engine.schedule(batch_schedule([choice(*one) for one in lengths]))


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
    return Level(1, seconds, (Outcome(ReplayPrompt("s", "p", "chat", "x"), reply),))


def test_an_engine_that_is_faster_than_its_mat_has_no_speedup() -> None:
    assert _verdict(level(1.0, mat=2.0), level(1.6)).startswith("Concurrency 1: 1.60× plain")
    assert "no speedup is given" in _verdict(level(1.0, mat=2.0), level(2.1))
    assert _speedup(level(1.0, mat=2.0), level(2.1)) is None
