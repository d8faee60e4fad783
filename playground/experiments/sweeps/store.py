"""The sweeps of one run log: created, found again, claimed by the process that runs them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import optuna
import sqlalchemy as sa
from optuna.exceptions import DuplicatedStudyError, OptunaError
from optuna.storages import BaseStorage

from engine.errors import ConfigError
from playground.experiments.bench.plan import Types
from playground.experiments.sweeps.place import close_place, open_place
from playground.experiments.sweeps.plan import SweepPlan
from playground.experiments.sweeps.trials import Trial, read_trials
from storage import RunLog, StorageError
from storage import owner as processes

Status = Literal["running", "completed", "stopped", "failed", "interrupted"]
"""`interrupted`: its process died. All but a running or completed one can be gone on with."""
PLAN, STATUS, OWNER, HEARTBEAT, CLAIM = "plan", "status", "owner", "heartbeat", "claim"
CREATED, FAULT, REFERENCE, SWEEP_ID = "created", "fault", "reference_tok_s", "id"
"""Names of the attributes that a sweep's study carries."""
MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class SweepHead:
    """A row of the list of sweeps."""

    name: str
    status: Status
    created_at: str
    """ISO, UTC."""
    title: str
    objective: str


class Sweep:
    """One stored sweep. Every property is read anew."""

    def __init__(self, study: optuna.Study, plan: SweepPlan) -> None:
        self.study = study
        self.plan = plan

    @property
    def name(self) -> str:
        return self.study.study_name

    @property
    def attributes(self) -> dict[str, Any]:
        with database_errors():
            return self.study.user_attrs

    def trials(self) -> list[Trial]:
        """Every trial that has begun, by number."""
        with database_errors():
            return read_trials(self.study.get_trials(deepcopy=False))

    def write(self, key: str, value: Any) -> None:
        with database_errors():
            self.study.set_user_attr(key, value)

    def heartbeat(self) -> None:
        """A sign of life, for other machines on the same database."""
        self.write(HEARTBEAT, processes.now().isoformat())

    def claim(self) -> None:
        """Make this process the one that runs it.

        Raises:
            ConfigError: it is running already, here or elsewhere.
        """
        self.check_free()
        token = secrets.token_hex(8)
        self.write(CLAIM, token)
        self.write(OWNER, processes.this_process())
        self.heartbeat()
        self.write(FAULT, "")
        self.write(STATUS, "running")
        if self.attributes[CLAIM] != token:
            raise ConfigError(f"Sweep {self.name} was started by another process just now.")

    def check_free(self) -> None:
        """Raises ConfigError: it is running, here or elsewhere."""
        if status_of(self.attributes) == "running":
            raise ConfigError(
                f"Sweep {self.name} is running already. Stop it first, or wait until it is done."
            )

    def release(self, status: Status, fault: str = "") -> None:
        """It is not running any more."""
        self.write(FAULT, fault)
        self.write(STATUS, status)


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
        """`types` are the methods that a sweep may name, all of the engine by default."""
        self._storage = storage
        self._types = types

    @classmethod
    def beside(cls, log: RunLog, types: Types | None = None) -> SweepStore:
        """The sweeps beside a run log.

        Raises:
            StorageError: the database refused.
        """
        return cls(open_place(log.url), types)

    def close(self) -> None:
        close_place(self._storage)

    def create(self, name: str, plan: SweepPlan) -> Sweep:
        """Write a sweep down; nothing is run yet.

        Raises:
            ConfigError: the plan cannot be run, or the name is taken, empty or too long.
        """
        plan.check()
        if not 0 < len(name.strip()) <= MAX_NAME or not name.isprintable():
            raise ConfigError(f"name must have 1 to {MAX_NAME} characters, got {name!r:.100}.")
        with database_errors():
            try:
                study = optuna.create_study(
                    storage=self._storage, study_name=name, direction="maximize"
                )
            except DuplicatedStudyError as error:
                raise ConfigError(
                    f"A sweep named {name} is there already. Resume it, or give another name."
                ) from error
            study.set_user_attr(SWEEP_ID, secrets.token_hex(6))
            study.set_user_attr(CREATED, datetime.now(UTC).isoformat(timespec="seconds"))
            study.set_user_attr(STATUS, "stopped")
            study.set_user_attr(PLAN, plan.to_dict())
        return Sweep(study, plan)

    def load(self, name: str) -> Sweep:
        """A sweep by name.

        Raises:
            ConfigError: there is none, or it names a method that is not here.
        """
        with database_errors():
            try:
                study = optuna.load_study(storage=self._storage, study_name=name)
            except KeyError:
                study = None
            plan = None if study is None else study.user_attrs.get(PLAN)
        if study is None or plan is None:
            known = ", ".join(head.name for head in self.heads()[:8]) or "none yet"
            raise ConfigError(f"No sweep is named {name!r:.100}. The newest: {known}.")
        return Sweep(study, SweepPlan.from_dict(plan, self._types))

    def heads(self) -> list[SweepHead]:
        """All sweeps, newest first."""
        with database_errors():
            found = optuna.get_all_study_summaries(self._storage, include_best_trial=False)
        heads = [
            SweepHead(
                summary.study_name,
                status_of(attributes),
                attributes[CREATED],
                attributes[PLAN]["title"],
                attributes[PLAN]["objective"],
            )
            for summary in found
            if PLAN in (attributes := summary.user_attrs)
        ]
        return sorted(heads, key=lambda head: head.created_at, reverse=True)

    def delete(self, name: str) -> None:
        """Forget a sweep; the runs that it wrote stay in the run log.

        Raises:
            ConfigError: there is none, or it is running.
        """
        sweep = self.load(name)
        if status_of(sweep.attributes) == "running":
            raise ConfigError(f"Sweep {name} is running. Stop it first.")
        with database_errors():
            optuna.delete_study(storage=self._storage, study_name=name)

    def free_name(self, wanted: str) -> str:
        """The name, or the name with the first number behind it that is free."""
        with database_errors():
            taken = set(optuna.get_all_study_names(self._storage))
        names = (wanted if i == 1 else f"{wanted}-{i}" for i in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


@contextmanager
def database_errors() -> Iterator[None]:
    """Optuna's and the driver's errors as ours.

    Raises:
        StorageError: the database refused.
    """
    try:
        yield
    except (OptunaError, sa.exc.SQLAlchemyError) as error:
        cause = error.__cause__ or error
        reason = next(iter(str(getattr(cause, "orig", None) or cause).splitlines()), "")
        raise StorageError(
            f"The sweeps' database cannot be used: {reason}. Check that it is reachable."
        ) from error
