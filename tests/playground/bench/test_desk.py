"""What the Benchmark page asks: forms, jobs of the engine, reports, and a killed server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.experiments.bench.desk import BenchDesk
from playground.experiments.bench.measured import summaries
from playground.host.runner import EngineHost
from storage import RunLog, StorageError
from tests.playground.asks import start as generate
from tests.playground.tiny import tiny_catalog

ROOT = Path(__file__).parents[3]
WAIT_S = 240.0


@pytest.fixture
def desk(host: EngineHost) -> BenchDesk:
    return BenchDesk(host)


def asked(*names: str, **changes: Any) -> dict[str, Any]:
    """A form over the two starter prompts."""
    configurations = [
        {"method": "scripted", "name": name, "settings": {}} for name in names or ("scripted",)
    ]
    form = {
        "target": "tiny",
        "dtype": "float32",
        "suites": ["starter"],
        "categories": [],
        "configurations": configurations,
        "extent": {"repeats": "1"},
        "limits": {"max_new_tokens": "8", "ignore_eos": True},
        "sampling": {},
    }
    return {**form, **changes}


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)


def finished(desk: BenchDesk, benchmark_id: str) -> dict[str, Any]:
    """The benchmark, once this server is done with it."""
    until(lambda: not desk.look({"id": benchmark_id})["here"])
    return desk.look({"id": benchmark_id})


def test_a_benchmark_runs_and_its_report_is_read_once(desk: BenchDesk) -> None:
    benchmark_id = desk.start(asked())["id"]
    shown = finished(desk, benchmark_id)
    assert (shown["status"], shown["num_requests"], shown["error"]) == ("completed", 4, None)
    assert shown["report"]["num_done"] == 4
    assert shown["report"]["groups"] == ("chat", "code")
    assert shown["conditions"]["dtype"] == "float32" and shown["conditions"]["concurrency"] == 1
    json.dumps(shown)
    again = desk.look({"id": benchmark_id, "have": shown["version"]})
    assert "report" not in again and again["version"] == shown["version"]
    assert [head["id"] for head in desk.benchmarks({})["benchmarks"]] == [benchmark_id]
    file = desk.file({"id": benchmark_id, "name": "requests.csv"})
    assert len(file["text"].splitlines()) == 5


def test_a_report_grows_while_it_runs(desk: BenchDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("playground.experiments.bench.desk.DRAW_EVERY_S", 0.0)
    form = asked(extent={"repeats": "3"})
    form["configurations"][0]["settings"] = {"delay_ms": "15"}
    benchmark_id = desk.start(form)["id"]
    counts = set()
    while (shown := desk.look({"id": benchmark_id}))["here"]:
        counts.add(shown["report"]["num_done"])
        time.sleep(0.02)
    assert len(counts) > 2 and max(counts) <= 12


def test_stopping_and_resuming_through_the_desk(desk: BenchDesk, log: RunLog) -> None:
    form = asked(extent={"repeats": "3"})
    form["configurations"][0]["settings"] = {"delay_ms": "15"}
    benchmark_id = desk.start(form)["id"]
    with pytest.raises(ConfigError, match="running already"):
        desk.resume({"id": benchmark_id})
    until(lambda: sum(run.status == "completed" for run in summaries(log, benchmark_id)) >= 3)
    desk.stop({"id": benchmark_id})
    shown = finished(desk, benchmark_id)
    assert shown["status"] == "cancelled" and 3 <= shown["report"]["num_done"] < 12
    with pytest.raises(ConfigError, match="not run by this server"):
        desk.stop({"id": benchmark_id})
    desk.resume({"id": benchmark_id})
    shown = finished(desk, benchmark_id)
    assert shown["status"] == "completed" and shown["report"]["num_done"] == 12


def test_a_run_of_a_tab_neither_ends_nor_overtakes_a_benchmark(desk: BenchDesk) -> None:
    benchmark_id = desk.start(asked())["id"]
    run = generate(desk.host, owner="tab")
    assert finished(desk, benchmark_id)["status"] == "completed"
    assert run.over.wait(WAIT_S) and run.state == "completed"


def test_one_that_is_stopped_in_the_queue_can_be_resumed(desk: BenchDesk) -> None:
    blocking = generate(desk.host, settings={"delay_ms": "60"}, limits={"max_new_tokens": "200"})
    benchmark_id = desk.start(asked())["id"]
    progress = desk.look({"id": benchmark_id})["progress"]
    assert progress["words"] == "waiting for the engine, 1 ahead"
    desk.stop({"id": benchmark_id})
    blocking.cancel()
    shown = finished(desk, benchmark_id)
    assert shown["status"] == "cancelled" and shown["report"]["num_done"] == 0


def test_what_breaks_is_said_and_kept(desk: BenchDesk) -> None:
    form = asked()
    form["configurations"][0]["settings"] = {"fail_at": "1"}
    benchmark_id = desk.start(form)["id"]
    shown = finished(desk, benchmark_id)
    assert shown["status"] == "failed" and "Something broke" in shown["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "x"}, "target must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"suites": []}, "No suite is ticked"),
        ({"suites": ["x"]}, "suites must be some of"),
        ({"suites": "starter"}, "suites must be a list"),
        ({"categories": ["maths"]}, "categories must be some of"),
        ({"configurations": []}, "1 to 12 configurations"),
        ({"configurations": [{"method": "x", "name": "y"}]}, "method must be one of"),
        ({"configurations": [{"method": "scripted", "name": " "}]}, "name must have 1 to 60"),
        ({"configurations": [{"method": "scripted", "name": "a\nb"}]}, "printable"),
        ({"configurations": [5]}, "must be a mapping"),
        ({"extent": {"repeats": "0"}}, "repeats must be"),
        ({"extent": {"colour": "0"}}, "colour is not a setting"),
        ({"limits": {"max_new_tokens": "many"}}, "max_new_tokens must be"),
        ({"limits": 3}, "limits must be a mapping"),
        ({"sampling": {"temperature": "-1"}}, "temperature must be"),
    ],
)
def test_a_wrong_form_is_one_sentence(desk: BenchDesk, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        desk.start(asked(**changes))
    assert desk.benchmarks({})["benchmarks"] == []


def test_settings_of_a_configuration_are_checked_and_kept(desk: BenchDesk) -> None:
    form = asked("a", "b")
    form["configurations"][1]["settings"] = {"max_draft_len": "2"}
    plan = desk.outlook(form)
    assert plan == {
        "num_prompts": 2,
        "num_configurations": 3,
        "num_repeats": 1,
        "num_requests": 6,
    }
    form["configurations"][1]["settings"] = {"max_draft_len": "99"}
    with pytest.raises(ConfigError, match="max_draft_len must be"):
        desk.outlook(form)
    with pytest.raises(ConfigError, match="Two configurations are named a"):
        desk.outlook(asked("a", "a"))


def test_files_of_the_browser_become_suites(desk: BenchDesk) -> None:
    text = '{"question_id": 1, "category": "qa", "turns": ["Who?"]}\n'
    entry = desk.add_file({"name": "question.jsonl", "text": text})
    assert (entry["title"], entry["num_prompts"]) == ("question.jsonl", 1)
    assert entry["key"] in [suite["key"] for suite in desk.menus({})["suites"]]
    assert desk.outlook(asked(suites=[entry["key"]]))["num_prompts"] == 1
    with pytest.raises(ConfigError, match="bad.json, line 1 is not JSON"):
        desk.add_file({"name": "bad.json", "text": "{"})
    with pytest.raises(ConfigError, match="must have a name and a text"):
        desk.add_file({"name": "x", "text": None})


@pytest.mark.parametrize("benchmark_id", ["nothing", "", None, "x" * 99, "\x00"])
def test_an_unknown_benchmark_is_one_sentence(desk: BenchDesk, benchmark_id: Any) -> None:
    for ask in (desk.look, desk.resume, desk.stop):
        with pytest.raises(ConfigError):
            ask({"id": benchmark_id})
    with pytest.raises(ConfigError, match="name must be one of"):
        desk.file({"id": benchmark_id, "name": "../secrets"})


SERVER = """
import sys, time
from pathlib import Path
from playground.experiments.bench.desk import BenchDesk
from playground.host.runner import EngineHost
from storage import RunLog
from tests.playground.bench.test_desk import asked
from tests.playground.tiny import tiny_catalog
log = RunLog.open(sys.argv[1])
host = EngineHost(log, tiny_catalog(Path(sys.argv[2])), cache_dir=Path(sys.argv[3]), device="cpu")
BenchDesk(host).start(asked(extent={"repeats": "10"}))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_server_loses_one_request_and_a_new_one_completes_the_rest(
    tiny_folder: Path, tmp_path: Path
) -> None:
    db = tmp_path / "runs.db"
    words = [str(db), str(tiny_folder), str(tmp_path / "cache")]
    process = subprocess.Popen([sys.executable, "-c", SERVER, *words], cwd=ROOT)

    def done() -> list[str]:
        try:
            log = RunLog.open(str(db))
        except StorageError:  # the other process is creating it
            return []
        try:
            found = log.benchmarks.list(1)
            runs = summaries(log, found[0].id) if found else ()
            return [run.id for run in runs if run.status == "completed"]
        finally:
            log.close()

    try:
        until(lambda: process.poll() is not None or (db.exists() and len(done()) >= 3))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    log = RunLog.open(str(db))
    host = EngineHost(log, tiny_catalog(tiny_folder), cache_dir=tmp_path / "cache", device="cpu")
    desk = BenchDesk(host)
    try:
        (head,) = desk.benchmarks({})["benchmarks"]
        assert head["status"] == "interrupted" and not head["here"]
        before = [run for run in summaries(log, head["id"])]
        kept = {run.id for run in before if run.status == "completed"}
        assert 3 <= len(kept) < 40 and len(before) - len(kept) <= 1
        desk.resume({"id": head["id"]})
        shown = finished(desk, head["id"])
        assert (shown["status"], shown["report"]["num_done"]) == ("completed", 40)
        after = [run for run in summaries(log, head["id"]) if run.status == "completed"]
        assert len(after) == 40 and kept <= {run.id for run in after}
    finally:
        host.close()
        log.close()
