"""/metrics against the log, who may read it, and a foreign client that measures by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


def test_counters_are_the_sums_of_the_log_and_latencies_have_an_observation_each(
    http: httpx.Client, served: Served
) -> None:
    for body in (CHAT, TEXT, {**TEXT, "model": "tiny:plain"}, {**TEXT, "stream": True}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        http.post(path, json=body).raise_for_status()
    idle(served)
    found = samples(http)
    runs = [served.log.get(row.id) for row in served.log.find().rows]
    figures = [run.metrics for run in runs if run is not None]
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
    steps = [step for row in served.log.find().rows for step in served.log.steps(row.id)]
    assert found["vllm:inter_token_latency_seconds_count", ""] == len(steps) > len(figures)
    ttft_s = total("ttft_s", figures)
    itl_s = sum(s.draft_s + s.verify_s + s.accept_s + s.other_s for s in steps)
    for name, seconds in (
        ("time_to_first_token", ttft_s),
        ("inter_token_latency", itl_s),
        ("e2e_request_latency", ttft_s + total("decode_s", figures)),
    ):
        assert found[f"vllm:{name}_seconds_sum", ""] == pytest.approx(seconds)
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0


def test_a_key_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    with serving_tiny(tmp_path, Access(token=TOKEN, api_key="key")) as served:
        for path in ("/metrics", "/v1/models", "/v2/health/ready"):
            statuses = [
                httpx.get(served.url + path, headers=headers).status_code
                for headers in ({}, bearer("wrong"), bearer("key"), bearer(TOKEN))
            ]
            assert statuses == [401, 401, 200, 200]
        refusal = httpx.get(f"{served.url}/v1/models").json()
        assert refusal["error"]["type"] == "authentication_error"
        assert httpx.get(f"{served.url}/config", headers=bearer("key")).status_code == 401


QUESTIONS = ("Say hello.", "Name three rivers.", "Count to ten.", "What is tea?")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a client from the package index."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "aiperf>=0.13,<1"], check=True, timeout=1200)
    return folder / "bin"


@pytest.mark.network
@pytest.mark.slow
def test_aiperf_measures_acceptance_as_the_log_has_it(
    served: Served, http: httpx.Client, programs: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"text": text}) for text in QUESTIONS))
    idle(served)
    known = {row.id for row in served.log.find().rows}
    before = samples(http)
    line = f"""
        profile --model tiny:scripted --url {served.url} --endpoint-type chat --streaming
        --tokenizer {served.host.catalog.targets["tiny"].path} --input-file {questions}
        --custom-dataset-type single_turn --request-count 8 --concurrency 2
        --extra-inputs temperature:0 --extra-inputs max_tokens:24 --extra-inputs ignore_eos:true
        --use-server-token-count --server-metrics {served.url}/metrics
        --ui simple --output-artifact-dir {tmp_path / "out"}"""
    done = subprocess.run(
        [programs / "aiperf", *line.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    idle(served)
    runs = [served.log.get(row.id) for row in served.log.find().rows if row.id not in known]
    figures = [run.metrics for run in runs if run is not None]
    assert len(figures) == found["request_count"]["avg"] == 8
    assert found["spec_decode_acceptance_length"]["count"] == 8
    lengths = [one["mat"] for one in figures]
    assert found["spec_decode_acceptance_length"]["avg"] == pytest.approx(fmean(lengths))
    for name, key in (("steps", "num_steps"), ("accepted_draft_tokens", "num_accepted")):
        assert found[f"spec_decode_{name}"]["sum"] == sum(one[key] for one in figures)
    assert found["output_sequence_length"]["avg"] == 24
    counted = "vllm:spec_decode_num_accepted_tokens_total", ""
    grown = samples(http)[counted] - before[counted]
    assert grown == found["spec_decode_accepted_draft_tokens"]["sum"]
