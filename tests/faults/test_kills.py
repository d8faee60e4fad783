"""kill -9 at any moment of every long action: what was shown is kept, and what is left is done.

Ctrl+C is quick, and leaves nothing half marked.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from playground.experiments.sweep.report import read_sweep
from storage import RunLog, RunQuery
from tests.faults.children import Child, command, page, page_that_loads_forever, words
from tests.faults.runs import (
    Watcher,
    answers,
    check_marks,
    check_run,
    follow,
    ids_of,
    slow,
    streamed,
)
from tests.playground.asks import until
from tests.playground.serving import TOKEN, free_port
from tests.playground.test_http import held
from tests.playground.tiny import save_tiny_llama
from tests.storage.conftest import detail

pytestmark = pytest.mark.slow  # whole programs, started and ended

APP = Path(__file__).parents[2] / "app.py"
SEED = 20261122
SOON_S = 30.0
"""On a machine that has other things to do; by itself the page's run would take longer."""
INTERRUPTED = 130


def timed(folder: Path, *arguments: object) -> float:
    """Seconds of a command that nobody kills."""
    child = Child(folder, command, *arguments)
    assert child.ended() == 0, child.errors
    return time.monotonic() - child.began_s


def killed(
    folder: Path, draw: random.Random, seconds: float, asked: Callable[[], Sequence[object]]
) -> None:
    """Kill a command at some moment of the seconds that it takes; sooner, if it had ended."""
    while True:
        child = Child(folder, command, *asked())
        time.sleep(draw.uniform(0.1, 0.8) * seconds)
        if child.kill():
            return
        seconds /= 2


# ---- runs


def test_a_killed_command_keeps_in_the_log_what_it_printed(tiny: Path, tmp_path: Path) -> None:
    db, draw = tmp_path / "runs.db", random.Random(SEED)
    line = "generate hello --target {} --dtype float32 --db {} --method NGram --ignore-eos"
    asked = words(f"{line} --max-new-tokens 900", tiny, db)
    timed(tmp_path, *asked)
    with RunLog.open(str(db)) as log:
        whole = detail(log, log.find().rows[0].id).text
    for _ in range(2):
        child = Child(tmp_path, command, *asked)
        enough = draw.uniform(0.0, 0.9) * len(whole)
        child.until(lambda child=child, enough=enough: len(child.text) > enough)  # type: ignore[misc]
        assert child.kill(), child.errors
        with RunLog.open(str(db)) as log:
            run = detail(log, log.find().rows[0].id)
            check_run(log, run, child.text.removesuffix("\n"), whole)


def test_a_killed_server_keeps_in_the_log_what_a_tab_was_shown(tmp_path: Path) -> None:
    """Of the second run; the first has the whole text."""
    target = save_tiny_llama(tmp_path / "tiny")
    db, draw, whole = tmp_path / "runs.db", random.Random(SEED), ""
    for number in range(2):
        child, url = begin_page(tmp_path / str(number), target, db)
        seen = Watcher()
        tab = threading.Thread(target=follow, args=(url, seen.take), kwargs=slow(delay_ms=5))
        tab.start()
        if not whole:
            tab.join()
        else:
            enough = draw.uniform(0.0, 0.9) * len(whole)
            child.until(lambda seen=seen, enough=enough: len(seen.shown) > enough)  # type: ignore[misc]
        assert child.kill(), child.errors
        tab.join()
        with RunLog.open(str(db)) as log:
            run = detail(log, seen.log_id)
            whole = whole or run.text
            check_run(log, run, seen.shown, whole)


