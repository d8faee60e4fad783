"""Triton's generate endpoints, asked as the tutorials ask them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from playground.api.triton import TritonRequest
from playground.host import runner
from tests.playground.asks import busy, finished, start, until
from tests.playground.serving import Served
from tests.playground.tiny import held_drafts

GENERATE = "/v2/models/ensemble/generate"
TUTORIAL: dict[str, Any] = {"text_input": "What is machine learning?", "max_tokens": 20}
TUTORIAL |= {"bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}


def test_the_tutorials_line_is_answered_without_a_content_type(http: httpx.Client) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says
    answer = http.post(GENERATE, content=json.dumps(TUTORIAL), headers=form)
    told = answer.raise_for_status().json()
    assert told["model_name"] == "ensemble" and told["model_version"] == "1"
    assert told["text_output"].startswith(TUTORIAL["text_input"])
    assert len(told["text_output"]) > len(TUTORIAL["text_input"])


def test_fields_may_be_given_in_parameters_and_lists(http: httpx.Client) -> None:
    whole = http.post(GENERATE, json=TUTORIAL).json()["text_output"]
    rest = {key: value for key, value in TUTORIAL.items() if key != "text_input"}
    body = {"text_input": [TUTORIAL["text_input"]], "parameters": {**rest, "stop_words": [""]}}
    assert http.post(GENERATE, json=body).json()["text_output"] == whole


def test_a_stream_is_the_text_without_the_prompt(http: httpx.Client) -> None:
    whole = http.post(GENERATE, json={**TUTORIAL, "exclude_input_in_output": True}).json()
    answer = http.post(f"{GENERATE}_stream", json={**TUTORIAL, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    told = [json.loads(line) for line in lines]
    assert "".join(one["text_output"] for one in told) == whole["text_output"]
    assert told[-1]["timings"]["predicted_n"] == whole["timings"]["predicted_n"]


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0.0),
        ({"top_k": 50}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"top_k": 0, "top_p": 0.0}, 0.0),
        ({"top_k": 1, "temperature": 0.7}, 0.0),
        ({"top_k": 50, "temperature": 0.7}, 0.7),
    ],
)
def test_greedy_unless_a_field_asks_for_sampling(
    fields: dict[str, Any], temperature: float
) -> None:
    """As TensorRT-LLM's `SamplingParams`."""
    request = TritonRequest.parse({"text_input": "a", **fields})
    assert request.sampling.temperature == temperature


BLS = "/v2/models/tensorrt_llm_bls/generate"
SCRIPTED = "/v2/models/tiny:scripted/generate"


def test_the_guides_draft_length_is_obeyed_by_every_request(
    http: httpx.Client, served: Served
) -> None:
    """The guide's curl of the BLS model; then several, one and no draft tokens: the same text."""
    texts, drafted = [], []
    assert http.post(BLS, json=TUTORIAL).raise_for_status().json()["model_name"] in BLS
    for length in (4, 1, 0):
        body = {**TUTORIAL, "num_draft_tokens": length}
        answer = http.post(SCRIPTED, json=body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["text_output"])
        run = served.log.get(served.host.runs.all()[-1].log_id or "")
        assert run is not None
        drafted.append((run.decoding_type, run.method.get("max_draft_len")))
    assert len(set(texts)) == 1
    assert drafted == [("Scripted", 4), ("Scripted", 1), ("Autoregressive", None)]
    refused = http.post(SCRIPTED, json={**TUTORIAL, "use_draft_logits": True})
    assert refused.status_code == 400 and "use_draft_logits must be left out" in refused.text


def test_health_and_metadata_have_tritons_form(http: httpx.Client) -> None:
    for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/ensemble/ready"):
        assert http.get(path).status_code == 200, path
    assert http.get("/v2").json()["extensions"] == ["generate"]
    told = http.get("/v2/models/tiny:scripted").json()
    assert told["name"] == "tiny:scripted" and told["outputs"][0]["name"] == "text_output"


READY = ("/v2/health/ready", "/v2/models/ensemble/ready")


def test_a_server_whose_engine_is_stuck_is_not_ready(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a text that makes no progress, or with work that does not end when cancelled."""

    def statuses() -> set[int]:
        assert http.get("/v2/health/live").status_code == 200
        return {http.get(path).status_code for path in READY}

    monkeypatch.setattr(runner, "STUCK_S", 0.3)
    with held_drafts():
        run = start(served.host)
        until(lambda: run.first is not None)  # whatever comes before may take longer, too
        until(lambda: statuses() == {503})
        sentence = "made no progress for 0 s. Wait, or restart the server."
        assert sentence in http.get(READY[0]).json()["error"]
    finished(run)
    assert statuses() == {200}
    with busy(served.host):
        (work,) = served.host.runs.owned_by("busy")
        assert not work.over.wait(1) and statuses() == {200}, "nobody knows of its progress"
        work.cancel()
        until(lambda: statuses() == {503})
    assert statuses() == {200}


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        (GENERATE, {}, 400, "text_input"),
        (GENERATE, {"text_input": ["a", "b"]}, 400, "text_input"),
        (GENERATE, {**TUTORIAL, "bad_words": ["x"]}, 400, "bad_words"),
        (GENERATE, {**TUTORIAL, "max_tokens": -1}, 400, "max_tokens"),
        (GENERATE, {**TUTORIAL, "parameters": 3}, 400, "parameters"),
        ("/v2/models/none/generate", TUTORIAL, 404, "none"),
        (GENERATE, {**TUTORIAL, "unheard_of": 1}, 400, "unheard_of"),
        (f"{GENERATE}_stream", {"text_input": 3}, 400, "text_input"),
    ],
)
def test_errors_have_tritons_form(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and word in answer.json()["error"]
