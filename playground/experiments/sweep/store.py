"""The sweeps of one run log: created, found again, claimed by the process that runs them.

They are kept in Optuna's own tables, beside the run log and never among its tables: Optuna versions
its tables in a table `alembic_version`, as the run log does, so the two cannot share a name space.

| run log | sweeps |
|---|---|
| SQLite file `runs.sqlite3` | SQLite file `runs.sweeps.sqlite3` beside it |
| PostgreSQL | same database, schema `sweeps` |
| in memory | in memory |
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
import sqlalchemy as sa
from filelock import FileLock
from optuna.exceptions import DuplicatedStudyError, OptunaError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from engine.errors import ConfigError
from playground.experiments.measurement import check_same_target
from playground.experiments.plan import Types
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.trials import Trial, read_trials
from storage import RunLog, StorageError
from storage import owner as processes
from storage.dialects import advisory_lock, engine_options, refuse_once_removed, shown

Status = Literal["running", "completed", "stopped", "failed", "interrupted"]
"""`interrupted`: its process died. All but a running or completed one can be gone on with."""
PLAN, STATUS, OWNER, HEARTBEAT = "plan", "status", "owner", "heartbeat"
CREATED, FAULT, REFERENCE, SWEEP_ID = "created", "fault", "reference_tok_s", "id"
ENVIRONMENT = "environment"
"""Names of the attributes that a sweep's study carries."""
MAX_NAME = 80
SCHEMA = "sweeps"
BUSY_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class SweepHead:
    """A row of the list of sweeps; `created_at` is ISO, UTC."""

    name: str
    status: Status
    created_at: str
    title: str
    objective: str


class Sweep:
    """One stored sweep. Every property is read anew."""

    def __init__(self, study: optuna.Study, plan: SweepPlan, engine: sa.Engine | None) -> None:
        self.study = study
        self.plan = plan
        self._engine = engine
        self.claimed = False

    @property
    def name(self) -> str:
        return self.study.study_name

    @property
    def attributes(self) -> dict[str, Any]:
        with database_errors():
            return self.study.user_attrs

    @property
    def status(self) -> Status:
        return status_of(self.attributes)

    def trials(self) -> list[Trial]:
        """Every trial that has begun, by number."""
        with database_errors():
            return read_trials(self.study.get_trials(deepcopy=False))

    def write(self, attributes: Mapping[str, Any]) -> None:
        with database_errors():
            for key, value in attributes.items():
                self.study.set_user_attr(key, value)

    def heartbeat(self) -> None:
        """A sign of life, for other machines on the same database."""
        self.write({HEARTBEAT: processes.now().isoformat()})

    def claim(self) -> None:
        """Make this process the one that runs it."""
        with database_errors(), _turn(self._engine):
            self.check_free()
            self.write({OWNER: processes.this_process()})
            self.heartbeat()
            self.write({FAULT: "", STATUS: "running"})
        self.claimed = True

    def check_free(self) -> None:
        """Raises ConfigError: it is running, here or elsewhere."""
        if self.status == "running":
            raise ConfigError(
                f"Sweep {self.name} is running already. Stop it first, or wait until it is done."
            )

    def release(self, status: Status, fault: str = "") -> None:
        """It is not running any more."""
        self.claimed = False
        self.write({FAULT: fault, STATUS: status})

    def check_target(self, now: Mapping[str, Any]) -> None:
        """Note where the sweep runs; refuse to go on on other weights or in another dtype."""
        stored = self.attributes.get(ENVIRONMENT)
        if stored is None:
            self.write({ENVIRONMENT: dict(now)})
        else:
            check_same_target(stored, now)


def status_of(attributes: Mapping[str, Any]) -> Status:
    """A sweep's status; one that its process left running is interrupted."""
    status: Status = attributes[STATUS]
    if status != "running":
        return status
    heartbeat = datetime.fromisoformat(attributes[HEARTBEAT])
    alive = processes.is_alive(attributes[OWNER], heartbeat, processes.now())
    return "running" if alive else "interrupted"


