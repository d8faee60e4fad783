"""Several threads and processes on one log; ends that nobody announced; servers that go away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery, StorageError, database
from storage.records import OutOfReachError
from storage.schema import tags
from tests.storage.conftest import (
    NUM_THREADS,
    begun_benchmark,
    detail,
    errors_at_once,
    finish,
    finished_run,
    new_run,
    other_process,
    started,
    step,
)


def begin_and_finish(log: RunLog, times: int) -> None:
    """Runs of this thread among those of others."""
    for number in range(times):
        run_id = log.begin(new_run())
        log.add_steps(run_id, [step(0)])
        finish(log, run_id, output_ids=[5], text="a", finish_reason="length")
        assert len(log.steps(run_id)) == 1 and log.find().total > number


def write_at_once(log: RunLog, each: int) -> None:
    """No thread loses what another wrote, and none trips over another's state."""
    assert errors_at_once(lambda _: begin_and_finish(log, each)) == []
    for query in (RunQuery(status="completed"), RunQuery()):
        assert log.find(query).total == NUM_THREADS * each
    assert not log._open.ids, "the log holds nothing as unfinished"


def test_threads_begin_and_finish_without_losing_a_run(log: RunLog) -> None:
    write_at_once(log, 15)


@pytest.mark.parametrize("place", [None, "sqlite:///:memory:"])
def test_threads_share_a_log_in_memory(place: str | None) -> None:
    with RunLog.open(place) as log:
        write_at_once(log, 15)


def test_threads_begin_and_finish_benchmarks_while_all_open_ones_are_interrupted(
    file_log: RunLog,
) -> None:
    def work(_: int) -> None:
        for _ in range(10):
            benchmark_id = begun_benchmark(file_log)
            with file_log._database.transaction() as connection:  # as closing the log does
                file_log.benchmarks.open_rows.interrupt(connection)
            file_log.benchmarks.finish(benchmark_id, "completed", {})

    assert errors_at_once(work) == []
    assert {one.status for one in file_log.benchmarks.list(100)} == {"completed"}


def test_threads_that_open_different_files_at_once_all_succeed(tmp_path: Path) -> None:
    def work(index: int) -> None:
        RunLog.open(str(tmp_path / f"{index}.sqlite3")).close()

    assert errors_at_once(work) == []


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


# ---- ends that nobody announced


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


@pytest.mark.parametrize("room", [5000, 20_000, 45_000])
def test_a_disk_that_is_full_at_the_first_start_is_named(path: str, room: int) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))"
    _, said = started(limit, f"RunLog.open({path!r})").communicate()
    assert path in said and "Make room, or give another --db." in said, said
    assert "disk I/O error. Check" not in said


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
            assert (run.status, run.text) == ("interrupted", "abdbd")
            assert run.output_ids == (5, 6, 9, 6, 9)
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


# ---- servers that go away


class Failure:
    """Ends the next transactions that write, or read, with an error; `left` counts them."""

    def __init__(self, log: RunLog, times: int, error: Exception, *, reading: bool = False) -> None:
        self.left, self._error, self._reading = times, error, reading
        sa.event.listen(log._database.engine, "begin", self._begin)

    def _begin(self, connection: sa.Connection) -> None:
        reading = bool(connection.get_execution_options().get("reading"))
        if self.left and reading == self._reading:
            self.left -= 1
            raise self._error


AWAY = OutOfReachError("the server is away")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost server is tried again at once."""
    monkeypatch.setattr(database, "RETRY_S", 0.0)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [StorageError("the disk is full"), AWAY], ids=str)
def test_an_end_that_could_not_be_written_is_marked_with_the_next_that_begins(
    file_log: RunLog, error: StorageError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.0)
    lost, other = file_log.begin(new_run()), file_log.begin(new_run())
    benchmark_id = begun_benchmark(file_log)
    failure, tried = Failure(file_log, 10**6, error), []
    for write in (
        lambda: finish(file_log, lost, status="failed", error="It broke."),
        lambda: file_log.benchmarks.finish(benchmark_id, "completed", {}),
        lambda: file_log.begin(new_run()),
    ):
        with pytest.raises(type(error), match=str(error)):
            write()
        tried.append(failure.left)
    assert tried[0] - tried[2] == 2, "a server is waited for once, not for every write"
    failure.left = 0
    begun_benchmark(file_log)
    file_log.begin(new_run())
    run, benchmark = detail(file_log, lost), file_log.benchmarks.get(benchmark_id)
    assert (run.status, run.error) == ("interrupted", "It broke.")
    assert benchmark is not None and benchmark.status == "interrupted"
    assert detail(file_log, other).status == "running"


@pytest.mark.usefixtures("no_pause")
def test_threads_that_lose_the_server_at_once_all_wait_for_it(file_log: RunLog) -> None:
    Failure(file_log, 400, AWAY)
    write_at_once(file_log, 5)
    assert not file_log.out_of_reach


@pytest.mark.usefixtures("no_pause")
def test_artifacts_wait_for_the_server_and_so_does_reading_where_it_is_asked_to(
    file_log: RunLog,
) -> None:
    Failure(file_log, 2, AWAY)
    kept = file_log.artifacts.put("audit", {"own": "a"}, meta={}, payload=b"x")
    assert file_log.artifacts.payload(kept) == b"x"
    Failure(file_log, 3, AWAY, reading=True)
    with pytest.raises(OutOfReachError):
        file_log.artifacts.payload(kept)
    assert file_log.wait_for(lambda: file_log.artifacts.payload(kept)) == b"x"
    assert not file_log.out_of_reach
