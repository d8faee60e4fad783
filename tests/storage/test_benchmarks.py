"""Benchmarks: begun, finished, left behind by a dead process, and resumed."""

from __future__ import annotations

import pytest

from storage import RunLog, StorageError
from tests.storage.conftest import begun_benchmark, new_run, other_process

PLAN = {"suite": "starter", "repeats": 3}


def test_a_benchmark_round_trips(log: RunLog) -> None:
    benchmark_id = begun_benchmark(log, "näme", PLAN)
    running = log.benchmarks.get(benchmark_id)
    assert running is not None and running.status == "running" and running.finished_at is None
    log.benchmarks.finish(benchmark_id, "completed", {"speedup": float("inf")})
    done = log.benchmarks.get(benchmark_id)
    assert done is not None and (done.name, done.plan, done.status) == ("näme", PLAN, "completed")
    assert done.summary == {"speedup": float("inf")}
    assert done.finished_at is not None and done.finished_at >= done.created_at
    newer = begun_benchmark(log)
    assert [b.id for b in log.benchmarks.list()] == [newer, benchmark_id]
    assert [b.id for b in log.benchmarks.list(1)] == [newer]


@pytest.mark.parametrize("labels", [{"": "x"}, {"k" * 65: "x"}, {"k": "x" * 501}, {"k": 1}])
def test_labels_that_no_index_can_hold_are_refused(log: RunLog, labels: dict[str, str]) -> None:
    with pytest.raises(StorageError, match="must be text of"):
        log.begin(new_run(labels=labels))
    assert log.find().total == 0


def test_a_benchmark_of_a_dead_process_is_interrupted_and_resumes(url: str) -> None:
    script = "log.benchmarks.begin('x', 'b', {'n': 1}); print('x', flush=True)"
    with other_process(url, script) as (_, benchmark_id):
        pass
    log = RunLog.open(url)
    left = log.benchmarks.get(benchmark_id)
    assert left is not None and left.status == "interrupted"
    assert log.benchmarks.resume(benchmark_id).status == "running"
    other = RunLog.open(url)
    seen = other.benchmarks.get(benchmark_id)
    assert seen is not None and seen.status == "running", "its process lives"
    log.close()
    closed = other.benchmarks.get(benchmark_id)
    assert closed is not None and closed.status == "interrupted"
    other.close()


def test_a_benchmark_that_another_process_runs_is_not_taken_over(url: str) -> None:
    script = "log.benchmarks.begin('x', 'b', {}); print('x', flush=True)"
    with other_process(url, script) as (_, benchmark_id), RunLog.open(url) as log:
        with pytest.raises(StorageError, match="running in another process"):
            log.benchmarks.resume(benchmark_id)


def test_unknown_benchmarks_are_named(log: RunLog) -> None:
    assert log.benchmarks.get("nope") is None
    with pytest.raises(StorageError, match="nope"):
        log.benchmarks.resume("nope")
