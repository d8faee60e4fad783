"""One log's content into another: runs, benchmarks, artifacts. Again, and nothing comes twice."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from storage.database import Database
from storage.dialects import take_turn
from storage.query import read_wholes
from storage.schema import artifacts, benchmarks, runs
from storage.writing import BATCH, IMPORTED, write_whole

MOST_STEPS = 5000
"""Of the runs of one batch, unless one has more."""


@dataclass(slots=True)
class Copied:
    """How far a copy is: what was added, what was there, what still runs and so was left out."""

    total: int
    runs: int = 0
    known: int = 0
    running: int = 0
    benchmarks: int = 0
    artifacts: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    """New ids of runs whose own ids other runs have."""

    @property
    def done(self) -> int:
        return self.runs + self.known + self.running


def copy(source: Database, into: Database) -> Generator[Copied, None, None]:
    """Copy what is over, oldest first; yields after each batch, which arrives whole or not at all.

    What is there already is left as it is, so that a copy that was cut off goes on.
    """
    wanted = sa.select(runs.c.id, runs.c.num_steps, runs.c.status)
    with source.transaction(reading=True) as connection:
        rows = connection.execute(wanted.order_by(runs.c.created_at, runs.c.id)).all()
    found = Copied(len(rows), running=sum(row.status == "running" for row in rows))
    _copy_benchmarks(source, into, found)
    for ids in _batches([row for row in rows if row.status != "running"]):
        with source.transaction(reading=True) as connection:
            batch = read_wholes(connection, ids)
        with into.transaction() as connection:
            take_turn(connection, "import")
            arrivals = write_whole(connection, batch)
        found.known += sum(arrival.kind == "known" for arrival in arrivals)
        found.runs += sum(arrival.kind != "known" for arrival in arrivals)
        found.renamed |= {one.given_id: one.id for one in arrivals if one.given_id != one.id}
        yield found
    _copy_artifacts(source, into, found)
    yield found


def _batches(rows: Sequence[Any]) -> Iterator[list[str]]:
    """Ids of as many runs as are held in memory without thinking about it."""
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


def _missing(source: Database, into: Database, table: sa.Table, *where: Any) -> list[str]:
    """Ids of rows that only the source has, oldest first."""
    wanted = sa.select(table.c.id).where(*where).order_by(table.c.created_at)
    with source.transaction(reading=True) as connection:
        theirs = connection.execute(wanted).scalars().all()
    with into.transaction(reading=True) as connection:
        here = set(connection.execute(sa.select(table.c.id)).scalars())
    return [one for one in theirs if one not in here]


def _copy_benchmarks(source: Database, into: Database, found: Copied) -> None:
    for benchmark_id in _missing(source, into, benchmarks, benchmarks.c.status != "running"):
        _copy_row(source, into, benchmarks, benchmark_id, owner=IMPORTED)
        found.benchmarks += 1


def _copy_artifacts(source: Database, into: Database, found: Copied) -> None:
    """Those that belong to nothing, or to what is over and so was copied."""
    going = {
        table.name: sa.select(table.c.id).where(table.c.status == "running")
        for table in (runs, benchmarks)
    }
    owners = {artifacts.c.run_id: going["runs"], artifacts.c.benchmark_id: going["benchmarks"]}
    over = (sa.or_(column.is_(None), column.not_in(ids)) for column, ids in owners.items())
    for artifact_id in _missing(source, into, artifacts, *over):
        _copy_row(source, into, artifacts, artifact_id, renamed=found.renamed)
        found.artifacts += 1


def _copy_row(
    source: Database,
    into: Database,
    table: sa.Table,
    row_id: str,
    renamed: dict[str, str] | None = None,
    **changes: Any,
) -> None:
    with source.transaction(reading=True) as connection:
        row = connection.execute(sa.select(table).where(table.c.id == row_id)).one_or_none()
    if row is None:
        return
    values = {**row._mapping, **changes}
    if renamed and values.get("run_id") in renamed:
        values["run_id"] = renamed[values["run_id"]]
    with into.transaction() as connection:
        connection.execute(table.insert().values(values))