def begin_page(
    folder: Path, target: Path, db: Path, page: Callable[..., None] = page
) -> tuple[Child, str]:
    """A page that answers."""
    port = free_port()
    child = Child(folder, page, target, db, port)
    url = f"http://127.0.0.1:{port}"

    def answers_now() -> bool:
        try:
            return httpx.get(f"{url}/gradio_api/startup-events", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    assert child.until(answers_now), child.errors
    return child, url


# ---- experiments and training


def answered(folder: Path) -> dict[Any, tuple[int, ...]]:
    """What a benchmark that is done has answered, each request once."""
    with RunLog.open(str(folder / "runs.db")) as log:
        (benchmark,) = log.benchmarks.list()
        assert benchmark.status == "completed"
        found = answers(log, benchmark.id)
        assert len(found) == log.find(RunQuery(status="completed")).total == 12
        return found


def swept(folder: Path) -> dict[Any, Any]:
    """Every point of a sweep that is done, how it ended, and what was answered there."""
    with RunLog.open(str(folder / "runs.db")) as log:
        (head,) = log.benchmarks.list(9, sweeps=True)
        assert head.status == "completed"
        sweep = read_sweep(log, head.id)
        return {
            trial.key: (
                trial.outcome,
                answers(log, sweep.benchmark.id, trial=trial.id),
            )
            for trial in sweep.trials
        }


def trained(folder: Path) -> dict[str, bytes]:
    """Weights and corpus, byte by byte."""
    assert not list(folder.rglob("partial-*"))
    files = [*folder.rglob("*.safetensors"), *folder.rglob("dialogues.jsonl")]
    assert len(files) > 1
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@dataclass(frozen=True)
class Action:
    """A long command, and what it leaves in a folder when it is done.

    Attributes:
        line: its words; {} stands for the target, and then for what it writes.
        written: a log or a drafter.
        num_kills: how often it is killed before it is left alone to end.
    """

    line: str
    written: str
    result: Callable[[Path], dict[Any, Any]]
    num_kills: int = 2

    def words(self, target: Path, folder: Path) -> Sequence[object]:
        """Begin it, or go on if the log has it already."""
        place = folder / self.written
        begun = place.suffix == ".db" and place.exists() and self._begun(place)
        return begun or words(self.line, target, place)

    def _begun(self, db: Path) -> Sequence[object]:
        name = self.line.split()[0]
        with RunLog.open(str(db)) as log:
            found = [head.id for head in log.benchmarks.list(sweeps=name == "sweep")]
        return (name, "--resume", found[0], "--db", db) if found else ()


ASKED = "--suite starter --categories chat --max-new-tokens 16 --ignore-eos --target {} --db {}"
ACTIONS = {
    "bench": Action(
        f"bench --dtype float32 --methods ngram --repeats 2 {ASKED}", "runs.db", answered
    ),
    "sweep": Action(
        f"sweep --dtype float32 --grid --method ngram --vary max_draft_len=1:3 {ASKED}",
        "runs.db",
        swept,
        num_kills=1,
    ),
    "train": Action(
        "train --dtype float32 --method medusa --rows 4 --tokens 1500 --set pack_tokens=256 "
        "--set epochs=3 --target {} --output {}",
        "drafter",
        trained,
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_is_killed_goes_on_and_ends_as_without_the_kills(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    action, draw, folder = ACTIONS[name], random.Random(SEED), tmp_path / "killed"
    seconds = timed(tmp_path, *action.words(tiny, tmp_path / "whole"))
    for _ in range(action.num_kills):
        killed(tmp_path, draw, seconds, partial(action.words, tiny, folder))
        check_marks(folder / "runs.db")
    timed(tmp_path, *action.words(tiny, folder))
    assert action.result(folder) == action.result(tmp_path / "whole")


# ---- ends that are asked for


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_generate_as_a_cancelled_run_with_what_was_shown(
    number: int, tiny: Path, tmp_path: Path
) -> None:
    db = tmp_path / "runs.db"
    asked = ("generate", "hello", "--target", tiny, "--dtype", "float32", "--db", db)
    child = Child(tmp_path, command, *asked, "--ignore-eos", "--max-new-tokens", "1900")
    assert child.until(lambda: len(child.text) > 20), child.errors
    child.interrupt(number=number)
    assert child.ended() == INTERRUPTED and "Traceback" not in child.errors
    with RunLog.open(str(db)) as log:
        (row,) = log.find().rows
        run = detail(log, row.id)
        assert (run.status, run.finish_reason, run.error) == ("cancelled", "cancelled", None)
        assert run.text == child.text.removesuffix("\n")
        assert run.text.startswith(streamed(log, run))
    assert "(cancelled)" in child.errors, "the figures of what there was"


def test_ctrl_c_in_a_sweep_leaves_it_stopped_and_its_trial_to_be_tried_again(
    tiny: Path, tmp_path: Path
) -> None:
    db = tmp_path / "runs.db"
    line = (
        "sweep --target {} --dtype float32 --db {} --method ngram --grid --vary max_draft_len=1:9"
    )
    asked = words(f"{line} --suite starter --ignore-eos --max-new-tokens 400 --name s", tiny, db)
    child = Child(tmp_path, command, *asked)
    assert child.until(lambda: len(ids_of(db, "completed")) >= 1), child.errors
    child.interrupt()
    assert child.ended() == INTERRUPTED, child.errors
    with RunLog.open(str(db)) as log:
        (sweep,) = log.benchmarks.list(sweeps=True)
        assert sweep.status == "cancelled"
        assert f"--resume {sweep.id}" in child.errors and "Traceback" not in child.errors
        assert {row.status for row in log.find().rows} <= {"completed", "cancelled"}


def test_ctrl_c_ends_a_page_that_streams_to_an_open_tab(tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    child, url = begin_page(tmp_path, save_tiny_llama(tmp_path / "tiny"), db)
    seen = Watcher()
    tab = threading.Thread(target=follow, args=(url, seen.take), kwargs=slow(delay_ms=500))
    tab.start()
    assert child.until(lambda: len(seen.shown) > 5), child.errors
    assert child.interrupt() < SOON_S
    tab.join()
    assert child.ended() == 0 and "Traceback" not in child.errors, child.errors
    with RunLog.open(str(db)) as log:
        run = detail(log, seen.log_id)
        assert run.status == "cancelled" and run.text.startswith(seen.shown)


def test_ctrl_c_ends_a_page_whose_experiment_waits_for_its_target(tmp_path: Path) -> None:
    db, target = tmp_path / "runs.db", save_tiny_llama(tmp_path / "tiny")
    child, url = begin_page(tmp_path, target, db, page_that_loads_forever)
    with RunLog.open(str(db)) as log:
        body = {"data": held()[:-1], "session_hash": "tab"}  # without the tab
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
            assert client.post("/gradio_api/call/find", json=body).status_code == 200
        until(log.benchmarks.list)
        time.sleep(0.5)  # its target is being loaded
        try:
            assert child.interrupt(SOON_S) < SOON_S
        finally:
            child.kill()
        assert [head.status for head in log.benchmarks.list()] == ["cancelled"]
    assert "Traceback" not in child.errors, child.errors


@contextmanager
def serving_app(
    folder: Path, program: Sequence[object] = (sys.executable, APP)
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The program as people start it, with all its files in a folder; and its URL."""
    port = free_port()
    line = f"serve --no-token --port {port} --db {folder}/runs.db --cache-dir {folder}/.cache"
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    url = f"http://127.0.0.1:{port}"
    command = [*map(str, program), *line.split()]
    with subprocess.Popen(command, cwd=folder, env=environment) as process:

        def answers() -> bool:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                return httpx.get(url, timeout=30).status_code == 200
            return False

        try:
            until(answers)
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_uploads_are_deleted_with_the_server_or_by_the_next_one(
    number: int, tmp_path: Path
) -> None:
    def uploads() -> list[Path]:
        return list(tmp_path.rglob("mine.txt"))

    with serving_app(tmp_path) as (process, url):
        files = {"files": ("mine.txt", b"mine")}
        assert httpx.post(f"{url}/gradio_api/upload", files=files).status_code == 200
        (upload,) = uploads()
        assert httpx.get(f"{url}/gradio_api/file={upload}").content == b"mine"
        process.send_signal(number)
        code = process.wait(SOON_S)
    if number == signal.SIGKILL:
        with serving_app(tmp_path):
            assert not uploads()
    else:
        assert code == 0 and not uploads()
