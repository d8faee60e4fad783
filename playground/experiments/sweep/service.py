"""The sweeps of one server: experiments like others, of which one runs at a time."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from engine.errors import ConfigError
from playground.experiments.plan import ExperimentPlan
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

    def resume(
        self, benchmark_id: str, pool: Pool | None = None, trials: int | None = None
    ) -> None:
        """Go on with a sweep; `trials` raises how many it measures."""
        stored = self.store.reopen(benchmark_id, trials)
        sweep = self._experiment(stored.plan, benchmark_id=stored.row.id)
        self._launch(sweep, pool, partial(self._log.benchmarks.resume, sweep.id))

    def _experiment(self, plan: ExperimentPlan, **more: Any) -> Sweep:
        assert isinstance(plan, SweepPlan)
        for job in self._jobs.running():
            name = self.store.load(job.id).row.name
            raise ConfigError(f"Sweep {name} is running. Stop it, or wait until it is done.")
        return Sweep(self.store, plan, **more)

    def use(self, key: str, number: int | None) -> dict[str, Any]:
        """A trial's target, method and settings, for the form of another page."""
        sweep = self.store.load(key)
        method = sweep.plan.swept.name
        start = self.catalog.method(method).config.model_dump(mode="json")
        own = config_of(sweep, number).model_dump(mode="json")
        changed = {key: value for key, value in own.items() if start.get(key) != value}
        return {"target": sweep.plan.target.name, "method": method, "settings": changed}
