"""Several threads and processes on one log; ends that nobody announced."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from storage import RunLog, StorageError
from storage.schema import tags
from tests.storage.conftest import (
    detail,
    errors_at_once,
    finished_run,
    new_run,
    other_process,
    started,
    step,
)


@pytest.mark.parametrize("url", [None, "sqlite:///:memory:", "file"])
@pytest.mark.slow
def test_threads_that_write_at_once_lose_nothing(url: str | None, path: str) -> None:
    log = RunLog.open(path if url == "file" else url)
    ids = [log.begin(new_run()) for _ in range(4)]

    def write(index: int) -> None:
        for i in range(100):
            log.add_steps(ids[index], [step(i)])
            assert len(log.steps(ids[index])) == i + 1 and log.find().total == 4

    assert errors_at_once(write, 4) == []
    assert [len(log.steps(run_id)) for run_id in ids] == [100] * 4
    log.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def nothing(request: pytest.FixtureRequest, path: str) -> Iterator[str]:
    """Where no database is yet, or one without any table."""
    if request.param == "sqlite":
        yield path
        return
    with request.getfixturevalue("postgres").database() as url:
        yield url


@pytest.mark.slow
def test_processes_that_create_the_log_at_once_all_open_it(nothing: str) -> None:
    at_once = f"time.sleep(max(0, {time.time() + 3} - time.time()))"
    lines = (at_once, f"with RunLog.open({nothing!r}) as log: log.find()")
    processes = [started(*lines) for _ in range(3)]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said


def test_threads_that_open_different_files_at_once_all_succeed(tmp_path: Path) -> None:
    def work(index: int) -> None:
        RunLog.open(str(tmp_path / f"{index}.sqlite3")).close()

    assert errors_at_once(work, 6) == []


def test_creation_cut_off_half_way_leaves_nothing_behind(path: str) -> None:
    def cut_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    sa.event.listen(tags, "before_create", cut_off)
    try:
        with pytest.raises(KeyboardInterrupt):
            RunLog.open(path)
    finally:
        sa.event.remove(tags, "before_create", cut_off)
    with RunLog.open(path) as log:
        assert log.find().total == 0


def test_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "bookmarks.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    with pytest.raises(StorageError, match="another program"):
        RunLog.open(str(file))
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    connection.close()
    assert tables == ["bookmarks"]


@pytest.mark.parametrize("reaped", [True, False])
def test_killed_process_leaves_an_interrupted_run_with_its_steps(url: str, reaped: bool) -> None:
    lines = (
        "run_id = log.begin(new_run())",
        "log.add_prefill(run_id, token_id=5, text='a', num_prompt_tokens=3, ttft_s=0.1)",
        "log.add_steps(run_id, [step(0), step(1)], {'mat': 2.0})",
        "print(run_id, flush=True)",
    )
    with other_process(url, *lines) as (process, run_id):
        with RunLog.open(url) as alive:
            assert detail(alive, run_id).status == "running", "its process lives"
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with RunLog.open(url) as log:
            run = detail(log, run_id)
            assert (
                run.status == "interrupted"
                and run.text == "abdbd"
                and run.output_ids == (5, 6, 9, 6, 9)
            )
            assert len(log.steps(run_id)) == 2 and run.mat == 2.0


def test_closing_the_log_interrupts_the_runs_it_began(url: str) -> None:
    first, second = RunLog.open(url), RunLog.open(url)
    mine, done, theirs = first.begin(new_run()), finished_run(first), second.begin(new_run())
    first.close()
    found = {row.id: row.status for row in second.find().rows}
    second.close()
    assert found == {mine: "interrupted", done: "completed", theirs: "running"}


def test_a_log_that_is_removed_while_open_says_so_and_one_put_back_goes_on(path: str) -> None:
    log = RunLog.open(path)
    run_id = finished_run(log)
    aside = Path(path).rename(f"{path}.aside")
    for work in (lambda: log.begin(new_run()), lambda: log.add_steps(run_id, [step(2)]), log.find):
        with pytest.raises(StorageError, match="was removed or replaced while it was open"):
            work()
    RunLog.open(f"{path}.new").close()
    Path(f"{path}.new").rename(path)
    with pytest.raises(StorageError, match="removed or replaced"):
        log.begin(new_run())
    aside.rename(path)
    log.add_steps(run_id, [step(2)])
    assert len(log.steps(run_id)) == 3
    log.close()
