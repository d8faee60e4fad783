"""Benchmarks, artifacts (measurements and drawings), and experiments as rows among the runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar

import sqlalchemy as sa

from storage import owner
from storage.database import Database
from storage.filters import LARGEST, conditions, folded_page_of
from storage.query import exists, read_summaries
from storage.records import (
    PLAIN,
    Artifact,
    Benchmark,
    BenchmarkHead,
    DecodeTotals,
    ExperimentRow,
    RunPage,
    RunQuery,
    RunSummary,
    SpeedupCounts,
    StorageError,
)
from storage.schema import IS_SWEEP, artifacts, benchmarks, digest, new_id, now, runs

Head = TypeVar("Head", bound=BenchmarkHead)
MAX_EXPERIMENTS = 20
"""Newest experiments whose configurations are offered."""


class Benchmarks:
    """The benchmarks of one database; their runs carry the benchmark's id."""

    def __init__(self, database: Database, this_owner: str) -> None:
        self._database = database
        self._owner = this_owner
        self.open_rows = owner.OpenRows(database, benchmarks)

    def begin(self, benchmark_id: str, name: str, plan: Mapping[str, Any]) -> None:
        """Add a benchmark that is about to start."""
        new = benchmarks.insert().values(id=benchmark_id, owner=self._owner, name=name, plan=plan)
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
        newest = _select(BenchmarkHead).where(IS_SWEEP if sweeps else ~IS_SWEEP)
        newest = newest.order_by(benchmarks.c.created_at.desc(), benchmarks.c.id).limit(limit)
        with self._database.transaction(reading=True) as connection:
            return tuple(BenchmarkHead(**row._mapping) for row in connection.execute(newest))

    def interrupt_dead(self, connection: sa.Connection) -> None:
        """Mark benchmarks whose process has ended as `interrupted`."""
        owner.interrupt_dead(connection, benchmarks, lambda row: _last_heartbeat(connection, row))


def _select(kind: type[BenchmarkHead]) -> sa.Select[Any]:
    return sa.select(*(benchmarks.c[field.name] for field in fields(kind)))


def _last_heartbeat(connection: sa.Connection, row: sa.Row[Any]) -> Any:
    """When the benchmark or one of its runs was last written to; a sweep's carry a trial's id."""
    own = sa.or_(runs.c.benchmark_id == row.id, runs.c.experiment == f"sweep:{row.id}")
    newest = sa.select(sa.func.max(runs.c.heartbeat_at)).where(own)
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

TIMED = sa.and_(
    runs.c.status == "completed",
    runs.c.decode_s > 0,
    runs.c.decode_s <= LARGEST,
    runs.c.deleted_at.is_(None),
)
"""Runs that the totals cover."""
TOTALS = [
    sa.func.sum(sa.case((TIMED, value), else_=0)).label(name)
    for name, value in {
        "num_timed": sa.literal(1),
        "num_tokens": runs.c.num_new_tokens - 1,
        "decode_s": runs.c.decode_s,
        "num_steps": runs.c.num_steps,
    }.items()
]


