"""Ends that are asked for: Ctrl+C in every action is quick, and leaves nothing half marked."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from storage import RunLog
from tests.faults.children import Child, command, words
from tests.faults.runs import Watcher, follow, ids_of, slow, streamed
from tests.faults.test_kills import begin_page
from tests.playground.tiny import save_tiny_llama
from tests.storage.conftest import detail

pytestmark = pytest.mark.slow  # whole programs, started and ended

SOON_S = 5.0
"""On a machine that has other things to do; with a core of its own it takes half a second."""
INTERRUPTED = 130


def test_ctrl_c_in_generate_is_a_cancelled_run_with_what_was_shown(
    tiny: Path, tmp_path: Path
) -> None:
    db = tmp_path / "runs.db"
    asked = ("generate", "hello", "--target", tiny, "--dtype", "float32", "--db", db)
    child = Child(tmp_path, command, *asked, "--ignore-eos", "--max-new-tokens", "1900")
    assert child.until(lambda: len(child.text) > 20), child.errors
    child.interrupt()
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
    assert "--resume s" in child.errors and "Traceback" not in child.errors
    with RunLog.open(str(db)) as log:
        assert [sweep.status for sweep in log.benchmarks.list(sweeps=True)] == ["cancelled"]
        assert {row.status for row in log.find().rows} <= {"completed", "cancelled"}


def test_ctrl_c_ends_a_page_that_streams_to_an_open_tab(tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    child, url = begin_page(tmp_path, save_tiny_llama(tmp_path / "tiny"), db)
    seen = Watcher()
    tab = threading.Thread(target=follow, args=(url, seen.take), kwargs=slow(delay_ms=50))
    tab.start()
    assert child.until(lambda: len(seen.shown) > 5), child.errors
    assert child.interrupt() < SOON_S
    tab.join()
    assert child.ended() == 0 and "Traceback" not in child.errors, child.errors
    with RunLog.open(str(db)) as log:
        run = detail(log, seen.log_id)
        assert run.status == "cancelled" and run.text.startswith(seen.shown)


def test_two_pages_and_a_command_line_share_a_log_and_a_kill_hurts_only_its_own(
    tiny: Path, tmp_path: Path
) -> None:
    db, target = tmp_path / "runs.db", save_tiny_llama(tmp_path / "tiny")
    pages = [begin_page(tmp_path / str(number), target, db) for number in range(2)]
    seen = [Watcher(), Watcher()]
    tabs = [
        threading.Thread(target=follow, args=(url, watcher.take), kwargs=slow(delay_ms=20))
        for (_, url), watcher in zip(pages, seen, strict=True)
    ]
    for tab in tabs:
        tab.start()
    for (child, _), watcher in zip(pages, seen, strict=True):
        assert child.until(lambda watcher=watcher: bool(watcher.shown)), child.errors  # type: ignore[misc]
    asked = ("generate", "hello", "--target", tiny, "--dtype", "float32", "--db", db, "--json")
    third = Child(tmp_path / "third", command, *asked, "--ignore-eos", "--max-new-tokens", "300")
    pages[0][0].kill()
    assert third.ended() == 0, third.errors
    for tab in tabs:
        tab.join()
    pages[1][0].interrupt()
    with RunLog.open(str(db)) as log:
        ids = [*(watcher.log_id for watcher in seen), json.loads(third.text)["run_id"]]
        found = [detail(log, run_id) for run_id in ids]
        assert [run.status for run in found] == ["interrupted", "completed", "completed"]
        for run, watcher in zip(found, seen, strict=False):
            assert streamed(log, run).startswith(watcher.shown)
        assert log.find().total == 3


def test_a_page_that_is_loading_ends_soon(tmp_path: Path) -> None:
    """A load cannot be stopped: it is not waited for."""
    child, url = begin_page(tmp_path, save_tiny_llama(tmp_path / "tiny"), tmp_path / "runs.db")
    tab = threading.Thread(target=follow, args=(url, lambda message: None), kwargs=slow(delay_ms=0))
    tab.start()
    time.sleep(0.05)
    assert child.interrupt() < SOON_S
    tab.join()
    assert child.ended() == 0, child.errors
