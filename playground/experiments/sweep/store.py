"""Where sweeps are kept: each a row of the run log, its trials in Optuna's tables beside it.

Optuna versions its tables in a table `alembic_version`, as the run log does, so the two cannot
share a name space. A sweep's study is named by the id of its row.

| run log | trials of sweeps |
|---|---|
| SQLite file `runs.sqlite3` | SQLite file `runs.sweeps.sqlite3` beside it |
| PostgreSQL | same database, schema `sweeps` |
| in memory | in memory |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from filelock import FileLock
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from engine.errors import ConfigError
from playground.experiments.plan import Types
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.trials import Trial, by_record
from storage import Benchmark, BenchmarkHead, RunLog, StorageError
from storage.dialects import advisory_lock, engine_options, refuse_once_removed, shown

MAX_NAME = 80
MAX_LISTED = 1000
TRIALS = "trials"
"""Attribute of a study: how many trials the sweep has, if not as planned."""
SCHEMA = "sweeps"
BUSY_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """A sweep as the log has it; its trials are read anew each time."""

    row: Benchmark
    plan: SweepPlan
    study: optuna.Study

    @property
    def fault(self) -> str:
        return str(self.row.summary.get("error") or "")

    def trials(self) -> list[Trial]:
        """Every trial whose point is drawn, by number."""
        num_varied = len(self.plan.chooser.varied)
        with database_errors():
            trials = by_record(self.study.get_trials(deepcopy=False))
        return [trial for trial in trials.values() if len(trial.point) == num_varied]


class SweepStore:
    """The sweeps of a run log; safe to use from several threads and processes."""

    def __init__(self, log: RunLog, types: Types | None = None) -> None:
        """`types` are the methods that a sweep may name, by default all.

        Raises:
            StorageError: the database refused.
        """
        self.log, self._types = log, types
        self._storage = open_storage(log.url)

    def close(self) -> None:
        self._storage.remove_session()
        if isinstance(self._storage, RDBStorage):
            self._storage.engine.dispose()

    def study(self, sweep_id: str) -> optuna.Study:
        """The trials of a sweep; made when they are first asked for."""
        with database_errors():
            try:
                return optuna.load_study(storage=self._storage, study_name=sweep_id)
            except KeyError:
                return optuna.create_study(
                    storage=self._storage,
                    study_name=sweep_id,
                    direction="maximize",
                    load_if_exists=True,
                )

    def heads(self) -> tuple[BenchmarkHead, ...]:
        """The newest sweeps, newest first."""
        return self.log.benchmarks.list(MAX_LISTED, sweeps=True)

    def load(self, key: str) -> StoredSweep:
        """A sweep by its id, or the newest of this name."""
        row = self.log.benchmarks.get(key)
        if row is None or row.plan.get("kind") != "sweep":
            heads = self.heads()
            match = next((head for head in heads if head.name == key), None)
            row = None if match is None else self.log.benchmarks.get(match.id)
            if row is None:
                known = ", ".join(head.name for head in heads[:8]) or "none yet"
                raise ConfigError(f"No sweep is named {key!r:.100}. The newest: {known}.")
        plan, study = SweepPlan.stored(row.plan, self._types), self.study(row.id)
        with database_errors():
            trials = study.user_attrs.get(TRIALS)
        return StoredSweep(row, plan if trials is None else plan.with_trials(trials), study)

    def reopen(self, key: str, trials: int | None = None) -> StoredSweep:
        """A sweep to go on with; `trials` raises how many a search measures."""
        sweep = self.load(key)
        name, planned = sweep.row.name, sweep.plan.chooser.trials
        if sweep.row.status == "running":
            raise ConfigError(
                f"Sweep {name} is running already. Stop it first, or wait until it is done."
            )
        if trials is None:
            return sweep
        if sweep.plan.chooser.mode == "grid":
            raise ConfigError(
                f"Sweep {name} is a grid, so its number of trials is fixed. Leave out --trials."
            )
        if trials < planned:
            raise ConfigError(
                f"trials must be at least {planned}, as in the sweep so far, got {trials}."
            )
        with database_errors():
            sweep.study.set_user_attr(TRIALS, trials)
        return self.load(sweep.row.id)

    def delete(self, key: str) -> None:
        """Forget a sweep; the runs that it wrote stay in the run log."""
        row = self.load(key).row
        if row.status == "running":
            raise ConfigError(f"Sweep {row.name} is running. Stop it first.")
        self.log.benchmarks.delete(row.id)
        with database_errors():
            optuna.delete_study(storage=self._storage, study_name=row.id)

    def copy_from(self, source: SweepStore) -> int:
        """Copy the trials of sweeps that are over, whose rows are here; returns of how many.

        Those of a sweep that has more trials by now are copied anew.
        """
        with database_errors():
            studies = optuna.get_all_study_summaries(self._storage, include_best_trial=False)
            sizes = {one.study_name: one.n_trials for one in studies}
            copied = 0
            for head in source.heads():
                study = source.study(head.id)
                if head.status == "running" or sizes.get(head.id, 0) >= len(study.trials):
                    continue
                if head.id in sizes:
                    optuna.delete_study(storage=self._storage, study_name=head.id)
                optuna.copy_study(
                    from_study_name=head.id, from_storage=source._storage, to_storage=self._storage
                )
                copied += 1
        return copied


def check_name(name: str) -> None:
    """Raises ConfigError: no sweep may be called so."""
    if not 0 < len(name.strip()) <= MAX_NAME or not name.isprintable():
        raise ConfigError(f"name must have 1 to {MAX_NAME} characters, got {name!r:.100}.")


@contextmanager
def database_errors() -> Iterator[None]:
    """Optuna's and the driver's errors as ours.

    Raises:
        StorageError: the database refused.
    """
    try:
        yield
    except (OptunaError, sa.exc.SQLAlchemyError, TimeoutError) as error:
        cause = error.__cause__ or error
        reason = next(iter(str(getattr(cause, "orig", None) or cause).splitlines()), "")
        raise StorageError(
            f"The sweeps' database cannot be used: {reason}. Check that it is reachable."
        ) from error


# ---- Optuna's storage beside a run log


def open_storage(log_url: sa.URL) -> BaseStorage:
    """Optuna's storage for the sweeps of a run log; made if it is not there.

    Raises:
        StorageError: the database refused, or sweeps cannot be kept in one of its kind.
    """
    logging.getLogger("optuna").setLevel(logging.WARNING)
    backend = log_url.get_backend_name()
    if backend == "sqlite" and log_url.database in (None, "", ":memory:"):
        return InMemoryStorage()
    try:
        if backend == "sqlite":
            return _sqlite(Path(str(log_url.database)))
        if backend == "postgresql":
            return _postgresql(log_url)
    except (sa.exc.SQLAlchemyError, RuntimeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        where = shown(log_url)
        raise StorageError(f"The sweeps beside {where} cannot be used: {reason}") from error
    raise StorageError(
        f"Sweeps are kept in SQLite or PostgreSQL, not in {backend}. Give another --db."
    )


def sqlite_file(log_file: Path) -> Path:
    """`runs.sqlite3` → `runs.sweeps.sqlite3`."""
    return log_file.with_name(f"{log_file.stem}.sweeps{log_file.suffix or '.sqlite3'}")


def _sqlite(log_file: Path) -> RDBStorage:
    file = sqlite_file(log_file)
    url = sa.URL.create("sqlite", database=str(file))
    with process_lock(sa.create_engine(url)):
        storage = _storage(url, {"connect_args": {"timeout": BUSY_TIMEOUT_S}})
    refuse_once_removed(storage.engine, file)
    storage.engine.dispose()  # the connections from now on are prepared
    sa.event.listen(storage.engine, "connect", _prepare_sqlite)
    return storage


@contextmanager
def process_lock(engine: sa.Engine | None) -> Iterator[None]:
    """One process at a time: two that look for tables would both make them."""
    if engine is None:
        yield
    elif engine.dialect.name == "sqlite":
        with FileLock(f"{engine.url.database}.lock", timeout=BUSY_TIMEOUT_S):
            yield
    else:
        with engine.connect() as connection, connection.begin():
            advisory_lock(connection, SCHEMA)
            yield


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Write-ahead log, as for the run log: readers and the writer do not wait for each other."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _postgresql(log_url: sa.URL) -> RDBStorage:
    options = engine_options(log_url)
    engine = sa.create_engine(log_url, **options)
    try:
        with process_lock(engine):
            with engine.begin() as connection:
                connection.execute(sa.schema.CreateSchema(SCHEMA, if_not_exists=True))
            options["connect_args"]["options"] = f"-csearch_path={SCHEMA}"
            return _storage(log_url, options)
    finally:
        engine.dispose()


def _storage(url: sa.URL, options: dict[str, Any]) -> RDBStorage:
    # Optuna formats its URL, so braces in a path or password must be doubled.
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    return RDBStorage(text, engine_kwargs=options)
