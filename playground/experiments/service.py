"""The experiments of one server: start, watch, stop, resume, and read their reports."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.errors import ConfigError, validate_choice
from playground.experiments.cluster import PoolConfig, workers
from playground.experiments.comparison import Comparison
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Summary
from playground.experiments.plan import ExperimentPlan, SweepPlan
from playground.experiments.prompts import read_suite_text
from playground.experiments.report.export import FILES
from playground.experiments.report.report import (
    Results,
    read_results,
    stored_experiment,
    unknown_experiment,
)
from playground.experiments.statistics import finished_requests
from playground.experiments.sweep.report import (
    read_sweep,
    stored_sweep,
    stored_trials,
)
from playground.experiments.sweep.search import Sweep
from playground.experiments.worker import WorkerConfig
from playground.host.bounded import BoundedCache
from playground.host.runner import EngineHost
from playground.host.task import TaskState, TaskThreads, time_left
from presets import PromptSuite
from storage import BenchmarkHead, RunQuery

MAX_FILES = 16
MAX_LISTED = 100
MAX_REPORT_BYTES = 256_000_000
"""Memory for cached reports."""
BYTES_PER_REQUEST = 10_000
Report = tuple[str, Results]
"""With its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentState(TaskState):
    """The state of an experiment, and its report; of a sweep `SweepResults`."""

    results: Any


