"""/metrics against the log, and who may read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import stored_figures
from playground.web.access import Access
from tests.playground.api.test_openai import CHAT, TEXT, bearer, idle
from tests.playground.serving import TOKEN, Served, serving_tiny


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    """By name, and by position or reason where there is one."""
    text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_counters_are_the_sums_of_the_log(http: httpx.Client, served: Served) -> None:
    for body in (CHAT, TEXT, {**TEXT, "model": "tiny:plain"}, {**TEXT, "stream": True}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        http.post(path, json=body).raise_for_status()
    idle(served)
    found = samples(http)
    runs = [served.log.get(row.id) for row in served.log.find().rows]
    figures = [stored_figures(run.metrics) for run in runs if run is not None]
    drafting = [one for one in figures if one["num_drafted"]]

    def total(key: str, of: list[Any] = drafting) -> float:
        return sum(one[key] for one in of)

    assert found["vllm:spec_decode_num_drafts_total", ""] == total("num_steps")
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == total("num_drafted")
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == total("num_accepted") > 0
    first = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    expected = sum(round(one["position_rates"][0] * one["num_steps"]) for one in drafting)
    assert found[first, "0"] == expected > found[first, "1"] > 0
    assert found["vllm:generation_tokens_total", ""] == total("num_new_tokens", figures)
    assert found["vllm:prompt_tokens_total", ""] == total("num_prompt_tokens", figures)
    assert found["vllm:request_success_total", "length"] == len(figures)
    assert found["vllm:time_to_first_token_seconds_count", ""] == len(figures)
    ttft_s, itl_s = total("ttft_s", figures), total("itl_ms", figures) / 1000
    for name, seconds in (
        ("time_to_first_token", ttft_s),
        ("inter_token_latency", itl_s),
        ("e2e_request_latency", ttft_s + total("decode_s", figures)),
    ):
        assert found[f"vllm:{name}_seconds_sum", ""] == pytest.approx(seconds)
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Served]:
    with serving_tiny(tmp_path, Access(token=TOKEN, api_key="key")) as served:
        yield served


def test_a_key_is_asked_for_where_there_is_one(keyed: Served) -> None:
    for path in ("/metrics", "/v1/models", "/v2/health/ready"):
        url = keyed.url + path
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=bearer("wrong")).status_code == 401
        assert httpx.get(url, headers=bearer("key")).status_code == 200
        assert httpx.get(url, headers=bearer(TOKEN)).status_code == 200
    assert httpx.get(f"{keyed.url}/v1/models").json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{keyed.url}/config", headers=bearer("key")).status_code == 401
