"""The served page as anybody on the network sees it: every handler is a public endpoint."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.playground.asks import ask, finished, start
from tests.playground.serving import Served


def call(served: Served, name: str, data: list[Any]) -> list[Any]:
    """All values that a handler yields to a client that found its name."""
    with served.client() as client:
        body = {"data": data, "session_hash": "tester"}
        event = client.post(f"/gradio_api/call/{name}", json=body).json()["event_id"]
        text = client.get(f"/gradio_api/call/{name}/{event}").text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "null"]


def held(**changes: Any) -> list[Any]:
    """What the Generate page's components hold."""
    limits = {"values": {"limits": {"max_new_tokens": "12", "ignore_eos": True}}}
    form = {"form": {"groups": [], "values": {}}, "run_form": limits}
    return list({**ask(), **form, "panel": None, "tab": None, **changes}.values())


def test_generating_over_http_streams_a_run(served: Served) -> None:
    last = call(served, "run", held())[-1][0]
    (status,) = last["status"].values()
    assert status["state"] == "completed"
    (end,) = last["ends"].values()
    assert end["reason"] == "length"


def test_stop_only_stops_its_own_session(served: Served) -> None:
    slow: dict[str, Any] = {"settings": {"delay_ms": "10"}, "limits": {"max_new_tokens": "60"}}
    run = start(served.host, owner="other", **slow)
    call(served, "stop", [None, None])
    assert finished(run).state == "completed"


def test_a_browser_s_request_for_the_manifest_needs_no_token(served: Served) -> None:
    assert httpx.get(f"{served.url}/manifest.json").status_code == 200
    assert httpx.get(f"{served.url}/config").status_code == 401


def test_every_response_carries_the_policy(served: Served) -> None:
    with served.client() as client:
        known = client.get("/").headers
    for headers in (httpx.get(served.url).headers, known):
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
