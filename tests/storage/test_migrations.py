"""Databases: created as the code has them, opened if released, refused otherwise."""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from storage import NewRun, RunLog, RunQuery, StorageError, database
from storage.database import Database
from storage.schema import metadata
from tests.storage.conftest import detail, step
from tests.storage.test_copying import filled

ASSETS = Path(__file__).parent / "assets"
RELEASED = sorted(ASSETS.glob("schema-*.sqlite3"))


@pytest.fixture(params=RELEASED, ids=lambda file: file.stem)
def released(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of a released schema."""
    return str(shutil.copy(request.param, tmp_path))


def difference(url: str) -> object:
    database = Database(url)
    with database.transaction() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
    database.close()
    return found


def test_a_new_database_has_the_schema_of_the_code(url: str) -> None:
    assert difference(url) == []


def test_a_database_of_every_released_schema_opens_and_is_as_the_code_has_it(
    released: str,
) -> None:
    assert difference(released) == []
    log = RunLog.open(released)
    page = log.find()
    assert {row.status for row in page.rows} == {"completed", "interrupted"}
    for row in page.rows:
        run = detail(log, row.id)
        assert len(log.steps(row.id)) == run.num_steps > 0
        assert run.output_ids and run.prompt_ids and run.method["decoding_type"]
        assert log.find(RunQuery(text=run.prompt_text.upper(), setup_id=run.setup_id)).total == 1
        new = NewRun(**{f.name: getattr(run, f.name) for f in fields(NewRun)})
        again = detail(log, log.begin(new))
        assert (again.setup_id, again.prompt_id) == (run.setup_id, run.prompt_id)
    assert sum(group.num_runs for group in log.groups(RunQuery(), "setup_id")) == 2 * page.total
    log.close()


def test_what_the_first_schema_holds_comes_back_whole(tmp_path: Path) -> None:
    """Written by the program before its migrations became one."""
    log = RunLog.open(str(shutil.copy(ASSETS / "schema-0008.sqlite3", tmp_path)))
    (named,) = log.find(RunQuery(text="übung")).rows
    assert (named.name, named.note, named.tags) == ("The Übung", "a note", ("kept", "old"))
    assert named.created_at.tzinfo is not None and named.tok_s and named.verify_s
    (left,) = log.find(RunQuery(labels={"category": "qa"})).rows
    run, (head,) = detail(log, left.id), log.benchmarks.list()
    assert run.environment == {"odd": math.inf}
    assert run.messages == ({"role": "user", "content": "héllo \x00"},)
    assert run.output_ids == (5, 6, 9, 6, 9) and run.experiment_id == head.id
    first, second = log.steps(run.id)
    assert first == step(0) and math.isnan(second.draft_probs[1] or 0)
    benchmark = log.benchmarks.get(head.id)
    assert benchmark is not None
    assert (benchmark.plan, benchmark.summary) == ({"suite": "starter"}, {"speedup": 1.5})
    (artifact,) = log.artifacts.find("latency", {"target": "tiny"})
    assert log.artifacts.payload(artifact.id) == b"\x00\xff" and artifact.meta == {"ns": [1, 2]}
    log.close()


# ---- migrations that rebuild a table


WIDER = """with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("weather", sa.Integer))
        runs.alter_column("name", type_=sa.String(300), existing_type=sa.String(255))"""
"""SQLite cannot alter a column, so there the table is rebuilt."""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this the program's next version, whose migration runs these lines."""
    folder = tmp_path / "migrations"
    shutil.copytree(database.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    head = (
        'from alembic import op\nimport sqlalchemy as sa\nrevision = "0010"\ndown_revision = "0009"'
    )

    def make(upgrade: str) -> None:
        file = folder / "versions" / "v0010_next.py"
        file.write_text(f"{head}\ndef upgrade() -> None:\n    {upgrade}\n")
        monkeypatch.setattr(database, "MIGRATIONS", folder)

    return make


def content(url: str) -> dict[str, list[str]]:
    """All rows and all indexes by table, as the database has them."""
    engine = sa.create_engine(url if "://" in url else f"sqlite:///{url}")
    whole: dict[str, list[str]] = {}
    with engine.connect() as connection:
        for name in metadata.tables:
            rows = connection.execute(sa.text(f"SELECT * FROM {name}")).mappings()
            whole[name] = [repr({**row, "weather": None}) for row in rows]
            for index in sa.inspect(connection).get_indexes(name):
                where = [str(option) for option in index.get("dialect_options", {}).values()]
                text = f"{index['name']} {index['column_names']} {where}"
                whole.setdefault(f"indexes of {name}", []).append(text)
    engine.dispose()
    return {name: sorted(texts) for name, texts in whole.items()}


def test_a_migration_that_rebuilds_the_runs_keeps_every_row_of_every_table(
    url: str, next_version: Callable[[str], None]
) -> None:
    with RunLog.open(url) as log:
        ids = filled(log)
    before = content(url)
    assert all(before.values()), "every table has rows"
    next_version(WIDER)
    with RunLog.open(url) as log:
        assert content(url) == before
        with log._database.transaction() as connection:
            connection.execute(sa.text("UPDATE runs SET weather = 1"))
            connection.execute(sa.text(f"DELETE FROM runs WHERE id = '{ids[0]}'"))
        assert not log.steps(ids[0]), "deleting cascades as before"
    RunLog.open(url).close()


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ('op.execute("DELETE FROM runs")', r"update to schema 0010, rows would refer"),
        ('op.execute("DELETE FROM nowhere")', "no such table: nowhere"),
    ],
)
def test_a_migration_that_fails_or_breaks_references_changes_nothing(
    path: str, next_version: Callable[[str], None], last: str, message: str
) -> None:
    with RunLog.open(path) as log:
        filled(log)
    before = content(path)
    next_version(f"{WIDER}\n    {last}")
    with pytest.raises(StorageError, match=message):
        RunLog.open(path)
    assert content(path) == before


# ---- files that are refused


def no_database(file: Path) -> None:
    file.write_text("this is not a database, but it is long enough to look at" * 20)


def of_another_program(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def newer(file: Path) -> None:
    RunLog.open(str(file)).close()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


def older(file: Path) -> None:
    RunLog.open(str(file)).close()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0007'")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_database, "not a database"),
        (of_another_program, "another program"),
        (newer, r"another version \(schema 9999\). Use that or a newer one, or give another --db"),
        (
            older,
            r"another version \(schema 0007\). Open it once with a version of 27 November 2026",
        ),
    ],
)
def test_a_file_that_is_no_log_of_ours_is_refused_and_left_alone(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    def tables() -> bytes:
        return file.read_bytes()[100:]  # SQLite's header says how it keeps its journal

    make(file := tmp_path / "file")
    before = tables()
    with pytest.raises(StorageError, match=message):
        RunLog.open(str(file))
    assert tables() == before


@pytest.mark.parametrize(("url", "message"), [("nosuchdb://x", "No driver"), ("://", "not a data")])
def test_unknown_driver_and_broken_url_are_refused_in_a_sentence(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        RunLog.open(url)
