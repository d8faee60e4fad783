"""The served page as programs see it: every listener is an endpoint, and none blocks the others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FunctionType
from typing import Any

import pytest

from playground.runs.query import TableQuery
from playground.web.run_files import RunFiles
from storage import RunLog
from tests import blocking
from tests.playground.asks import ask, finished, start
from tests.playground.serving import Served, serving_tiny
from tests.storage.conftest import finished_run, new_run


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


def test_generating_over_http_streams_a_run_of_whatever_method_is_asked_for(
    served: Served,
) -> None:
    """Events at once, as while a page loads, may change a menu in another order on the server."""
    last = call(served, "run", held(method="type:Autoregressive"))[-1][0]
    (batch,) = json.loads(last["batches"]).values()
    assert batch["status"]["state"] == "completed" and batch["end"]["reason"] == "length"


def test_stop_only_stops_its_own_session(served: Served) -> None:
    slow: dict[str, Any] = {"settings": {"delay_ms": "10"}, "limits": {"max_new_tokens": "60"}}
    run = start(served.host, owner="other", **slow)
    call(served, "stop", [None, None])
    assert finished(run).state == "completed"


def test_no_tab_keeps_a_connection_open(served: Served) -> None:
    """A browser has six for all tabs of a server; heartbeats of some tabs would use them up."""
    with served.client() as client:
        assert client.get("/config").json()["connect_heartbeat"] is False


# ---- listeners that run on the loop that answers requests

NO_RUN = "0123456789abcdef"
LOOKED_UP: dict[str, list[Any]] = {
    "follow_link": [NO_RUN] * 3,
    "predict": [NO_RUN, {"compare": json.dumps({"id": NO_RUN})}],
    "measure": ["http://127.0.0.1:9"],
}
"""First inputs of a listener, by its name, that make it look something up."""


def config_of(served: Served) -> dict[str, Any]:
    with served.client() as client:
        config: dict[str, Any] = client.get("/config").json()
    return config


def test_following_a_chat_finds_its_earlier_runs_off_the_loop_and_leaves_its_meta_alone(
    served: Served,
) -> None:
    """The engine's thread writes into the meta meanwhile."""
    runs, first = served.host.runs, finished(start(served.host))
    slow: dict[str, Any] = {"settings": {"delay_ms": "20"}}
    second = start(served.host, prompt="More.", parent=first.log_id, **slow)
    meta = second.meta
    runs.__init__()  # type: ignore[misc]  # the first run is only in the log
    runs.add(second)
    last = call(served, "follow_link", [second.id] * 3)[-1][0]
    assert last["resync"] and last["runs"][0]["answered_by"] == [first.log_id]
    assert second.meta is meta


@pytest.mark.slow
def test_no_listener_of_the_page_blocks_the_loop(served: Served) -> None:
    run_id, config = finished_run(served.log), config_of(served)
    held = {part["id"]: part["props"].get("value") for part in config["components"]}
    streams = [fn for fn in config["dependencies"] if fn["backend_fn"] and fn["types"]["generator"]]
    assert len(streams) >= 10
    for listener in streams:
        name, values = listener["api_name"], [held[part] for part in listener["inputs"]]
        for begin, first in LOOKED_UP.items():
            if name.startswith(begin):
                values[: len(first)] = first
        if name.startswith("run_again") and len(values) == 2:
            values[0] = run_id
        assert name == "import_file" or call(served, name, values)
    with served.client() as client:
        for path in ("/", "/metrics", "/v1/models", "/v2/models/tiny"):
            assert client.get(path).status_code == 200
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        generate = {"text_input": "a", "max_tokens": 2}
        assert client.post("/v2/models/tiny/generate", json=generate).status_code == 200


def test_no_message_of_a_stream_makes_the_browser_copy_other_components(served: Served) -> None:
    """Gradio tells every output of every listener so far of each message, children included."""
    config = config_of(served)
    forms = {"apply", "unnamed"}  # drawn anew by Gradio; without outputs
    told = [
        fn["api_name"]
        for fn in config["dependencies"]
        if fn["show_progress_on"] != [] and fn["api_name"].rstrip("_0123456789") not in forms
    ]
    assert not told, "spread playground.web.forms.UNQUEUED, QUEUED or RAW into these listeners"
    kinds = {part["id"]: part["type"] for part in config["components"]}
    assert "tabs" not in {kinds.get(out) for fn in config["dependencies"] for out in fn["outputs"]}


@pytest.mark.parametrize("blocks", ["sleeps", "a database", "a file", "long text"])
def test_a_call_that_blocks_the_loop_is_recorded(tmp_path: Path, log: RunLog, blocks: str) -> None:
    from engine import safe_text

    (tmp_path / "file").write_text("1")
    calls: dict[str, Callable[[], object]] = {
        "sleeps": lambda: time.sleep(0),
        "a database": log.find,
        "a file": lambda: safe_text.read_text(tmp_path / "file"),
        "long text": lambda: safe_text.read_json("[" + "1," * 100_000 + "1]", what="It"),
    }

    async def ours() -> None:
        calls[blocks]()

    for function in (ours, calls[blocks]):  # as if these were lines of ours, not of a test
        if isinstance(function, FunctionType):
            place = f"{blocking.ROOT}/playground/any.py"
            function.__code__ = function.__code__.replace(co_filename=place)
    asyncio.run(ours())
    assert blocking.NOTED
    blocking.NOTED.clear()


def test_an_export_that_a_client_leaves_has_nothing_to_clean_up(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector closes its generator, wherever it runs: here on an event loop."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    for _ in range(100):
        log.begin(new_run())
    files = RunFiles(log, lambda _: TableQuery())
    export = files.export_file("json", None)
    assert "Exported 100 of 100 runs." in next(export)[0]
    loop = asyncio.new_event_loop()
    loop.call_soon(export.close)
    loop.call_soon(loop.stop)
    thread = Thread(target=loop.run_forever)
    thread.start()
    thread.join()
    loop.close()
    assert blocking.NOTED == []


@pytest.mark.slow
def test_every_call_of_the_page_says_why_the_log_fails(tmp_path: Path) -> None:
    with serving_tiny(tmp_path) as served, served.client() as client:
        config = client.get("/config").json()
        values = {part["id"]: part["props"].get("value") for part in config["components"]}
        aside = (tmp_path / "runs.db").rename(tmp_path / "aside.db")
        answers = {}
        for fn in config["dependencies"]:
            if fn["backend_fn"] and fn["api_name"] != "import_file":  # that has no file yet
                data = [values.get(part) for part in fn["inputs"]]
                body = {"data": data, "fn_index": fn["id"], "session_hash": "failing"}
                name = f"{fn['id']} {fn['api_name']}"
                answers[name] = client.post("/gradio_api/run/predict", json=body)
        aside.rename(tmp_path / "runs.db")
    stale = [name for name, answer in answers.items() if "does not match" in answer.text]
    assert stale == []
    failed = {name: answer for name, answer in answers.items() if answer.status_code != 200}
    assert failed, "some listeners do not expect it"
    for answer in failed.values():
        assert "was removed or replaced" in answer.json()["error"]
