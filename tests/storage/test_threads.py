"""Threads that share one log: none loses what another wrote, none trips over another's state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery, StorageError
from storage.records import OutOfReachError
from tests.storage.conftest import finish, finished_run, new_run

NUM_THREADS = 8


def at_once(work: Callable[[], object], num_threads: int = NUM_THREADS) -> list[BaseException]:
    """What went wrong in threads that all do this."""
    faults: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def guarded() -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


def begin_and_finish(log: RunLog) -> None:
    run_id = log.begin(new_run())
    log.finish(
        run_id, status="completed", output_ids=[5], text="a", finish_reason="length", metrics={}
    )


def check_all_completed(log: RunLog, num_runs: int) -> None:
    assert log.count(RunQuery(status="completed")) == log.count(RunQuery()) == num_runs
    assert not log._open, "the log holds nothing as unfinished"


def test_threads_begin_and_finish_without_losing_a_run(log: RunLog) -> None:
    each = 15
    assert at_once(lambda: [begin_and_finish(log) for _ in range(each)]) == []
    check_all_completed(log, NUM_THREADS * each)


@pytest.mark.slow
def test_threads_begin_and_finish_for_a_minute_without_losing_a_run(path: str) -> None:
    log, ends, done = RunLog.open(path), time.monotonic() + 60, list[int]()

    def work() -> None:
        while time.monotonic() < ends:
            begin_and_finish(log)
            done.append(1)

    assert at_once(work) == []
    check_all_completed(log, len(done))
    print(f"{len(done)} runs, no failure")
    log.close()


def test_threads_begin_and_finish_benchmarks_while_all_open_ones_are_interrupted(path: str) -> None:
    log = RunLog.open(path)

    def work() -> None:
        for _ in range(10):
            benchmark_id = log.benchmarks.begin("b", {})
            with log._database.transaction() as connection:  # as closing the log does
                log.benchmarks.open_rows.interrupt(connection)
            log.benchmarks.finish(benchmark_id, "completed", {})

    assert at_once(work) == []
    assert {one.status for one in log.benchmarks.list(100)} == {"completed"}
    log.close()


def fail(log: RunLog, times: int, error: Exception, *, reading: bool = False) -> None:
    """The next transactions that write, or read, end with this error."""
    left = [times]

    def lose(connection: sa.Connection) -> None:
        if left[0] and bool(connection.get_execution_options().get("reading")) == reading:
            left[0] -= 1
            raise error

    sa.event.listen(log._database.engine, "begin", lose)


def test_a_run_whose_end_could_not_be_written_is_interrupted_with_the_next_that_begins(
    path: str,
) -> None:
    log = RunLog.open(path)
    lost, other = log.begin(new_run()), log.begin(new_run())
    fail(log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        finish(log, lost, status="failed", error="It broke.")
    fail(log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        log.begin(new_run())
    log.begin(new_run())
    run, running = log.get(lost), log.get(other)
    assert run is not None and (run.status, run.error) == ("interrupted", "It broke.")
    assert running is not None and running.status == "running"
    log.close()


def test_a_benchmark_whose_end_could_not_be_written_is_interrupted_with_the_next(path: str) -> None:
    log = RunLog.open(path)
    lost = log.benchmarks.begin("lost", {})
    fail(log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        log.benchmarks.finish(lost, "completed", {})
    log.benchmarks.begin("next", {})
    benchmark = log.benchmarks.get(lost)
    assert benchmark is not None and benchmark.status == "interrupted"
    log.close()


def test_threads_that_lose_the_server_at_once_all_wait_for_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.RETRY_S", 0.0)
    log = RunLog.open(path)
    fail(log, 400, OutOfReachError("the server is away"))
    assert at_once(lambda: [begin_and_finish(log) for _ in range(5)]) == []
    check_all_completed(log, NUM_THREADS * 5)
    assert not log.out_of_reach
    log.close()


def test_reading_waits_for_the_server_where_it_is_asked_to(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.RETRY_S", 0.0)
    log = RunLog.open(path)
    run_id = finished_run(log)
    fail(log, 3, OutOfReachError("the server is away"), reading=True)
    with pytest.raises(OutOfReachError):
        log.get(run_id)
    run = log.wait_for(lambda: log.get(run_id))
    assert run is not None and run.id == run_id and not log.out_of_reach
    log.close()


def test_an_artifact_waits_for_the_server_as_runs_do(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.RETRY_S", 0.0)
    log = RunLog.open(path)
    fail(log, 2, OutOfReachError("the server is away"))
    kept = log.artifacts.put("audit", {"own": "a"}, meta={}, payload=b"x")
    assert log.artifacts.payload(kept) == b"x"
    log.close()


def test_details_come_in_the_order_asked_for_a_page_at_a_time(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.query.DETAILS_PAGE", 2)
    ids = [finished_run(log, tags=(str(i),)) for i in range(5)]
    asked = [ids[4], "nothing", *ids[:4]]
    assert [run.id for run in log.details(asked)] == [ids[4], *ids[:4]]
    assert list(log.details(ids)) == [log.get(run_id) for run_id in ids]
