"""Benchmarks and artifacts: begun, finished, resumed; found by what they were put under."""

from __future__ import annotations

import pytest

from storage import RunLog, StorageError
from tests.storage.conftest import begun_benchmark, other_process

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


def test_a_benchmark_is_resumed_once_its_process_is_dead(url: str) -> None:
    script = "log.benchmarks.begin('x', 'b', {'n': 1}); print('x', flush=True)"
    with other_process(url, script) as (_, benchmark_id), RunLog.open(url) as alive:
        with pytest.raises(StorageError, match="running in another process"):
            alive.benchmarks.resume(benchmark_id)

    def status(log: RunLog) -> str | None:
        head = log.benchmarks.head(benchmark_id)
        return head.status if head else None

    log = RunLog.open(url)
    assert status(log) == "interrupted"
    assert log.benchmarks.resume(benchmark_id).status == "running"
    with RunLog.open(url) as other:
        assert status(other) == "running", "its process lives"
        log.close()
        assert status(other) == "interrupted"


def test_an_artifact_is_found_by_its_key_and_replaces_an_equal_one(log: RunLog) -> None:
    key = {"target": "tiny", "context": 512, "odd": ["\x00", float("inf")]}
    log.artifacts.put("latency", dict(reversed(key.items())), meta={}, payload=b"old")
    other = log.artifacts.put("latency", {**key, "context": 1}, meta={}, payload=b"other")
    new = log.artifacts.put("latency", key, meta={"ns": [1, 2]}, payload=b"\x00\xff")
    assert [a.id for a in log.artifacts.find("latency")] == [new, other]
    (found,) = log.artifacts.find("latency", key)
    assert (found.id, found.key, found.meta) == (new, key, {"ns": [1, 2]})
    assert log.artifacts.payload(new) == b"\x00\xff"
    assert log.artifacts.find("ranks", key) == () and log.artifacts.find("latency", {}) == ()


def test_artifacts_of_benchmarks_and_of_none_stay_side_by_side(log: RunLog) -> None:
    benchmark_id = begun_benchmark(log)
    for _ in range(2):  # the second of each replaces the first
        ids = [
            log.artifacts.put("ranks", {}, meta={}, payload=b"", benchmark_id=benchmark_id),
            log.artifacts.put("ranks", {}, meta={}, payload=b""),
        ]
    assert [a.id for a in log.artifacts.find("ranks", {})] == ids[::-1]
    assert [a.id for a in log.artifacts.find("ranks", benchmark_id=benchmark_id)] == [ids[0]]


def test_unknown_benchmarks_and_deleted_artifacts_are_refused(log: RunLog) -> None:
    assert log.benchmarks.get("nope") is None
    with pytest.raises(StorageError, match="nope"):
        log.benchmarks.resume("nope")
    artifact_id = log.artifacts.put("tree", {}, meta={}, payload=b"")
    assert [log.artifacts.forget("tree", {}) for _ in range(2)] == [True, False]
    with pytest.raises(StorageError, match=artifact_id):
        log.artifacts.payload(artifact_id)
    with pytest.raises(StorageError, match="(?i)foreign key"):
        log.artifacts.put("tree", {}, meta={}, payload=b"", benchmark_id="nobody")
