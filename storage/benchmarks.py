"""Benchmarks in the log: begun, finished, resumed, and found again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC
from typing import Any, Literal

import sqlalchemy as sa

from storage import codec, owner
from storage.database import Database
from storage.errors import StorageError, UnknownBenchmarkError
from storage.records import Benchmark
from storage.schema import benchmarks, runs

MAX_LIST = 1000


class Benchmarks:
    """The benchmarks of one database; their runs carry the benchmark's id."""

    def __init__(self, database: Database, this_owner: str) -> None:
        self._database = database
        self._owner = this_owner
        self._begun: set[str] = set()

    def begin(self, name: str, plan: Mapping[str, Any]) -> str:
        """Write down a benchmark that is about to start; returns its id."""
        benchmark_id = secrets.token_hex(8)
        now = owner.now()
        with self._database.transaction() as connection:
            connection.execute(
                benchmarks.insert().values(
                    id=benchmark_id,
                    created_at=now,
                    heartbeat_at=now,
                    owner=self._owner,
                    status="running",
                    name=name,
                    plan=codec.dump(plan),
                    summary=codec.dump({}),
                )
            )
        self._begun.add(benchmark_id)
        return benchmark_id

    def finish(
        self,
        benchmark_id: str,
        status: Literal["completed", "cancelled", "failed"],
        summary: Mapping[str, Any],
    ) -> None:
        """The benchmark is over.

        Raises:
            UnknownBenchmarkError: no such benchmark.
        """
        values = {"status": status, "summary": codec.dump(summary), "finished_at": owner.now()}
        change = benchmarks.update().where(benchmarks.c.id == benchmark_id).values(values)
        with self._database.transaction() as connection:
            if connection.execute(change).rowcount == 0:
                raise UnknownBenchmarkError(f"No benchmark {benchmark_id!r:.80} is in the log.")
        self._begun.discard(benchmark_id)

    def resume(self, benchmark_id: str) -> Benchmark:
        """Go on with a benchmark here: it is `running` again and belongs to this process.

        Raises:
            UnknownBenchmarkError: no such benchmark.
            StorageError: another process is running it.
        """
        now = owner.now()
        with self._database.transaction() as connection:
            row = _row(connection, benchmark_id)
            if row is None:
                raise UnknownBenchmarkError(f"No benchmark {benchmark_id!r:.80} is in the log.")
            alive = owner.is_alive(row.owner, _last_sign(connection, row), now)
            if row.status == "running" and row.owner != self._owner and alive:
                raise StorageError(
                    f"Benchmark {benchmark_id} is running in another process. Stop it there, or "
                    "wait until it is done."
                )
            values = {"status": "running", "owner": self._owner, "heartbeat_at": now}
            connection.execute(
                benchmarks.update()
                .where(benchmarks.c.id == benchmark_id)
                .values(finished_at=None, **values)
            )
            row = _row(connection, benchmark_id)
            assert row is not None
        self._begun.add(benchmark_id)
        return _benchmark(row)

    def get(self, benchmark_id: str) -> Benchmark | None:
        """One benchmark; None if there is none of this id."""
        with self._database.transaction(reading=True) as connection:
            row = _row(connection, benchmark_id)
        return None if row is None else _benchmark(row)

    def list(self, limit: int = 50) -> tuple[Benchmark, ...]:
        """The newest benchmarks, newest first.

        Raises:
            StorageError: limit out of range.
        """
        if not 1 <= limit <= MAX_LIST:
            raise StorageError(f"limit must be in [1, {MAX_LIST}], got {limit}.")
        newest = sa.select(benchmarks).order_by(benchmarks.c.created_at.desc(), benchmarks.c.id)
        with self._database.transaction(reading=True) as connection:
            return tuple(_benchmark(row) for row in connection.execute(newest.limit(limit)))

    def release(self) -> None:
        """Those begun or resumed here and not finished become `interrupted`."""
        if self._begun:
            mine = benchmarks.c.id.in_(self._begun), benchmarks.c.status == "running"
            with self._database.transaction() as connection:
                connection.execute(benchmarks.update().where(*mine).values(status="interrupted"))

    def mark_interrupted(self) -> None:
        """Those whose process is gone become `interrupted`."""
        now = owner.now()
        running = sa.select(benchmarks).where(benchmarks.c.status == "running")
        with self._database.transaction() as connection:
            dead = [
                row.id
                for row in connection.execute(running).all()
                if not owner.is_alive(row.owner, _last_sign(connection, row), now)
            ]
            if dead:
                over = benchmarks.update().where(benchmarks.c.id.in_(dead))
                connection.execute(over.values(status="interrupted"))


def _row(connection: sa.Connection, benchmark_id: str) -> sa.Row[Any] | None:
    wanted = sa.select(benchmarks).where(benchmarks.c.id == benchmark_id)
    return connection.execute(wanted).one_or_none()


def _last_sign(connection: sa.Connection, row: sa.Row[Any]) -> Any:
    """When the benchmark or one of its runs was last written to."""
    newest = sa.select(sa.func.max(runs.c.heartbeat_at)).where(runs.c.benchmark_id == row.id)
    return max(row.heartbeat_at, connection.execute(newest).scalar() or row.heartbeat_at)


def _benchmark(row: sa.Row[Any]) -> Benchmark:
    return Benchmark(
        id=row.id,
        name=row.name,
        plan=codec.load(row.plan),
        status=row.status,
        created_at=row.created_at.replace(tzinfo=UTC),
        finished_at=row.finished_at and row.finished_at.replace(tzinfo=UTC),
        summary=codec.load(row.summary),
    )