class Experiments:
    """The experiments of one database: benchmarks, sweeps, comparisons, replays."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, query: RunQuery) -> RunPage[RunSummary | ExperimentRow]:
        """One page in which the matching requests of an experiment form one row.

        The row is placed like the experiment's first request in the order.

        Raises StorageError: there is no such sort key.
        """
        with self._database.transaction(reading=True) as connection:
            ids, total = folded_page_of(connection, query)
            runs_by_id = {run.id: run for run in read_summaries(connection, ids)}
            rows = _rows(connection, query, [run for run in runs_by_id.values() if run.experiment])
        page = tuple(rows.get(runs_by_id[i].experiment, runs_by_id[i]) for i in ids)
        return RunPage(page, total)

    def setups(self) -> list[tuple[SpeedupCounts, RunSummary]]:
        """The configurations that the newest experiments compared with plain decoding.

        Each has one of its runs as an example. If several experiments measured one, the newest
        counts.
        """
        with self._database.transaction(reading=True) as connection:
            newest = (
                sa.select(runs.c.experiment)
                .where(runs.c.experiment.is_not(None))
                .group_by(runs.c.experiment)
                .order_by(sa.func.max(runs.c.created_at).desc(), runs.c.experiment)
                .limit(MAX_EXPERIMENTS)
            )
            keys = list(connection.scalars(newest))
            pairs = _pairs(_setups(connection, keys, sa.false()))
            pairs.sort(key=lambda pair: -keys.index(pair[0].experiment))
            newest_pairs = {setup.setup_id: (setup, counts) for setup, counts in pairs}
            ids = [setup.run_id for setup, _ in newest_pairs.values()]
            examples = read_summaries(connection, ids)
        return [(newest_pairs[run.setup_id][1], run) for run in examples]


def _rows(
    connection: sa.Connection, query: RunQuery, heads: Sequence[RunSummary]
) -> dict[str | None, ExperimentRow]:
    """The experiments of these runs, by key; only matching requests are counted."""
    keys = [str(run.experiment) for run in heads]
    ids = [key.partition(":")[2] for key in keys]
    named = sa.select(benchmarks.c.id, benchmarks.c.name).where(benchmarks.c.id.in_(ids))
    names = {row.id: row.name for row in connection.execute(named)}
    setups: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    for setup in _setups(connection, keys, sa.and_(*conditions(query))):
        setups[setup.experiment].append(setup)
    return {
        run.experiment: ExperimentRow(
            key=key,
            name=names.get(key.partition(":")[2], ""),
            num_runs=sum(setup.num_runs for setup in setups[key]),
            num_completed=sum(setup.num_completed for setup in setups[key]),
            newest_at=max(setup.newest_at for setup in setups[key] if setup.newest_at),
            speedups=tuple(counts for _, counts in _pairs(setups[key])),
            example=run,
        )
        for run, key in zip(heads, keys, strict=True)
    }


def _setups(
    connection: sa.Connection, experiments: Sequence[str], counted: sa.ColumnElement[bool]
) -> Sequence[sa.Row[Any]]:
    """The configurations of these experiments, with sums over their runs.

    Args:
        counted: the runs that `num_runs`, `num_completed` and `newest_at` cover. The totals cover
            all `num_timed` runs that were completed and not deleted.
    """
    completed = sa.and_(counted, runs.c.status == "completed")
    keys = (runs.c.experiment, runs.c.benchmark_id, runs.c.decoding_type, runs.c.setup_id)
    sums = sa.select(
        *keys,
        sa.func.sum(sa.case((counted, 1), else_=0)).label("num_runs"),
        sa.func.sum(sa.case((completed, 1), else_=0)).label("num_completed"),
        sa.func.max(sa.case((counted, runs.c.created_at))).label("newest_at"),
        sa.func.max(sa.case((TIMED, runs.c.id))).label("run_id"),
        *TOTALS,
    )
    in_experiments = runs.c.experiment.in_(experiments)
    return connection.execute(sums.where(in_experiments).group_by(*keys)).all()


def _pairs(setups: Sequence[sa.Row[Any]]) -> list[tuple[sa.Row[Any], SpeedupCounts]]:
    """The configurations of experiments that can be compared with plain decoding.

    Sums over different requests cannot be compared: a configuration counts if it completed as many
    requests as plain decoding; in a sweep, as many as plain decoding in its trial.
    """
    plain = {
        (row.experiment, row.benchmark_id): row for row in setups if row.decoding_type == PLAIN
    }
    pairs = ((row, plain.get((row.experiment, row.benchmark_id))) for row in setups)
    return [
        (row, SpeedupCounts(_totals_of(row), _totals_of(base)))
        for row, base in pairs
        if base and row.decoding_type != PLAIN and 0 < row.num_timed == base.num_timed
    ]


def _totals_of(row: sa.Row[Any]) -> DecodeTotals:
    """The sums of `TOTALS` in a row."""
    return DecodeTotals(row.num_tokens, row.decode_s, row.num_steps)
