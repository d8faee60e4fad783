"""What engines' counters say: recorded answers of their documented shapes, and times between."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from playground.connect.readings import ENGINES, ModelList, Reading, between, engine_of
from playground.connect.report import reading_figures

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
