"""Benchmarks, artifacts (measurements and drawings), and experiments as rows among the runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar

import sqlalchemy as sa

from storage import owner
from storage.database import Database
from storage.filters import conditions, folded_page_of
from storage.query import DETAILS_PAGE, exists, read_summaries
from storage.records import (
    Artifact,
    Benchmark,
    BenchmarkHead,
    ExperimentRow,
    RunPage,
    RunQuery,
    RunSummary,
    StorageError,
    TimedRequest,
    key_values,
)
from storage.schema import artifacts, benchmarks, digest, new_id, now, run_details, runs

Head = TypeVar("Head", bound=BenchmarkHead)
MAX_EXPERIMENTS = 20
"""Newest experiments whose configurations are offered."""
MAX_TIMED = 20_000
"""Requests that are kept for their timing."""


class Benchmarks:
    """The benchmarks of one database; their runs carry the benchmark's id."""

    def __init__(self, database: Database, this_owner: str) -> None:
        self._database = database
        self._owner = this_owner
        self.open_rows = owner.OpenRows(database, benchmarks)

    def begin(self, benchmark_id: str, name: str, plan: Mapping[str, Any]) -> None:
        """Add a benchmark that is about to start."""
        values = {"id": benchmark_id, "kind": str(plan.get("kind", "benchmark")), "name": name}
        new = benchmarks.insert().values(**values, owner=self._owner, plan=plan)
        self.open_rows.begin(benchmark_id, lambda connection, _: connection.execute(new))

    def finish(
        self,
        benchmark_id: str,
        status: Literal["completed", "cancelled", "failed"],
        summary: Mapping[str, Any],
    ) -> None:
        """Write how a benchmark ended. If that fails, the next `begin` marks it as interrupted."""
        values = {"status": status, "summary": summary, "finished_at": now()}
        end = benchmarks.update().where(benchmarks.c.id == benchmark_id).values(values)
        self.open_rows.finish(benchmark_id, lambda connection: connection.execute(end))

    def resume(self, benchmark_id: str) -> Benchmark:
        """Resume a benchmark: it is `running` again and belongs to this process.

        Raises StorageError: no such benchmark, or another process is running it.
        """
        its, time = benchmarks.c.id == benchmark_id, now()
        mine = {"status": "running", "owner": self._owner, "heartbeat_at": time}
        with self._database.transaction() as connection:
            query = sa.select(benchmarks).where(its).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None:
                raise StorageError(f"No benchmark {benchmark_id!r:.80} is in the log.")
            alive = owner.is_alive(row.owner, _last_heartbeat(connection, row), time)
            if row.status == "running" and row.owner != self._owner and alive:
                raise StorageError(
                    f"Benchmark {benchmark_id} is running in another process. Stop it there, or "
                    "wait until it is done."
                )
            connection.execute(benchmarks.update().where(its).values({**mine, "finished_at": None}))
            resumed = connection.execute(_select(Benchmark).where(its)).one()
        self.open_rows.ids.add(benchmark_id)
        return Benchmark(**resumed._mapping)

    def get(self, benchmark_id: str) -> Benchmark | None:
        """One benchmark; None if there is none of this id."""
        return self._read(Benchmark, benchmark_id)

    def head(self, benchmark_id: str) -> BenchmarkHead | None:
        """One benchmark without its plan; None if there is none of this id."""
        return self._read(BenchmarkHead, benchmark_id)

    def _read(self, kind: type[Head], benchmark_id: str) -> Head | None:
        query = _select(kind).where(benchmarks.c.id == benchmark_id)
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else kind(**row._mapping)

    def list(self, limit: int = 50, *, sweeps: bool = False) -> tuple[BenchmarkHead, ...]:
        """The newest benchmarks, or the newest sweeps, newest first."""
        newest = _select(BenchmarkHead).where((benchmarks.c.kind == "sweep") == sweeps)
        newest = newest.order_by(benchmarks.c.created_at.desc(), benchmarks.c.id).limit(limit)
        with self._database.transaction(reading=True) as connection:
            return tuple(BenchmarkHead(**row._mapping) for row in connection.execute(newest))

    def interrupt_dead(self, connection: sa.Connection) -> None:
        """Mark benchmarks whose process has ended as `interrupted`."""
        owner.interrupt_dead(connection, benchmarks, lambda row: _last_heartbeat(connection, row))


def _select(kind: type[BenchmarkHead]) -> sa.Select[Any]:
    return sa.select(*(benchmarks.c[field.name] for field in fields(kind)))


