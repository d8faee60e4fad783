"""Copies runs, benchmarks and artifacts to another log; copying again adds the new ones."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import sqlalchemy as sa

from storage.database import Database
from storage.dialects import advisory_lock
from storage.log import RunLog
from storage.schema import artifacts, benchmarks, runs
from storage.writing import IMPORTED, write_whole

BATCH = 20
"""Runs per transaction; only one is in memory, since a long one takes a hundred MB."""


@dataclass(slots=True)
class CopyProgress:
    """Counts of rows that were added, already present, or skipped because they are running."""

    total: int
    present: int
    running: int
    runs: int = 0
    benchmarks: int = 0
    artifacts: int = 0

    @property
    def done(self) -> int:
        return self.runs + self.present + self.running


def copy_log(from_log: RunLog, to_log: RunLog) -> Generator[CopyProgress, None, None]:
    """Copy all finished rows, oldest first; yields after each batch, which is one transaction.

    Existing rows are not changed, so an interrupted copy can be continued.

    Raises StorageError: one of the databases failed.
    """
    source, into = from_log._database, to_log._database
    with source.transaction(reading=True, limited=False) as connection:
        query = sa.select(sa.func.count()).select_from(runs)
        total = connection.scalar(query) or 0
        num_running = connection.scalar(query.where(runs.c.status == "running")) or 0
    missing = _missing(source, into, runs, runs.c.status != "running")
    progress = CopyProgress(total, total - num_running - len(missing), num_running)
    progress.benchmarks = _copy(source, into, benchmarks, benchmarks.c.status != "running")
    for start in range(0, len(missing), BATCH):
        with into.transaction() as connection:
            advisory_lock(connection, "import")
            for run_id in missing[start : start + BATCH]:
                whole = from_log.read_whole(run_id)
                progress.runs += write_whole(connection, [whole] if whole else [])
        yield progress
    benchmark_id = artifacts.c.benchmark_id
    running = sa.select(benchmarks.c.id).where(benchmarks.c.status == "running")
    is_final = benchmark_id.is_(None) | benchmark_id.not_in(running)
    progress.artifacts = _copy(source, into, artifacts, is_final)
    yield progress


def _missing(
    source: Database, into: Database, table: sa.Table, *where: sa.ColumnElement[bool]
) -> list[str]:
    """Ids of the rows that the destination lacks, oldest first."""
    query = sa.select(table.c.id).where(*where).order_by(table.c.created_at, table.c.id)
    with source.transaction(reading=True, limited=False) as connection:
        ids = connection.scalars(query).all()
    with into.transaction(reading=True, limited=False) as connection:
        present = set(connection.scalars(sa.select(table.c.id)))
    return [row_id for row_id in ids if row_id not in present]


def _copy(source: Database, into: Database, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    """Copy the rows that the destination lacks, one at a time; returns their number."""
    missing = _missing(source, into, table, *where)
    for row_id in missing:
        with source.transaction(reading=True, limited=False) as connection:
            row = connection.execute(sa.select(table).where(table.c.id == row_id)).one_or_none()
        if row is not None:
            values = {name: value for name, value in row._mapping.items() if name != "owner"}
            owner = {"owner": IMPORTED} if "owner" in table.c else {}
            with into.transaction() as connection:
                connection.execute(table.insert().values(values | owner))
    return len(missing)
