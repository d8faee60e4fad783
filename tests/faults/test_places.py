"""Places that fail: a full disk, a read-only log, one that is removed; and clocks that jump."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from playground.host import recording
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from storage import RunLog, RunQuery, schema
from tests.engine.cpu.tiny_gguf import write_gguf
from tests.faults.children import Child, command, command_with_room, words
from tests.faults.runs import check_run
from tests.playground.asks import finished, start, until
from tests.playground.conftest import catalog as catalog
from tests.playground.conftest import host as host
from tests.playground.conftest import log as log
from tests.playground.conftest import tiny_folder as tiny_folder
from tests.playground.tiny import tiny_catalog
from tests.postgres import Server
from tests.storage.conftest import detail
from tests.storage.conftest import mortal as mortal
from tests.storage.conftest import own as own

pytestmark = pytest.mark.slow  # whole programs, started and ended

KIB = 1 << 10


def one_sentence(child: Child) -> str:
    """What a refused command says."""
    assert child.ended() == 2, child.errors
    said = [line for line in child.errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "Traceback" not in child.errors, child.errors
    return said[0]


def streaming(host: EngineHost, *, delay_ms: int, max_new_tokens: int) -> LiveRun:
    """A run that has made a few steps."""
    settings, limits = {"delay_ms": str(delay_ms)}, {"max_new_tokens": str(max_new_tokens)}
    run = start(host, settings=settings, limits=limits)
    until(lambda: len(run.rows) >= 3 or run.over.is_set())
    assert not run.over.is_set(), run.error
    return run


@pytest.mark.parametrize("room_kib", [8, 240])
def test_a_disk_that_is_full_ends_a_run_and_keeps_what_was_shown(
    room_kib: int, tiny: Path, tmp_path: Path
) -> None:
    db = tmp_path / "runs.db"
    line = "generate hello --target {} --dtype float32 --db {} --ignore-eos --max-new-tokens 1500"
    asked = words(line, tiny, db)
    child = Child(tmp_path, command_with_room, room_kib * KIB, *asked)
    assert str(db) in one_sentence(child)
    with RunLog.open(str(db)) as log:
        for run in log.details(log.ids(RunQuery())):
            check_run(log, run, child.text.removesuffix("\n"))


def test_a_disk_that_is_full_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    asked = ("generate", "hello", "--target", model, "--dtype", "float32", "--no-save")
    child = Child(tmp_path, command_with_room, 2 * KIB, *asked, "--max-new-tokens", "4")
    said = one_sentence(child)
    assert "could not be loaded" not in said and "cannot be written" in said
    assert "/gguf/" in said and "File too large" in said


@pytest.mark.parametrize("room_kib", [2, 40])
def test_a_disk_that_is_full_ends_a_training_with_a_sentence(
    room_kib: int, tiny: Path, tmp_path: Path
) -> None:
    asked = words(
        "train --target {} --dtype float32 --method medusa --tokens 1500 --rows 4 --set epochs=1 "
        "--output {}",
        *(tiny, tmp_path / "out" / "drafter"),
    )
    child = Child(tmp_path, command_with_room, room_kib * KIB, *asked)
    said = one_sentence(child)
    assert "cannot be written" in said and str(tmp_path / "out") in said
    child = Child(tmp_path, command, *asked)
    assert child.ended() == 0, child.errors


@pytest.mark.parametrize(
    "place", ["/proc/no/runs.db", "/dev/null/runs.db", "sqlite:///file:{}?mode=ro&uri=true"]
)
def test_a_log_that_cannot_be_written_is_one_sentence(
    place: str, tiny: Path, tmp_path: Path
) -> None:
    RunLog.open(str(tmp_path / "there.db")).close()
    asked = ("generate", "hi", "--target", tiny, "--max-new-tokens", "4")
    child = Child(tmp_path, command, *asked, "--db", place.format(tmp_path / "there.db"))
    one_sentence(child)


@pytest.mark.parametrize("room", [5000, 3])
def test_a_run_goes_on_while_the_logs_server_is_away(
    own: Server,
    mortal: str,
    tiny_folder: Path,
    tmp_path: Path,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED", room)
    log = RunLog.open(mortal)
    host = EngineHost(log, tiny_catalog(tiny_folder), cache_dir=tmp_path / "cache", device="cpu")
    run = streaming(host, delay_ms=20, max_new_tokens=200)
    own.stop()
    until(lambda: run.over.is_set() or log.out_of_reach)
    if room == 5000:
        until(lambda: run.over.is_set() or run.activity.startswith("waiting for"))
    assert not run.over.is_set(), run.error
    shown = len(run.rows)
    time.sleep(1)
    assert len(run.rows) == shown, "nothing is shown that is not kept"
    own.start()
    finished(run)
    stored = detail(log, run.log_id)
    assert len(log.steps(stored.id)) == stored.num_steps == len(run.rows)
    if room == 3:
        assert stored.status == "failed" and "unreachable for 3 steps" in (stored.error or "")
    else:
        assert stored.status == "completed" and len(stored.output_ids) == 200
    host.close()
    log.close()


def test_clocks_that_jump_change_no_run_and_no_status(
    host: EngineHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter((3650, -3650, 1, -1, 40, -400) * 100)

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=next(jumps))

    calm = finished(start(host))
    monkeypatch.setattr(schema, "datetime", Jumping)
    run = streaming(host, delay_ms=10, max_new_tokens=24)
    with RunLog.open(str(tmp_path / "runs.db")) as other:
        assert detail(other, run.log_id).status == "running"
    assert finished(run).state == "completed"
    assert run.finish == calm.finish
    assert run.metrics is not None and 0 < (run.metrics.tok_s or 0) < 1e5
    created_at = detail(host.log, run.log_id).created_at
    assert abs(created_at - datetime.now(UTC)) < timedelta(days=4000)
