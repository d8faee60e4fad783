"""Sweeps of one server: started, watched, stopped, gone on with, forgotten.

page ── start ──► job, a thread of its own ── one measurement per trial ──► the engine's queue
                      │ trials                                (other runs go between trials)
                      ▼
                  Optuna's tables ◄── page asks once a second, in any tab, after any reload
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PlaygroundError
from playground.experiments.cluster import workers_of
from playground.experiments.finished import Pair
from playground.experiments.job import Job, Jobs, State, submit
from playground.experiments.pool import Pool
from playground.experiments.sweep.plan import plan_of_form
from playground.experiments.sweep.point import measure_by, measure_on
from playground.experiments.sweep.report import config_of
from playground.experiments.sweep.run import RunningTrial, run_sweep
from playground.experiments.sweep.store import Sweep, SweepStore
from playground.host.environment import environment
from playground.host.runner import ClosingError, EngineHost
from storage import StorageError

STATES: dict[str, State] = {"completed": "completed", "stopped": "cancelled"}


class Sweeps:
    """Sweeps of one server: at most one runs at a time."""

    def __init__(self, host: EngineHost) -> None:
        self.catalog, self.menu = host.catalog, host.menu
        self._log = host.log
        self._host = host
        self._jobs = Jobs(host)
        self._lock = threading.Lock()
        self._store: SweepStore | None = None
        host.before_close(self.close)

    @property
    def store(self) -> SweepStore:
        """Opened when it is first needed."""
        with self._lock:
            if self._store is None:
                self._store = SweepStore.beside(self._log, self.catalog.types)
            return self._store

    def close(self) -> None:
        """Stop what runs, wait for it, give the database back."""
        self._jobs.close()
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def start(self, form: Mapping[str, Any], name: str = "", pool: Pool | None = None) -> str:
        """Begin a sweep and run it, here or by workers; returns its name."""
        plan = plan_of_form(self.catalog, form)
        return self._launch(lambda store: store.create(plan, name or None), pool)

    def resume(self, name: str, trials: int | None = None, pool: Pool | None = None) -> str:
        """Go on with a sweep."""
        return self._launch(lambda store: store.reopen(name, trials), pool)

    def stop(self, name: str) -> None:
        """End a sweep that this server runs; it can be gone on with."""
        job = self._jobs.get(name)
        if job is None:
            raise ConfigError(f"Another server runs sweep {name}. Stop it there.")
        job.cancel()

    def delete(self, name: str) -> None:
        """Forget a sweep that does not run. Its runs stay in the log."""
        self.store.delete(name)

    def job(self, name: str) -> Job | None:
        """What runs a sweep, if this server does."""
        return self._jobs.get(name)

    def use(self, name: str, number: int | None) -> dict[str, Any]:
        """A trial's target, method and settings, for the form of another page."""
        sweep = self.store.load(name)
        plan = sweep.plan
        start = self.catalog.method(plan.method).config.model_dump(mode="json")
        own = config_of(sweep, number).model_dump(mode="json")
        changed = {key: value for key, value in own.items() if start.get(key) != value}
        return {"target": plan.target.name, "method": plan.method, "settings": changed}

    # ---- running

    def _launch(self, make: Callable[[SweepStore], Sweep], pool: Pool | None) -> str:
        store = self.store
        with self._lock:
            running = next(iter(self._jobs.running()), None)
            if running is not None:
                raise ConfigError(
                    f"Sweep {running.id} is running. Stop it, or wait until it is done."
                )
            sweep = make(store)
            sweep.claim()
            job = Job(sweep.name, owner=f"sweep {sweep.name}")
            try:
                run = self._run if pool is None else partial(self._run_by_workers, pool)
                self._jobs.start(job, lambda: lambda: STATES.get(run(job, sweep), "failed"))
            except ClosingError:
                sweep.release("stopped")
                raise
        return sweep.name

    def _run_by_workers(self, pool: Pool, job: Job, sweep: Sweep) -> str:
        callbacks: dict[str, Any] = {"tell": job.tell, "cancelled": job.cancelled}
        fault = "The sweep's workers could not be started; the program's log says why."
        try:
            with workers_of(self._host, job, pool, sweep.plan, one_device=True) as running:
                sweep.check_target(running.environment)
                measure = measure_by(running, sweep.plan)
                return run_sweep(sweep, measure, parallel=running.size, **callbacks)
        except CancelledError:
            sweep.release("stopped")
            return "stopped"
        except (PlaygroundError, StorageError) as error:
            fault = str(error)
            raise
        finally:
            if sweep.claimed:  # it never began
                sweep.release("failed", fault)

    def _run(self, job: Job, sweep: Sweep) -> str:
        plan = sweep.plan

        def measure(config: MethodConfig, run_group: str, trial: RunningTrial) -> Sequence[Pair]:
            """One point as one measurement: other runs go between trials."""
            trial.say(f"loading {plan.target.title or plan.target.name}")
            try:
                return submit(
                    self._host,
                    job,
                    plan,
                    lambda bench: measure_on(bench, self._log, plan)(config, run_group, trial),
                    check=lambda target: sweep.check_target(environment(target)),
                    patient=True,
                )()
            except (CancelledError, ClosingError):
                job.cancel()
                return []

        return run_sweep(sweep, measure, tell=job.tell, cancelled=job.cancelled)