class SweepStore:
    """Sweeps in Optuna's tables; safe to use from several threads and processes."""

    def __init__(self, storage: BaseStorage, types: Types | None = None) -> None:
        """`types` are the methods that a sweep may name, by default all."""
        self._storage = storage
        self._engine = storage.engine if isinstance(storage, RDBStorage) else None
        self._types = types

    @classmethod
    def beside(cls, log: RunLog, types: Types | None = None) -> SweepStore:
        """The sweeps beside a run log.

        Raises:
            StorageError: the database refused.
        """
        return cls(open_storage(log.url), types)

    def close(self) -> None:
        close_storage(self._storage)

    def create(self, plan: SweepPlan, name: str | None = None) -> Sweep:
        """Write a sweep down; nothing is run yet. Without a name it gets one of its own."""
        if name is None:
            name = self.free_name(default_name(plan, datetime.now()))
        if not 0 < len(name.strip()) <= MAX_NAME or not name.isprintable():
            raise ConfigError(f"name must have 1 to {MAX_NAME} characters, got {name!r:.100}.")
        with database_errors(), _turn(self._engine):
            try:
                study = self._new_study(name)
            except DuplicatedStudyError as error:
                raise ConfigError(
                    f"A sweep named {name} already exists. Resume it, or give another name."
                ) from error
            sweep = Sweep(study, plan, self._engine)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            sweep.write({SWEEP_ID: secrets.token_hex(6), CREATED: created, STATUS: "stopped"})
            sweep.write({PLAN: plan.to_dict()})  # what has no plan yet is no sweep
        return sweep

    def _new_study(self, name: str) -> optuna.Study:
        """Raises DuplicatedStudyError: there is a sweep of that name."""
        new = partial(
            optuna.create_study, storage=self._storage, study_name=name, direction="maximize"
        )
        try:
            return new()
        except DuplicatedStudyError:
            # It is our turn, so one without a plan was left by a process that died in this place.
            if PLAN in optuna.load_study(storage=self._storage, study_name=name).user_attrs:
                raise
        optuna.delete_study(storage=self._storage, study_name=name)
        return new()

    def load(self, name: str) -> Sweep:
        """A sweep by name."""
        with database_errors():
            try:
                study = optuna.load_study(storage=self._storage, study_name=name)
            except KeyError:
                study = None
            plan = None if study is None else study.user_attrs.get(PLAN)
        if study is None or plan is None:
            known = ", ".join(head.name for head in self.heads()[:8]) or "none yet"
            raise ConfigError(f"No sweep is named {name!r:.100}. The newest: {known}.")
        return Sweep(study, SweepPlan.stored(plan, self._types), self._engine)

    def reopen(self, name: str, trials: int | None = None) -> Sweep:
        """A sweep to go on with; `trials` raises how many a search measures."""
        sweep = self.load(name)
        sweep.check_free()
        if trials is None:
            return sweep
        if sweep.plan.mode == "grid":
            raise ConfigError(
                f"Sweep {name} is a grid, so its number of trials is fixed. Leave out --trials."
            )
        if trials < sweep.plan.trials:
            raise ConfigError(
                f"trials must be at least {sweep.plan.trials}, as in the sweep so far, got "
                f"{trials}."
            )
        sweep.plan = SweepPlan.parse({**dict(sweep.plan), "trials": trials})
        sweep.write({PLAN: sweep.plan.to_dict()})
        return sweep

    def heads(self) -> list[SweepHead]:
        """All sweeps, newest first."""
        with database_errors():
            summaries = optuna.get_all_study_summaries(self._storage, include_best_trial=False)
        heads = [
            SweepHead(
                summary.study_name,
                status_of(attributes),
                attributes[CREATED],
                attributes[PLAN]["title"],
                attributes[PLAN]["objective"],
            )
            for summary in summaries
            if PLAN in (attributes := summary.user_attrs)
        ]
        return sorted(heads, key=lambda head: head.created_at, reverse=True)

    def delete(self, name: str) -> None:
        """Forget a sweep; the runs that it wrote stay in the run log."""
        if self.load(name).status == "running":
            raise ConfigError(f"Sweep {name} is running. Stop it first.")
        with database_errors():
            optuna.delete_study(storage=self._storage, study_name=name)

    def copy_from(self, source: SweepStore) -> int:
        """Copy sweeps that are over, trials and all; returns how many were not here already.

        One that was cut off, or has more trials by now, is copied anew.
        """
        with database_errors():
            summaries = optuna.get_all_study_summaries(self._storage, include_best_trial=False)
            here = {one.user_attrs.get(SWEEP_ID): one for one in summaries}
            theirs = optuna.get_all_study_summaries(source._storage, include_best_trial=False)
            plans = [one for one in theirs if PLAN in one.user_attrs]
            over = [one for one in plans if status_of(one.user_attrs) != "running"]
            copied = 0
            for one in over:
                known = here.get(one.user_attrs[SWEEP_ID])
                if known is not None and known.n_trials >= one.n_trials:
                    continue
                if known is not None:
                    optuna.delete_study(storage=self._storage, study_name=known.study_name)
                optuna.copy_study(
                    from_study_name=one.study_name,
                    from_storage=source._storage,
                    to_storage=self._storage,
                    to_study_name=self.free_name(one.study_name),
                )
                copied += 1
        return copied

    def free_name(self, wanted: str) -> str:
        """The name, or the name with the first number behind it that is free."""
        with database_errors():
            taken = set(optuna.get_all_study_names(self._storage))
        names = (wanted if i == 1 else f"{wanted}-{i}" for i in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


def default_name(plan: SweepPlan, now: datetime) -> str:
    """`ngram-tok_s-1121-0627`."""
    kind = plan.base.decoding_type.lower().replace("_", "-")
    return f"{kind}-{plan.objective}-{now:%m%d-%H%M}"


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


def close_storage(storage: BaseStorage) -> None:
    """Give the connections back."""
    storage.remove_session()
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def sqlite_file(log_file: Path) -> Path:
    """`runs.sqlite3` → `runs.sweeps.sqlite3`."""
    return log_file.with_name(f"{log_file.stem}.sweeps{log_file.suffix or '.sqlite3'}")


def _sqlite(log_file: Path) -> RDBStorage:
    file = sqlite_file(log_file)
    url = sa.URL.create("sqlite", database=str(file))
    with _turn(sa.create_engine(url)):
        storage = _storage(url, {"connect_args": {"timeout": BUSY_TIMEOUT_S}})
    refuse_once_removed(storage.engine, file)
    storage.engine.dispose()  # the connections from now on are prepared
    sa.event.listen(storage.engine, "connect", _prepare_sqlite)
    return storage


@contextmanager
def _turn(engine: sa.Engine | None) -> Iterator[None]:
    """One process at a time: two that look for tables, or whether a sweep is free, both find it."""
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
        with _turn(engine):
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
