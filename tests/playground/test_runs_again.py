"""A stored run as a request; runs that never began; what is stored of the machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, PromptError
from engine.model.sources import TargetSpec
from playground.host.environment import _nvidia_driver, weights_digest
from playground.host.live import LiveRuns
from playground.host.request import read_request
from playground.host.runner import EngineHost
from playground.runs.details import request_again
from storage import RunLog
from tests.playground.asks import ask, finished, start
from tests.storage.conftest import detail


def test_a_run_again_has_the_same_settings_and_text(host: EngineHost) -> None:
    first = finished(start(host, prompt="Once more.", settings={"max_draft_len": "2"}))
    host.runs.__init__()  # type: ignore[misc]
    run = detail(host.log, first.log_id)
    again = finished(host.generate(request_again(host.catalog, run), owner="tab"))
    twin = detail(host.log, again.log_id)
    assert twin.id != run.id and twin.text == run.text
    assert (twin.setup_id, twin.prompt_id) == (run.setup_id, run.prompt_id)
    assert (twin.method, twin.messages) == (run.method, run.messages)


def test_what_cannot_be_run_again_is_said(host: EngineHost) -> None:
    run = detail(host.log, finished(start(host)).log_id)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("not known here", {"decoding_type": "Psychic"}),
        ("unheard_of", {"method": {**run.method, "unheard_of": 1}}),
        ("target must be one of", {"target": "/etc"}),
    ]
    for message, changes in cases:
        with pytest.raises(ConfigError, match=message):
            request_again(host.catalog, replace(run, **changes))


def test_token_ids_are_no_text_to_run_again(host: EngineHost) -> None:
    """Different ids may decode to the same text, and a text to other ids."""
    request = read_request(host.catalog, ask(mode="raw"))
    runs = [
        finished(host.generate(replace(request, prompt="", prompt_ids=ids), owner="tab"))
        for ids in ((5, 6), (5, 6, 1))
    ]
    one, other = (detail(host.log, run.log_id) for run in runs)
    assert runs[0].meta["prompt"] and one.prompt_text == "" and one.prompt_id != other.prompt_id
    for _ in ("live", "from the log"):
        with pytest.raises(PromptError, match="token ids"):
            host.generate(request_again(host.catalog, one), owner="tab")
        host.runs = LiveRuns()


def test_a_run_whose_target_cannot_be_loaded_is_in_the_log(host: EngineHost, log: RunLog) -> None:
    request = read_request(host.catalog, ask(prompt="Never asked."))
    missing = TargetSpec(name="missing", title="Missing", path="/no/such/folder")
    run = finished(host.generate(replace(request, target=missing), owner="tab"))
    assert run.state == "failed" and run.error is not None and "/no/such/folder" in run.error
    entry = detail(host.log, run.log_id)
    assert (entry.status, entry.error, entry.target) == ("failed", run.error, "missing")
    assert entry.prompt_text == "Never asked." and entry.method["decoding_type"] == "Scripted"
    assert entry.num_steps == 0 and log.steps(entry.id) == ()
    assert finished(start(host)).state == "completed", "the engine goes on"


def test_the_surroundings_are_stored_with_every_run(host: EngineHost) -> None:
    known = detail(host.log, finished(start(host)).log_id).environment
    assert {"torch", "transformers", "gradio"} <= known["versions"].keys()
    for name in ("device", "device_name", "threads", "cpu", "cpu_flags", "memory_gib", "platform"):
        assert known[name], name
    assert known.keys() >= {"driver", "cuda", "gpus", "git_commit", "revision", "weights"}
    folder = Path(host.catalog.targets["tiny"].path or "")
    assert known["weights_digest"] == weights_digest(folder) and len(known["weights_digest"]) == 64


def test_the_digest_of_weights_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.host.environment.BLOCK_BYTES", 1000)
    assert weights_digest(tmp_path) is None
    file = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(1000)) + bytes(80_000)
    file.write_bytes(content)
    first = weights_digest(tmp_path)
    (tmp_path / "readme.txt").write_text("no weights")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(content)
    assert first is not None and weights_digest(copy) == first == weights_digest(tmp_path)
    content[-1] = 1
    file.write_bytes(content)
    assert weights_digest(tmp_path) != first, "the last block counts, and the time of writing"


def test_the_drivers_version_is_read_where_linux_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr("playground.host.environment.NVIDIA_DRIVER", file)
    assert _nvidia_driver() is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release")
    assert _nvidia_driver() == "570.133.20"