def _last_heartbeat(connection: sa.Connection, row: sa.Row[Any]) -> Any:
    """When the benchmark or one of its runs was last written to."""
    newest = sa.select(sa.func.max(runs.c.heartbeat_at)).where(runs.c.experiment_id == row.id)
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
        benchmark_id: str | None = None,
    ) -> str:
        """Store bytes under a kind and a key; returns the artifact's id.

        Replaces an older artifact of the same kind, key and benchmark.

        Raises StorageError: there is no such benchmark.
        """
        artifact_id = new_id()
        place = {"kind": kind, "key_digest": digest(key), "benchmark_id": benchmark_id}
        new = artifacts.insert().values(id=artifact_id, key=key, meta=meta, payload=payload)

        def write(connection: sa.Connection) -> None:
            same = (artifacts.c[name] == value for name, value in place.items())
            connection.execute(artifacts.delete().where(*same))
            connection.execute(new.values(place))

        self._database.persist(write, lambda c: exists(c, artifacts.c.id == artifact_id))
        return artifact_id

    def find(
        self, kind: str, key: Mapping[str, Any] | None = None, *, benchmark_id: str | None = None
    ) -> tuple[Artifact, ...]:
        """The artifacts of a kind, newest first; None matches any key or benchmark."""
        equal = {"kind": kind, "benchmark_id": benchmark_id}
        if key is not None:
            equal["key_digest"] = digest(key)
        conditions = [artifacts.c[k] == value for k, value in equal.items() if value is not None]
        columns = [artifacts.c[field.name] for field in fields(Artifact)]
        matching = sa.select(*columns).where(*conditions)
        newest = matching.order_by(artifacts.c.created_at.desc(), artifacts.c.id)
        with self._database.transaction(reading=True) as connection:
            return tuple(Artifact(**row._mapping) for row in connection.execute(newest))

    def payload(self, artifact_id: str) -> bytes:
        """Its bytes.

        Raises StorageError: no such artifact.
        """
        query = sa.select(artifacts.c.payload).where(artifacts.c.id == artifact_id)
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StorageError(f"No artifact {artifact_id!r:.80} is in the log.")
        return bytes(row.payload)

    def forget(self, kind: str, key: Mapping[str, Any]) -> bool:
        """Delete the artifacts of a kind and key; whether there were any."""
        same = artifacts.c.kind == kind, artifacts.c.key_digest == digest(key)
        with self._database.transaction() as connection:
            return connection.execute(artifacts.delete().where(*same)).rowcount > 0


# ---- experiments: the requests of each as one row


class Experiments:
    """The experiments of one database: benchmarks, sweeps, comparisons, replays."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._timed: dict[str, TimedRequest] = {}

    def page(self, query: RunQuery) -> RunPage[RunSummary | ExperimentRow]:
        """One page in which the matching requests of an experiment form one row.

        The row is placed like the experiment's first request in the order.

        Raises StorageError: there is no such sort key.
        """
        with self._database.transaction(reading=True) as connection:
            ids, total = folded_page_of(connection, query)
            runs_by_id = {run.id: run for run in read_summaries(connection, ids)}
            heads = {one: run for run in runs_by_id.values() if (one := run.experiment_id)}
            rows = _rows(connection, query, heads)
        page = tuple(rows.get(runs_by_id[i].experiment_id, runs_by_id[i]) for i in ids)
        return RunPage(page, total)

    def newest(self, limit: int = MAX_EXPERIMENTS) -> tuple[str, ...]:
        """Ids of the newest experiments, newest first."""
        newest = sa.func.max(runs.c.created_at).desc()
        ids = sa.select(runs.c.experiment_id).where(runs.c.experiment_id.is_not(None))
        ids = ids.group_by(runs.c.experiment_id).order_by(newest, runs.c.experiment_id)
        with self._database.transaction(reading=True) as connection:
            return tuple(connection.scalars(ids.limit(limit)))

    def timed_requests(self, experiment_ids: Collection[str]) -> list[TimedRequest]:
        """The completed requests of these experiments, oldest first; without those of deleted runs.

        Each is read from the database once, for a completed run never changes.
        """
        known = self._timed
        its = runs.c.experiment_id.in_(experiment_ids), runs.c.configuration != ""
        completed = *its, *conditions(RunQuery(status="completed"))
        ids = sa.select(runs.c.id).where(*completed).order_by(runs.c.created_at, runs.c.id)
        with self._database.transaction(reading=True) as connection:
            found = connection.scalars(ids).all()
            unread = [run_id for run_id in found if run_id not in known]
            new = {one.run_id: one for one in _read_timed(connection, unread)}
        both = {**known, **new}
        self._timed = both if len(both) < MAX_TIMED else {i: both[i] for i in found}
        return [both[run_id] for run_id in found]


def _read_timed(connection: sa.Connection, ids: Sequence[str]) -> Iterator[TimedRequest]:
    """These runs, which are completed requests."""
    rows = sa.select(runs, run_details.c.environment).join_from(runs, run_details)
    for start in range(0, len(ids), DETAILS_PAGE):
        page = rows.where(runs.c.id.in_(ids[start : start + DETAILS_PAGE]))
        for row in connection.execute(page):
            yield TimedRequest.timed(
                row,
                run_id=row.id,
                setup_id=row.setup_id,
                decoding_type=row.decoding_type,
                device=str(row.environment.get("device_name", "")),
                **key_values(row),
            )


def _rows(
    connection: sa.Connection, query: RunQuery, heads: Mapping[str, RunSummary]
) -> dict[str | None, ExperimentRow]:
    """The experiments with one of their runs each, by id; only matching requests are counted."""
    completed = sa.case((runs.c.status == "completed", 1), else_=0)
    counts = sa.select(
        runs.c.experiment_id.label("id"),
        sa.func.coalesce(sa.func.max(benchmarks.c.name), "").label("name"),
        sa.func.count().label("num_runs"),
        sa.func.sum(completed).label("num_completed"),
        sa.func.max(runs.c.created_at).label("newest_at"),
    ).outerjoin_from(runs, benchmarks, benchmarks.c.id == runs.c.experiment_id)
    matching = counts.where(runs.c.experiment_id.in_(heads), *conditions(query))
    return {
        row.id: ExperimentRow(
            **row._mapping, kind=heads[row.id].kind or "benchmark", example=heads[row.id]
        )
        for row in connection.execute(matching.group_by(runs.c.experiment_id))
    }
