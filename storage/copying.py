"""Copies runs, benchmarks and artifacts from one log to another; copying again adds what is new."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from storage.database import Database
from storage.dialects import advisory_lock
from storage.query import read_wholes
from storage.schema import artifacts, benchmarks, runs
from storage.writing import BATCH, IMPORTED, write_whole

MOST_STEPS = 5000
"""Of the runs of one batch, unless one has more."""


@dataclass(slots=True)
class CopyProgress:
    """Counts of rows that were added, already present, or still running and so left out."""

    total: int
    runs: int = 0
    present: int = 0
    running: int = 0
    benchmarks: int = 0
    artifacts: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    """New ids of runs whose own ids other runs have."""

    @property
    def done(self) -> int:
        return self.runs + self.present + self.running


def copy(source: Database, into: Database) -> Generator[CopyProgress, None, None]:
    """Copy all that has ended, oldest first; yields after each batch, which is one transaction.

    Existing rows are left alone, so an interrupted copy can be continued.
    """
    query = sa.select(runs.c.id, runs.c.num_steps, runs.c.status)
    with source.transaction(reading=True) as connection:
        rows = connection.execute(query.order_by(runs.c.created_at, runs.c.id)).all()
    progress = CopyProgress(len(rows), running=sum(row.status == "running" for row in rows))
    progress.benchmarks = _copy_benchmarks(source, into)
    for ids in _batches([row for row in rows if row.status != "running"]):
        with source.transaction(reading=True) as connection:
            batch = read_wholes(connection, ids)
        with into.transaction() as connection:
            advisory_lock(connection, "import")
            results = write_whole(connection, batch)
        progress.present += sum(result.kind == "present" for result in results)
        progress.runs += sum(result.kind != "present" for result in results)
        progress.renamed |= {one.source_id: one.id for one in results if one.source_id != one.id}
        yield progress
    progress.artifacts = _copy_artifacts(source, into, progress.renamed)
    yield progress


def _batches(rows: Sequence[Any]) -> Iterator[list[str]]:
    """Ids of runs in batches that fit into memory."""
    ids: list[str] = []
    num_steps = 0
    for row in rows:
        if ids and (len(ids) == BATCH or num_steps + row.num_steps > MOST_STEPS):
            yield ids
            ids, num_steps = [], 0
        ids.append(row.id)
        num_steps += row.num_steps
    if ids:
        yield ids


def _copy_benchmarks(source: Database, into: Database) -> int:
    ended = benchmarks.c.status != "running"
    return _copy_missing(source, into, benchmarks, ended, changes=lambda row: {"owner": IMPORTED})


def _copy_artifacts(source: Database, into: Database, renamed: Mapping[str, str]) -> int:
    """Those without an owner, and those whose run or benchmark has ended."""
    ended = [
        sa.or_(key.is_(None), key.not_in(sa.select(table.c.id).where(table.c.status == "running")))
        for key, table in ((artifacts.c.run_id, runs), (artifacts.c.benchmark_id, benchmarks))
    ]
    return _copy_missing(
        source,
        into,
        artifacts,
        *ended,
        changes=lambda row: {"run_id": renamed.get(row.run_id, row.run_id)},
    )


def _copy_missing(
    source: Database,
    into: Database,
    table: sa.Table,
    *where: sa.ColumnElement[bool],
    changes: Callable[[sa.Row[Any]], Mapping[str, Any]],
) -> int:
    """Copy the rows that only the source has, oldest first, one at a time; returns their number."""
    query = sa.select(table.c.id).where(*where).order_by(table.c.created_at)
    with source.transaction(reading=True) as connection:
        ids = connection.execute(query).scalars().all()
    with into.transaction(reading=True) as connection:
        present = set(connection.execute(sa.select(table.c.id)).scalars())
    missing = [row_id for row_id in ids if row_id not in present]
    for row_id in missing:
        with source.transaction(reading=True) as connection:
            row = connection.execute(sa.select(table).where(table.c.id == row_id)).one_or_none()
        if row is not None:
            with into.transaction() as connection:
                connection.execute(table.insert().values({**row._mapping, **changes(row)}))
    return len(missing)
