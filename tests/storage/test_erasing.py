"""Runs that are erased: nothing of them is left, and all of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery
from storage.schema import metadata, prompt_texts, remarks, runs
from tests.storage.conftest import finished_run, new_run, started, whole
from tests.storage.test_migrations import ASSETS


def rows_of(log: RunLog, run_id: str) -> dict[str, int]:
    """Numbers of rows that belong to a run, by table."""
    keys = {table.c.get("run_id", runs.c.id) for table in metadata.tables.values()}
    with log._database.transaction(reading=True) as connection:
        return {
            key.table.name: connection.scalar(
                sa.select(sa.func.count()).select_from(key.table).where(key == run_id)
            )
            or 0
            for key in keys
        }


def folded(log: RunLog) -> set[str]:
    """Prompts, names and notes that are kept for the search."""
    with log._database.transaction(reading=True) as connection:
        queries = (sa.select(table.c.folded) for table in (prompt_texts, remarks))
        return {text for query in queries for text in connection.scalars(query)}


def test_erasing_leaves_nothing_of_hidden_runs_and_all_of_the_others(log: RunLog) -> None:
    shared, own = {"prompt_text": "Shared."}, {"prompt_text": "Own."}
    kept, visible = finished_run(log, **shared), finished_run(log)
    gone = [finished_run(log, tags=("t",), labels={"a": "b"}, **one) for one in (shared, own)]
    going = log.begin(new_run())
    log.annotate(gone[0], name="A name", note="a note")
    before = whole(log, kept)
    log.set_deleted([*gone, going])
    assert log.erase([*gone, going, visible, "nope"]) == 2
    for run_id in gone:
        assert not any(rows_of(log, run_id).values())
    assert log.get(visible) and log.get(going) and whole(log, kept) == before
    assert folded(log) == {"shared.", "hello"}
    assert log.find(RunQuery(text="shared")).rows[0].id == kept


@pytest.mark.parametrize("of_older_version", [False, True])
def test_erasing_shrinks_the_file(path: str, of_older_version: bool) -> None:
    if of_older_version:
        Path(path).parent.mkdir()
        shutil.copy(ASSETS / "schema-0008.sqlite3", path)
    with RunLog.open(path) as log:
        ids = [finished_run(log, prompt_text=f"{n}" * 500_000) for n in range(4)]
        log.set_deleted(ids)
        sizes = []
        for run_id in ids:
            assert log.erase([run_id]) == 1
            sizes.append(sum(file.stat().st_size for file in Path(path).parent.iterdir()))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] > 2_500_000


def test_a_disk_too_full_to_shrink_the_file_is_named_once_the_runs_are_erased(path: str) -> None:
    Path(path).parent.mkdir()
    shutil.copy(ASSETS / "schema-0008.sqlite3", path)
    with RunLog.open(path) as log:
        kept, gone = (finished_run(log, prompt_text="a" * num) for num in (1_500_000, 50_000))
        log.set_deleted([gone])
    lines = (
        f"log = RunLog.open({path!r})",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))",
        f"log.erase([{gone!r}])",
    )
    _, said = started(*lines).communicate()
    assert (
        f"StorageError: The runs are erased, but take up space: The run log sqlite:///{path}"
        in said
    )
    assert "cannot be written: the disk is full" in said
    with RunLog.open(path) as log:
        assert log.get(kept) and log.get(gone) is None


def test_a_log_in_memory_is_erased_too() -> None:
    with RunLog.open() as log:
        log.set_deleted([run_id := finished_run(log)])
        assert log.erase([run_id]) == 1 and log.find(RunQuery(deleted=True)).total == 0
