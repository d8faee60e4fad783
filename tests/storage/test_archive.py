"""Whole runs from one log to another: nothing is lost, nothing is overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from storage import EXTERNAL, RunLog, RunQuery, StorageError
from tests.storage.conftest import finish, finished_run, new_run, odd_run, step, whole


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RunLog]:
    other = RunLog.open(str(tmp_path / "other.sqlite3"))
    yield other
    other.close()


def test_a_run_arrives_whole(log: RunLog, other: RunLog) -> None:
    stored = odd_run(log)
    assert other.write_whole([stored]) == 1
    there = whole(other, stored.run.id)
    assert repr(there) == repr(stored), "repr tells NaN from None, and equals where == does not"
    assert other.find(RunQuery(text="NÄME", labels={"turn": "0"}, tag="a")).total == 1
    assert other.find(RunQuery(text="LINE")).total == 1


def test_the_same_run_again_is_known_and_keeps_its_marks(log: RunLog, other: RunLog) -> None:
    stored = odd_run(log)
    other.write_whole([stored])
    other.rename(stored.run.id, "mine")
    other.delete(stored.run.id)
    assert other.write_whole([stored, stored]) == 0
    there = whole(other, stored.run.id).run
    assert there.name == "mine" and there.deleted
    assert other.find(RunQuery(deleted=None)).total == 1


def test_of_what_another_engine_wrote_nobody_knows_whether_it_is_lossless(
    log: RunLog, other: RunLog
) -> None:
    stored = whole(log, log.begin(new_run(method={"decoding_type": EXTERNAL}, lossless=None)))
    finish(log, stored.run.id)
    stored = whole(log, stored.run.id)
    assert stored.run.lossless is None
    other.write_whole([replace(stored, run=replace(stored.run, lossless=False))])  # as of old
    assert other.find(RunQuery()).rows[0].lossless is None


def test_a_run_that_is_here_is_not_overwritten_by_another_of_its_id(
    log: RunLog, other: RunLog
) -> None:
    stored = odd_run(log)
    foreign = replace(stored, steps=stored.steps[:1])
    assert (other.write_whole([stored]), other.write_whole([foreign])) == (1, 0)
    assert repr(whole(other, stored.run.id)) == repr(stored)


def test_a_run_that_was_going_on_arrives_as_interrupted(log: RunLog, other: RunLog) -> None:
    run_id = log.begin(new_run())
    log.add_prefill(run_id, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
    log.add_steps(run_id, [step(0)])
    other.write_whole([whole(log, run_id)])
    there = whole(other, run_id).run
    assert there.status == "interrupted" and there.output_ids == (5, 6, 9)
    assert other.write_whole([whole(log, run_id)]) == 0


def test_a_batch_with_a_refused_run_changes_nothing(log: RunLog, other: RunLog) -> None:
    stored = odd_run(log)
    bad = replace(stored, run=replace(stored.run, id="bad", tags=("x" * 200,)))
    with pytest.raises(StorageError, match="tag must be 1 to 128"):
        other.write_whole([stored, bad])
    assert other.find().total == 0


def test_marks_that_are_too_long_are_refused_in_a_sentence(log: RunLog) -> None:
    run_id = finished_run(log)
    with pytest.raises(StorageError, match="name must have at most 255"):
        log.rename(run_id, "x" * 256)
    with pytest.raises(StorageError, match="note must have at most"):
        log.set_note(run_id, "x" * 20_001)
    for tags in ([""], ["x" * 129], [f"{i}" for i in range(51)]):
        with pytest.raises(StorageError, match="tag"):
            log.set_tags(run_id, tags)
