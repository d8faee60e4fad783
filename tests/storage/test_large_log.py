"""A log of a million runs: few statements for every question, and rows read within a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from storage import RunLog, RunQuery, schema
from tests.storage.conftest import finished_run

CHANGED = {
    "created_at": "strftime('%Y-%m-%d %H:%M:%f000', created_at, '+' || n || ' seconds')",
    "target": "'target ' || (n % 4)",
    "mat": "1 + n % 1000 / 500.0",
    "tok_s": "10 + n % 777",
    "experiment": "CASE n % 2 WHEN 0 THEN 'benchmark:' || (n / 500) END",
}
"""What differs between the runs, of which the database makes the n-th."""


@pytest.fixture(params=[2000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def num_runs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def log(num_runs: int, tmp_path: Path) -> Iterator[RunLog]:
    """So many runs, a second apart; half of them in experiments of 250."""
    with RunLog.open(str(tmp_path / "runs.db")) as log:
        first = finished_run(log, labels={"category": "qa"}, tags=("a",))
        numbers = "SELECT 2 UNION ALL SELECT n + 1 FROM numbers WHERE n < :num_runs"
        with log._database.transaction() as connection:
            for table in (schema.runs, schema.run_details, schema.labels, schema.tags):
                key = "id" if "id" in table.c else "run_id"
                changes = (CHANGED if table is schema.runs else {}) | {key: "printf('%016x', n)"}
                names = [f'"{name}"' for name in table.c.keys()]
                values = [changes.get(name, f'"{name}"') for name in table.c.keys()]
                statement = (
                    f"INSERT INTO {table.name} ({', '.join(names)}) "
                    f"WITH RECURSIVE numbers(n) AS ({numbers}) "
                    f"SELECT {', '.join(values)} FROM {table.name}, numbers WHERE {key} = :first"
                )
                connection.execute(sa.text(statement), {"first": first, "num_runs": num_runs})
        with log._database.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")
        yield log
    for file in tmp_path.iterdir():
        file.unlink()  # gigabytes


class Work:
    """What a log's database does for a question: statements, and instructions of SQLite."""

    def __init__(self, log: RunLog) -> None:
        self.statements = self.instructions = 0
        sa.event.listen(log._database.engine, "before_cursor_execute", self._add_statement)
        sa.event.listen(log._database.engine, "begin", self._watch)

    def _add_statement(self, *_: Any) -> None:
        self.statements += 1

    def _watch(self, connection: sa.Connection) -> None:
        raw: Any = connection.connection.dbapi_connection
        raw.set_progress_handler(self._add_instructions, 100)

    def _add_instructions(self) -> None:
        self.instructions += 100


PAGE = 9_000
"""Instructions of a page of fifty runs that an index leads to."""
QUESTIONS: dict[str, tuple[Callable[[RunLog], object], int]] = {
    "the newest runs": (lambda log: log.rows(RunQuery()), 0),
    "runs by MAT": (lambda log: log.rows(RunQuery(sort="mat")), 0),
    "runs by target": (lambda log: log.rows(RunQuery(sort="target")), 0),
    "runs of a target": (lambda log: log.rows(RunQuery(target="target 1")), 0),
    "distinct targets": (lambda log: log.distinct_values("target"), 0),
    "a page and the total": (lambda log: log.find(RunQuery(offset=200)), 8),
    "a target's by tok/s": (lambda log: log.rows(RunQuery(target="target 1", sort="tok_s")), 8),
    "experiments folded": (lambda log: log.experiments.page(RunQuery()), 15),
    "the newest experiments": (lambda log: log.experiments.newest(), 15),
    "an experiment's times": (lambda log: log.experiments.timed_requests(["benchmark:1"]), 30),
    "runs with a label": (lambda log: log.rows(RunQuery(labels={"category": "qa"})), 50),
    "runs with a tag": (lambda log: log.rows(RunQuery(tag="a")), 50),
    "a text": (lambda log: log.rows(RunQuery(text="no such words")), 60),
    "statistics by method": (lambda log: log.groups(RunQuery(), "method_title"), 300),
}
"""Questions, and SQLite's instructions for each run of the log beside those of a page: 0 where an
index leads to the rows, some for a pass over an index, more where every row is read."""


def test_every_question_takes_few_statements_and_reads_rows_within_its_bound(
    log: RunLog, num_runs: int
) -> None:
    assert log.find(RunQuery(limit=1)).total == num_runs
    work = Work(log)
    for name, (ask, per_run) in QUESTIONS.items():
        work.statements = work.instructions = 0
        assert ask(log) is not None
        assert work.statements <= 10, name
        assert work.instructions <= PAGE + per_run * num_runs, (name, work.instructions)
