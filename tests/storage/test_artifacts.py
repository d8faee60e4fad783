"""Artifacts: what is put under a kind and a key is found there, newest first."""

from __future__ import annotations

import pytest

from storage import RunLog, StorageError
from tests.storage.conftest import begun_benchmark, finished_run


def test_an_artifact_round_trips(log: RunLog) -> None:
    key = {"target": "tiny", "context": 512, "odd": ["\x00", float("inf")]}
    artifact_id = log.artifacts.put("latency", key, meta={"ns": [1, 2]}, payload=b"\x00\xff")
    (found,) = log.artifacts.find("latency", key)
    assert (found.id, found.key, found.meta) == (artifact_id, key, {"ns": [1, 2]})
    assert log.artifacts.payload(artifact_id) == b"\x00\xff"
    assert log.artifacts.find("ranks", key) == () and log.artifacts.find("latency", {}) == ()


def test_equal_key_replaces_whatever_the_order_of_its_names(log: RunLog) -> None:
    log.artifacts.put("tree", {"a": 1, "b": 2}, meta={}, payload=b"old")
    other = log.artifacts.put("tree", {"a": 1, "b": 3}, meta={}, payload=b"other")
    new = log.artifacts.put("tree", {"b": 2, "a": 1}, meta={}, payload=b"new")
    assert [a.id for a in log.artifacts.find("tree")] == [new, other]
    assert log.artifacts.payload(new) == b"new"


def test_artifacts_of_runs_and_benchmarks_stay_side_by_side(log: RunLog) -> None:
    run_id, benchmark_id = finished_run(log), begun_benchmark(log)
    for _ in range(2):  # the second of each replaces the first
        ids = [
            log.artifacts.put("ranks", {}, meta={}, payload=b"", run_id=run_id),
            log.artifacts.put("ranks", {}, meta={}, payload=b"", benchmark_id=benchmark_id),
            log.artifacts.put("ranks", {}, meta={}, payload=b""),
        ]
    assert [a.id for a in log.artifacts.find("ranks", {})] == ids[::-1]
    assert [a.id for a in log.artifacts.find("ranks") if a.run_id == run_id] == [ids[0]]
    assert [a.id for a in log.artifacts.find("ranks", benchmark_id=benchmark_id)] == [ids[1]]


def test_deleted_and_unknown_artifacts_are_refused(log: RunLog) -> None:
    artifact_id = log.artifacts.put("tree", {}, meta={}, payload=b"")
    assert [log.artifacts.forget("tree", {}) for _ in range(2)] == [True, False]
    with pytest.raises(StorageError, match=artifact_id):
        log.artifacts.payload(artifact_id)
    with pytest.raises(StorageError, match="(?i)foreign key"):
        log.artifacts.put("tree", {}, meta={}, payload=b"", run_id="nobody")
