"""Threads that share one log: none loses what another wrote, none trips over another's state."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery, StorageError
from storage.records import OutOfReachError
from tests.storage.conftest import (
    begun_benchmark,
    detail,
    errors_at_once,
    finish,
    finished_run,
    new_run,
)

NUM_THREADS = 8


def begin_and_finish(log: RunLog, times: int) -> None:
    for _ in range(times):
        finish(log, log.begin(new_run()), output_ids=[5], text="a", finish_reason="length")


def check_all_completed(log: RunLog, num_runs: int) -> None:
    assert log.count(RunQuery(status="completed")) == log.count(RunQuery()) == num_runs
    assert not log._open, "the log holds nothing as unfinished"


def test_threads_begin_and_finish_without_losing_a_run(log: RunLog) -> None:
    each = 15
    assert errors_at_once(lambda _: begin_and_finish(log, each)) == []
    check_all_completed(log, NUM_THREADS * each)


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


def fail(log: RunLog, times: int, error: Exception, *, reading: bool = False) -> None:
    """The next transactions that write, or read, end with this error."""
    left = [times]

    def lose(connection: sa.Connection) -> None:
        if left[0] and bool(connection.get_execution_options().get("reading")) == reading:
            left[0] -= 1
            raise error

    sa.event.listen(log._database.engine, "begin", lose)


def test_a_run_whose_end_could_not_be_written_is_interrupted_with_the_next_that_begins(
    file_log: RunLog,
) -> None:
    lost, other = file_log.begin(new_run()), file_log.begin(new_run())
    fail(file_log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        finish(file_log, lost, status="failed", error="It broke.")
    fail(file_log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        file_log.begin(new_run())
    file_log.begin(new_run())
    run = detail(file_log, lost)
    assert (run.status, run.error) == ("interrupted", "It broke.")
    assert detail(file_log, other).status == "running"


def test_a_benchmark_whose_end_could_not_be_written_is_interrupted_with_the_next(
    file_log: RunLog,
) -> None:
    lost = begun_benchmark(file_log, "lost")
    fail(file_log, 1, StorageError("the disk is full"))
    with pytest.raises(StorageError, match="full"):
        file_log.benchmarks.finish(lost, "completed", {})
    begun_benchmark(file_log, "next")
    benchmark = file_log.benchmarks.get(lost)
    assert benchmark is not None and benchmark.status == "interrupted"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost server is tried again at once."""
    monkeypatch.setattr("storage.database.RETRY_S", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_threads_that_lose_the_server_at_once_all_wait_for_it(file_log: RunLog) -> None:
    fail(file_log, 400, OutOfReachError("the server is away"))
    assert errors_at_once(lambda _: begin_and_finish(file_log, 5)) == []
    check_all_completed(file_log, NUM_THREADS * 5)
    assert not file_log.out_of_reach


@pytest.mark.usefixtures("no_pause")
def test_reading_waits_for_the_server_where_it_is_asked_to(file_log: RunLog) -> None:
    run_id = finished_run(file_log)
    fail(file_log, 3, OutOfReachError("the server is away"), reading=True)
    with pytest.raises(OutOfReachError):
        file_log.get(run_id)
    assert file_log.wait_for(lambda: detail(file_log, run_id)).id == run_id
    assert not file_log.out_of_reach


@pytest.mark.usefixtures("no_pause")
def test_an_artifact_waits_for_the_server_as_runs_do(file_log: RunLog) -> None:
    fail(file_log, 2, OutOfReachError("the server is away"))
    kept = file_log.artifacts.put("audit", {"own": "a"}, meta={}, payload=b"x")
    assert file_log.artifacts.payload(kept) == b"x"


def test_details_come_in_the_order_asked_for_a_page_at_a_time(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.query.DETAILS_PAGE", 2)
    ids = [finished_run(log, tags=(str(i),)) for i in range(5)]
    asked = [ids[4], "nothing", *ids[:4]]
    assert [run.id for run in log.details(asked)] == [ids[4], *ids[:4]]
    assert list(log.details(ids)) == [log.get(run_id) for run_id in ids]
