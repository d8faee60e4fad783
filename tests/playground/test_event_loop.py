"""Nothing blocks the loop that answers requests: every listener that runs on it, called once."""

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
from tests.playground.serving import Served, serving_tiny
from tests.playground.test_http import call
from tests.storage.conftest import finished_run, new_run

LINKS = "0123456789abcdef"
SHOWN = {"compare": json.dumps({"id": LINKS})}


def values_of(listener: dict[str, Any], held: dict[int, Any], run_id: str) -> list[Any]:
    """What makes a listener look something up, else what the page holds."""
    values = [held[part] for part in listener["inputs"]]
    special: dict[str, list[Any]] = {
        "follow_link": [LINKS] * 3,
        "predict": [LINKS, SHOWN],
        "measure": ["http://127.0.0.1:9"],
    }
    for name, own in special.items():
        if listener["api_name"].startswith(name):
            values[: len(own)] = own
    if listener["api_name"].startswith("run_again") and len(values) == 2:
        values[0] = run_id
    return values


@pytest.mark.slow
def test_no_listener_of_the_page_blocks_the_loop(tmp_path: Path) -> None:
    with serving_tiny(tmp_path) as served:
        run_id = finished_run(served.log)
        for listener, held in listeners(served):
            assert call(served, listener["api_name"], values_of(listener, held, run_id))
        with served.client() as client:
            for path in ("/", "/metrics", "/v1/models", "/v2/models/tiny"):
                assert client.get(path).status_code == 200
            body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            generate = {"text_input": "a", "max_tokens": 2}
            assert client.post("/v2/models/tiny/generate", json=generate).status_code == 200


def test_no_message_of_a_stream_makes_the_browser_copy_other_components(tmp_path: Path) -> None:
    """Gradio tells every output of every listener so far of each message, children included."""
    with serving_tiny(tmp_path) as served, served.client() as client:
        config = client.get("/config").json()
    forms = {"apply", "unnamed"}  # drawn anew by Gradio; without outputs
    told = [
        fn["api_name"]
        for fn in config["dependencies"]
        if fn["show_progress_on"] != [] and fn["api_name"].rstrip("_0123456789") not in forms
    ]
    assert not told, "spread playground.web.forms.UNQUEUED, QUEUED or RAW into these listeners"
    kinds = {part["id"]: part["type"] for part in config["components"]}
    assert "tabs" not in {kinds.get(out) for fn in config["dependencies"] for out in fn["outputs"]}


def listeners(served: Served) -> list[tuple[dict[str, Any], dict[int, Any]]]:
    """Listeners that stream or watch, and what the page's components hold."""
    with served.client() as client:
        config = client.get("/config").json()
    held = {part["id"]: part["props"].get("value") for part in config["components"]}
    streams = [fn for fn in config["dependencies"] if fn["backend_fn"] and fn["types"]["generator"]]
    assert len(streams) >= 10
    return [(fn, held) for fn in streams if fn["api_name"] != "import_file"]


@pytest.mark.parametrize("blocks", ["sleeps", "a database", "a file", "long text"])
def test_what_blocks_a_loop_is_noted(tmp_path: Path, blocks: str) -> None:
    from engine import safe_text

    (tmp_path / "file").write_text("1")
    with RunLog.open(str(tmp_path / "log.db")) as log:
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
