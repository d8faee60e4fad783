"""Migrations lead to the schema of the code, from every released schema."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from storage import NewRun, RunLog, RunQuery
from storage.database import Database
from storage.schema import metadata

ASSETS = Path(__file__).parent / "assets"


def test_migrated_database_has_the_schema_of_the_code(url: str) -> None:
    database = Database(url)
    with database.transaction() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), metadata)
    database.close()
    assert difference == []


@pytest.mark.parametrize("file", sorted(ASSETS.glob("*.sqlite3")), ids=lambda f: f.stem)
def test_database_of_every_released_schema_opens(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / file.name
    shutil.copy(file, copy)
    log = RunLog.open(str(copy))
    page = log.find()
    assert page.total >= 2
    for row in page.rows:
        run = log.get(row.id)
        assert run is not None and len(log.steps(row.id)) == run.num_steps > 0
    assert {row.status for row in page.rows} == {"completed", "interrupted"}
    log.close()


def test_runs_of_the_first_schema_can_be_searched_grouped_and_repeated(tmp_path: Path) -> None:
    copy = tmp_path / "old.sqlite3"
    shutil.copy(ASSETS / "schema-0001.sqlite3", copy)
    with sqlite3.connect(copy) as connection:
        old = connection.execute("SELECT id, prompt_text, note, metrics FROM runs").fetchall()
    connection.close()
    log = RunLog.open(str(copy))
    for run_id, prompt, note, metrics in old:
        run = log.get(run_id)
        assert run is not None and (run.prompt_text, run.note) == (prompt, note)
        assert log.find(RunQuery(text=prompt.upper(), setup_id=run.setup_id)).total >= 1
        assert run.itl_ms == json.loads(metrics or "{}").get("itl_ms")
        new = NewRun(
            **{f.name: getattr(run, f.name) for f in fields(NewRun)}  # the same settings again
        )
        again = log.get(log.begin(new))
        assert again is not None
        assert (again.setup_id, again.prompt_id) == (run.setup_id, run.prompt_id)
    assert sum(group.num_runs for group in log.groups(RunQuery(), "setup_id")) == 2 * len(old)
    log.close()


def test_there_is_a_database_of_the_first_schema() -> None:
    assert (ASSETS / "schema-0001.sqlite3").is_file()


def test_opening_twice_migrates_once(path: str) -> None:
    RunLog.open(path).close()
    database = Database(path)
    with database.transaction() as connection:
        count = connection.execute(sa.text("SELECT count(*) FROM alembic_version")).scalar_one()
    database.close()
    assert count == 1
