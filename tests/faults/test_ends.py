"""Ends that are asked for: Ctrl+C in every action is quick, and leaves nothing half marked."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from storage import RunLog
from tests.faults.children import Child, command, words
from tests.faults.runs import Watcher, follow, opened, streamed
from tests.faults.test_kills import begin_page, statuses
from tests.playground.tiny import save_tiny_llama

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
    with opened(db) as log:
        (row,) = log.find().rows
        run = log.get(row.id)
        assert run is not None and run.error is None
        assert (run.status, run.finish_reason) == ("cancelled", "cancelled")
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
    assert child.until(lambda: _num_completed(db) >= 1), child.errors
    child.interrupt()
    assert child.ended() == INTERRUPTED, child.errors
    assert "--resume s" in child.errors and "Traceback" not in child.errors
    with opened(db) as log:
        assert statuses(log) == ["cancelled"]
        assert {row.status for row in log.find().rows} <= {"completed", "cancelled"}


def _num_completed(db: Path) -> int:
    if not db.exists():
        return 0
    with RunLog.open(str(db)) as log:
        return sum(row.status == "completed" for row in log.find().rows)


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
    with opened(db) as log:
        run = log.get(seen.log_id or "")
        assert run is not None and run.status == "cancelled"
        assert run.text.startswith(seen.shown)


def slow(*, delay_ms: int) -> dict[str, Any]:
    """A long run of the page with a pause in every step."""
    limits = {"limits": {"max_new_tokens": "400", "ignore_eos": True}}
    form = {"values": {"method": {"delay_ms": str(delay_ms)}}}
    return {"form": form, "run_form": {"values": limits}}


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
    with opened(db) as log:
        found = [log.get(watcher.log_id or "") for watcher in seen]
        found.append(log.get(json.loads(third.text)["run_id"]))
        assert all(run is not None for run in found)
        assert [run.status for run in found if run] == ["interrupted", "completed", "completed"]
        for run, watcher in zip(found, seen, strict=False):
            assert run is not None and streamed(log, run).startswith(watcher.shown)
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