class Experiments:
    def __init__(self, host: EngineHost) -> None:
        self.catalog = host.catalog
        self._log, self._host = host.log, host
        self._tasks = TaskThreads[Experiment]()
        self.job, self.stop = self._tasks.get, self._tasks.stop
        self.cancel_owner, self.close = self._tasks.cancel_owner, self._tasks.close
        self._lock = threading.Lock()
        self._files: dict[str, PromptSuite] = {}
        self._reports: BoundedCache[Report] = BoundedCache(
            MAX_REPORT_BYTES, lambda report: BYTES_PER_REQUEST * len(report[1].requests)
        )
        host.before_close(self.close)

    @property
    def suites(self) -> dict[str, PromptSuite]:
        """The shipped suites, and those of uploaded files."""
        with self._lock:
            return {**self.catalog.suites, **self._files}

    def add_file(self, name: str, text: str) -> str:
        """Read a file of prompts; returns the key of its suite, valid until the server ends."""
        if not 0 < len(name) <= 200:
            raise ConfigError("A file of prompts must have a name and a text.")
        suite = read_suite_text(text, name, where=name)
        key = "file:" + hashlib.sha256(f"{name}\n{text}".encode(errors="replace")).hexdigest()[:16]
        with self._lock:
            newest = [*self._files.items(), (key, suite)][-MAX_FILES:]
            self._files = dict(newest)
        return key

    # ---- running

    def start(
        self,
        plan: ExperimentPlan,
        *,
        pool: PoolConfig | None = None,
        owner: str = "",
    ) -> Experiment:
        """Start an experiment on the engine, or on workers of a cluster.

        Args:
            owner: an unfinished experiment of the same owner is cancelled.

        Raises QueueFullError, ClosingError: it was refused; then the log has nothing of it, and
        nothing is cancelled.
        """
        experiment = self._experiment(plan)
        experiment.owner = owner or experiment.id
        self._launch(experiment, pool, experiment.begin)
        return experiment

    def resume(self, benchmark_id: str, pool: PoolConfig | None = None) -> None:
        """Resume an experiment.

        Raises ConfigError: it is not in the log, or this version lacks one of its methods.
        """
        head = self._log.benchmarks.head(benchmark_id)
        stored = stored_sweep if head is not None and head.kind == "sweep" else stored_experiment
        plan: ExperimentPlan = stored(self._log, benchmark_id, self.catalog.types)[1]
        experiment = self._experiment(plan.runnable, benchmark_id)
        self._launch(experiment, pool, experiment.resume)

    def _experiment(self, plan: ExperimentPlan, benchmark_id: str | None = None) -> Experiment:
        if plan.kind == "compare":
            return Comparison(self._host, plan, benchmark_id=benchmark_id)
        if not isinstance(plan, SweepPlan):
            return Experiment(self._log, plan, benchmark_id=benchmark_id)
        for job in self._tasks.running():
            if isinstance(job, Sweep):
                head = self._log.benchmarks.head(job.id)
                name = job.id if head is None else head.name
                raise ConfigError(f"Sweep {name} is running. Stop it, or wait until it is done.")
        return Sweep(self._log, plan, benchmark_id=benchmark_id)

    def _launch(
        self, experiment: Experiment, pool: PoolConfig | None, write: Callable[[], object]
    ) -> None:
        """Queue it, then `write` to the log that it runs."""
        plan = experiment.plan
        experiment.has_live_report = plan.kind in ("benchmark", "fastest")

        def by_workers(pool: PoolConfig) -> Summary:
            host, url = self._host, self._log.url
            if url.database in (None, "", ":memory:"):
                raise ConfigError(
                    "Workers need a run log that they can reach. Start the server with --db."
                )
            where = url.render_as_string(hide_password=False)
            config = WorkerConfig(plan.target, plan.dtype, where, host.device, host.cache_dir)
            experiment.state, experiment.activity = "running", "starting the workers"
            with workers(pool, config, cancelled=experiment.cancelled) as running:
                experiment.activity = "starting"
                experiment.workers, experiment.worker_rejections = running.rows, running.rejections
                experiment.check_target(running.environment)
                return experiment.measure_on(running)

        def register() -> Callable[[], None]:
            by = pool and partial(by_workers, pool)
            measure = by or experiment.enqueue(self._host)
            write()
            return partial(finish, measure)

        def finish(measure: Callable[[], Summary]) -> None:
            if experiment.run(measure).cancelled:
                raise CancelledError

        self._tasks.start(experiment, register)

    # ---- reading

    def newest(self, *, sweeps: bool = False) -> tuple[BenchmarkHead, ...]:
        return self._log.benchmarks.list(MAX_LISTED, sweeps=sweeps)

    def look(self, benchmark_id: str, *, sweep: bool = False) -> ExperimentState:
        """The state of an experiment; its plan and requests are read only when they changed."""
        job, head = self.job(benchmark_id), self._log.benchmarks.head(benchmark_id)
        if head is None:
            raise unknown_experiment(benchmark_id)
        live = job.results if job is not None and not sweep else None
        results: Any
        version, results = live or self._report(head, sweep=sweep)
        counts, share = [], None
        if sweep:
            counts = [f"{results.num_done} of {results.plan.num_trials} trials"]
        if job is not None:
            progress, spent = job.progress, job.chooser.spent_share  # of a search's time
            share = spent if spent is not None else progress.share if progress else 0.0
            if progress is not None:
                if not sweep and spent is None:
                    counts = [f"{progress.num_done} of {progress.num_planned}"]
                counts.append(time_left(progress.eta_s))
                counts += [f"{progress.num_failed} failed"] if progress.num_failed else []
        return ExperimentState(
            status=head.status,
            task=job,
            version=version,
            counts=counts,
            share=share,
            error=str(results.benchmark.summary.get("error") or ""),
            results=results,
        )

    def file(self, benchmark_id: str, name: object) -> str:
        """One of the report's files, as text."""
        text_of = FILES[validate_choice("name", name, FILES)]
        return text_of(read_results(self._log, benchmark_id, types=self.catalog.types))

    def _report(self, head: BenchmarkHead, *, sweep: bool) -> Report:
        """The cached report, updated when more requests are finished.

        While a sweep is running, it is updated only when a trial begins or ends.
        """
        by_trial = sweep and head.status == "running"
        runs = RunQuery(experiment_id=head.id, status="completed")
        state = stored_trials(self._log, head.id) if by_trial else self._log.ids(runs)
        version = f"{head.status} {zlib.crc32(repr((sweep, state)).encode())}"

        def read(last: Report | None) -> Report:
            known = () if last is None else last[1].requests
            if sweep:
                return version, read_sweep(self._log, head.id, self.catalog.types, known)
            requests = finished_requests(self._log, head.id, known)
            return version, read_results(self._log, head.id, requests, self.catalog.types)

        return self._reports.get_or_compute(head.id, read, is_stale=lambda last: last[0] != version)
