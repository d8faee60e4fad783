"""Storage of sweeps: each is a row of the run log, its trials are artifacts of that row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from engine.errors import ConfigError
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.trials import Trial
from playground.host.catalog import MethodTypes
from storage import Benchmark, BenchmarkHead, RunLog

MAX_LISTED = 1000
TRIAL, EXTENSION = "trial", "more trials"
"""Kinds of artifacts of a sweep: a trial, and a number of trials that replaces the plan's."""
_TRIAL = TypeAdapter(Trial)


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """A sweep as the log has it; its trials are those that have begun, by number."""

    row: Benchmark
    plan: SweepPlan
    trials: tuple[Trial, ...]

    @property
    def fault(self) -> str:
        return str(self.row.summary.get("error") or "")


class SweepStore:
    """The sweeps of a run log; `types` are the methods that they may name, by default all."""

    def __init__(self, log: RunLog, types: MethodTypes | None = None) -> None:
        self.log, self._types = log, types

    def trials(self, sweep_id: str) -> tuple[Trial, ...]:
        """Those that have begun, by number; a copied log may have a trial twice."""
        oldest_first = reversed(self.log.artifacts.find(TRIAL, benchmark_id=sweep_id))
        trials = {one.meta["number"]: _TRIAL.validate_python(one.meta) for one in oldest_first}
        return tuple(trials[number] for number in sorted(trials))

    def save(self, sweep_id: str, trial: Trial) -> None:
        """Store a trial in place of its earlier version."""
        self._put(sweep_id, TRIAL, {"number": trial.number}, asdict(trial))

    def _put(
        self, sweep_id: str, kind: str, key: Mapping[str, int], meta: Mapping[str, Any]
    ) -> None:
        self.log.artifacts.put(kind, key, meta=meta, payload=b"", benchmark_id=sweep_id)

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
        plan = SweepPlan.stored(row.plan, self._types)
        if extensions := self.log.artifacts.find(EXTENSION, benchmark_id=row.id):
            plan = plan.with_trials(extensions[0].meta["trials"])
        return StoredSweep(row, plan, self.trials(row.id))

    def reopen(self, key: str, trials: int | None = None) -> StoredSweep:
        """A sweep to resume; `trials` raises the number of trials of a search."""
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
        self._put(sweep.row.id, EXTENSION, {}, {"trials": trials})
        return self.load(sweep.row.id)

    def delete(self, key: str) -> None:
        """Delete a sweep; its runs stay in the run log."""
        row = self.load(key).row
        if row.status == "running":
            raise ConfigError(f"Sweep {row.name} is running. Stop it first.")
        self.log.benchmarks.delete(row.id)
