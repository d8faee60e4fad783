"""The sweeps of one server: experiments like others, of which one runs at a time."""

from __future__ import annotations

import threading
from typing import Any

from engine.errors import ConfigError
from playground.experiments.pool import Pool
from playground.experiments.service import Experiments
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.report import config_of
from playground.experiments.sweep.search import Sweep
from playground.experiments.sweep.store import SweepStore
from playground.host.runner import EngineHost


class Sweeps(Experiments):
    def __init__(self, host: EngineHost) -> None:
        super().__init__(host)
        self.menu = host.menu
        self._store: SweepStore | None = None
        self._opening = threading.Lock()
        host.before_close(self.close)

    @property
    def store(self) -> SweepStore:
        """Opened when it is first needed."""
        with self._opening:
            if self._store is None:
                self._store = SweepStore(self._log, self.catalog.types)
            return self._store

    def close(self) -> None:
        """Stop what runs, wait for it, give the database back."""
        self._jobs.close()
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None

    def start_sweep(self, plan: SweepPlan, *, name: str = "", pool: Pool | None = None) -> str:
        """Begin a sweep and run it, here or by workers; returns its id."""
        self._check_free()
        sweep = Sweep(self.store, plan)
        self._launch(sweep, pool, lambda: sweep.begin(name))
        return sweep.id

    def resume_sweep(self, key: str, pool: Pool | None = None, trials: int | None = None) -> None:
        """Go on with a sweep; `trials` raises how many it measures."""
        self._check_free()
        stored = self.store.reopen(key, trials)
        sweep = Sweep(self.store, stored.plan, sweep_id=stored.row.id)
        self._launch(sweep, pool, lambda: self._log.benchmarks.resume(sweep.id))

    def _check_free(self) -> None:
        for job in self._jobs.running():
            name = self.store.load(job.id).row.name
            raise ConfigError(f"Sweep {name} is running. Stop it, or wait until it is done.")

    def use(self, key: str, number: int | None) -> dict[str, Any]:
        """A trial's target, method and settings, for the form of another page."""
        sweep = self.store.load(key)
        method = sweep.plan.swept.name
        start = self.catalog.method(method).config.model_dump(mode="json")
        own = config_of(sweep, number).model_dump(mode="json")
        changed = {key: value for key, value in own.items() if start.get(key) != value}
        return {"target": sweep.plan.target.name, "method": method, "settings": changed}
