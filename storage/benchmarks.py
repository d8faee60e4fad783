"""Benchmarks of the log: begun, finished, resumed; and artifacts: what was measured or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import sqlalchemy as sa

from storage import owner
from storage.database import Database
from storage.records import (
    Artifact,
    Benchmark,
    StorageError,
    UnknownArtifactError,
    UnknownBenchmarkError,
)
from storage.schema import artifacts, benchmarks, digest, new_id, runs

MAX_LIST = 1000
MAX_KIND_CHARS = 64


class Benchmarks:
    """The benchmarks of one database; their runs carry the benchmark's id.

    Attributes:
        begun: ids of those begun or resumed here and not finished.
    """

    def __init__(self, database: Database, this_owner: str) -> None:
        self._database = database
        self._owner = this_owner
        self.begun: set[str] = set()

    def begin(self, name: str, plan: Mapping[str, Any]) -> str:
        """Write down a benchmark that is about to start; returns its id."""
        benchmark_id = new_id()
        new = benchmarks.insert().values(id=benchmark_id, owner=self._owner, name=name, plan=plan)
        with self._database.transaction() as connection:
            connection.execute(new)
        self.begun.add(benchmark_id)
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
        values = {"status": status, "summary": summary, "finished_at": owner.now()}
        with self._database.transaction() as connection:
            _row(connection, benchmark_id)
            connection.execute(_update(benchmark_id, values))
        self.begun.discard(benchmark_id)

    def resume(self, benchmark_id: str) -> Benchmark:
        """Go on with a benchmark here: it is `running` again and belongs to this process.

        Raises:
            UnknownBenchmarkError: no such benchmark.
            StorageError: another process is running it.
        """
        now = owner.now()
        mine = {"status": "running", "owner": self._owner, "heartbeat_at": now, "finished_at": None}
        with self._database.transaction() as connection:
            row = _row(connection, benchmark_id)
            alive = owner.is_alive(row.owner, _last_sign(connection, row), now)
            if row.status == "running" and row.owner != self._owner and alive:
                raise StorageError(
                    f"Benchmark {benchmark_id} is running in another process. Stop it there, or "
                    "wait until it is done."
                )
            connection.execute(_update(benchmark_id, mine))
        self.begun.add(benchmark_id)
        return replace(_benchmark(row), status="running", finished_at=None)

    def get(self, benchmark_id: str) -> Benchmark | None:
        """One benchmark; None if there is none of this id."""
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(_of(benchmark_id)).one_or_none()
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

    def interrupt_dead(self, connection: sa.Connection) -> None:
        """Those whose process is gone become `interrupted`."""
        owner.interrupt_dead(connection, benchmarks, lambda row: _last_sign(connection, row))


def _of(benchmark_id: str) -> sa.Select[Any]:
    return sa.select(benchmarks).where(benchmarks.c.id == benchmark_id)


def _row(connection: sa.Connection, benchmark_id: str) -> sa.Row[Any]:
    row = connection.execute(_of(benchmark_id)).one_or_none()
    if row is None:
        raise UnknownBenchmarkError(f"No benchmark {benchmark_id!r:.80} is in the log.")
    return row


def _update(benchmark_id: str, values: Mapping[str, Any]) -> sa.Update:
    return benchmarks.update().where(benchmarks.c.id == benchmark_id).values(**values)


def _benchmark(row: sa.Row[Any]) -> Benchmark:
    return Benchmark(**{field.name: getattr(row, field.name) for field in fields(Benchmark)})


def _last_sign(connection: sa.Connection, row: sa.Row[Any]) -> Any:
    """When the benchmark or one of its runs was last written to."""
    newest = sa.select(sa.func.max(runs.c.heartbeat_at)).where(runs.c.benchmark_id == row.id)
    return max(row.heartbeat_at, connection.execute(newest).scalar() or row.heartbeat_at)


class Artifacts:
    """The artifacts of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self,
        kind: str,
        key: Mapping[str, Any],
        *,
        meta: Mapping[str, Any],
        payload: bytes,
        run_id: str | None = None,
        benchmark_id: str | None = None,
    ) -> str:
        """Keep bytes under a kind and a key; returns the artifact's id.

        One that belongs to no run and no benchmark replaces an older such one of the same kind
        and key.

        Raises:
            StorageError: the kind is empty or too long, or there is no such run or benchmark.
        """
        if not 1 <= len(kind) <= MAX_KIND_CHARS:
            raise StorageError(f"kind must have 1 to {MAX_KIND_CHARS} characters, got {kind!r}.")
        artifact_id, key_digest = new_id(), digest(key)
        new = artifacts.insert().values(id=artifact_id, kind=kind, key_digest=key_digest, key=key)
        of = {"run_id": run_id, "benchmark_id": benchmark_id}
        with self._database.transaction() as connection:
            if run_id is None and benchmark_id is None:
                same = artifacts.c.kind == kind, artifacts.c.key_digest == key_digest
                nobodys = (artifacts.c[name].is_(None) for name in of)
                connection.execute(artifacts.delete().where(*same, *nobodys))
            connection.execute(new.values(meta=meta, payload=payload, **of))
        return artifact_id

    def find(
        self,
        kind: str,
        key: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        benchmark_id: str | None = None,
    ) -> tuple[Artifact, ...]:
        """Those of a kind, newest first; None lets every key, run and benchmark through."""
        wanted = {"kind": kind, "run_id": run_id, "benchmark_id": benchmark_id}
        if key is not None:
            wanted["key_digest"] = digest(key)
        conditions = [artifacts.c[k] == value for k, value in wanted.items() if value is not None]
        columns = [artifacts.c[field.name] for field in fields(Artifact)]
        found = sa.select(*columns).where(*conditions)
        newest = found.order_by(artifacts.c.created_at.desc(), artifacts.c.id)
        with self._database.transaction(reading=True) as connection:
            return tuple(Artifact(**row._mapping) for row in connection.execute(newest))

    def payload(self, artifact_id: str) -> bytes:
        """Its bytes.

        Raises:
            UnknownArtifactError: no such artifact.
        """
        wanted = sa.select(artifacts.c.payload).where(artifacts.c.id == artifact_id)
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(wanted).one_or_none()
        if row is None:
            raise UnknownArtifactError(f"No artifact {artifact_id!r:.80} is in the log.")
        return bytes(row.payload)

    def delete(self, artifact_id: str) -> None:
        """Remove it for good.

        Raises:
            UnknownArtifactError: no such artifact.
        """
        with self._database.transaction() as connection:
            gone = connection.execute(artifacts.delete().where(artifacts.c.id == artifact_id))
            if gone.rowcount == 0:
                raise UnknownArtifactError(f"No artifact {artifact_id!r:.80} is in the log.")
