"""What engines' counters say: recorded answers of their documented shapes, and times between.

The draft length that is advised, against a machine whose times are known.
"""

from __future__ import annotations

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

RECORDED = {
    "vllm": """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 120.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 60.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 10.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
""",
    "llamacpp": """\
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 100
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 120
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 60
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 20
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
""",
    "sglang": """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",dp_rank="0",tp_rank="0"} 2.0
sglang:spec_accept_length{model_name="m",dp_rank="1",tp_rank="0"} 3.0
# TYPE sglang:spec_verify_calls counter
sglang:spec_verify_calls_total{model_name="m",tp_rank="0"} 40.0
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens{model_name="m",tp_rank="0"} 4.0
# TYPE sglang:spec_cap_length gauge
sglang:spec_cap_length{model_name="m",tp_rank="0"} 3.5
# TYPE sglang:spec_block_accept_length gauge
sglang:spec_block_accept_length{model_name="m",tp_rank="0"} 0.0
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{model_name="m",dp_rank="0",tp_rank="0"} 0.4
sglang:spec_accept_rate{model_name="m",dp_rank="1",tp_rank="0"} 0.6
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 70.0
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 30.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 1.0
""",
    "trtllm": """[
{"iter": 1, "numActiveRequests": 4, "numQueuedRequests": 0},
{"iter": 2, "numActiveRequests": 2, "numQueuedRequests": 1, "specDecodingStats": {
  "numDraftTokens": 120, "numAcceptedTokens": 60, "numRequestsWithDraftTokens": 40,
  "acceptanceLength": 2.5, "iterLatencyMS": 3.0, "draftOverhead": 0.1}}]""",
}
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
def test_what_is_no_engine_is_refused(answer: Any) -> None:
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
