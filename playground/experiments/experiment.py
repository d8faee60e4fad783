"""One experiment: a stored plan, the job that measures it, and its results so far.

Compare, Benchmark, Find the fastest and `bench` all run this; they differ only in their plan: its
kind, and how the configurations that continue are chosen. A sweep is one too, trial after trial.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from typing import Any, Literal

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, PlaygroundError, TargetError
from playground.errors import attempt
from playground.experiments.chooser import Chooser
from playground.experiments.cluster import Workers
from playground.experiments.measurement import (
    Measurement,
    OnRound,
    Progress,
    Summary,
    check_same_target,
)
from playground.experiments.plan import ExperimentPlan
from playground.experiments.report.report import (
    Results,
    default_name,
    environment_of,
    read_results,
)
from playground.experiments.statistics import finished_requests
from playground.host.runner import EngineHost
from playground.host.task import Task
from storage import RunLog, StorageError, new_id

MAX_NAME = 80
REPORT_INTERVAL_S = 3.0
SHARDS_PER_WORKER = 2
"""One would need fewer warm-ups; more shorten the wait for the slowest worker."""


class Experiment(Task):
    """One experiment, from the queue to its end; its runs carry its id.

    Attributes:
        requests: finished requests, including those of an earlier process.
        chooser: which configurations continue, and why others failed.
        has_live_report: whether `results` is updated every few seconds while it runs.
        results: the newest report, and its version, which differs from the last one's.
        on_round: as of `Measurement`.
        interrupted: ends the experiment as `cancel` does.
        workers: name, device and task of each worker of a cluster.
        worker_rejections: why workers could not be used, a sentence each.
    """

    def __init__(
        self, log: RunLog, plan: ExperimentPlan, *, benchmark_id: str | None = None
    ) -> None:
        experiment_id = benchmark_id or new_id()
        super().__init__(owner=experiment_id, id=experiment_id)
        self.log, self.plan = log, plan
        self.chooser = Chooser(plan)
        self.requests = [] if benchmark_id is None else finished_requests(log, benchmark_id)
        self.has_live_report = False
        self.results: tuple[str, Results] | None = None
        self.on_round: OnRound | None = None
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.interrupted: Callable[[], bool] = lambda: False
        self.progress: Progress | None = None
        self.workers: Callable[[], Sequence[tuple[str, str, str]]] = tuple
        self.worker_rejections: Sequence[str] = ()
        self._reported_s = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, name: str = "") -> None:
        """Write its plan to the log, before its first request; without a name it is given one."""
        if name and not (name.strip() and name.isprintable() and len(name) <= MAX_NAME):
            raise ConfigError(f"name must have 1 to {MAX_NAME} characters, got {name!r:.100}.")
        plan = self.plan.to_dict()
        self.log.benchmarks.begin(self.id, name or default_name(self.plan), plan)

    def resume(self) -> None:
        """Write to the log that it is resumed. Raises StorageError: another process runs it."""
        self.log.benchmarks.resume(self.id)

    def cancelled(self) -> bool:
        return self.interrupted() or super().cancelled()

    def check_target(self, environment: Mapping[str, Any]) -> None:
        """Raises ConfigError: it began on other weights, in another dtype or on another device."""
        first = self.log.wait_for(lambda: environment_of(self.log, self.id))
        check_same_target(first, environment)

    # ---- measuring

    def measure(self, context: BuildContext) -> Summary:
        """Measure on a loaded target whatever the log lacks."""
        return Measurement(
            plan=self.plan,
            log=self.log,
            benchmark_id=self.id,
            on_progress=self.update,
            cancelled=self.cancelled,
            chooser=self.chooser,
            on_round=self.on_round,
        ).run(context)

    def enqueue(self, host: EngineHost) -> Callable[[], Summary]:
        """Queue it on the engine; returns a function that waits for the summary."""
        return self.turn(host, self.measure)

    def turn(
        self,
        host: EngineHost,
        measure: Callable[[BuildContext], Summary],
        *,
        wait_for_room: bool = False,
    ) -> Callable[[], Summary]:
        """Queue a measurement on the engine; returns a function that waits for its summary.

        Raises as `EngineHost.turn`; the function also TargetError: `check_target` refuses it.
        """

        def checked(context: BuildContext) -> Summary:
            try:
                self.check_target(context.target.environment())
            except ConfigError as error:  # no setting of the measurement is at fault
                raise TargetError(str(error)) from error
            return measure(context)

        on = self.plan.target, self.plan.dtype
        return host.turn(self, *on, checked, wait_for_room=wait_for_room).result

    def measure_on(self, workers: Workers) -> Summary:
        """Measure it on the workers of a cluster: a shard has every n-th prompt."""
        plan = self.plan
        num = min(len(plan.items), SHARDS_PER_WORKER * len(workers.rows()))
        items = {f"shard {n + 1}": plan.items[n::num] for n in range(num)}
        shards = {name: type(plan).parse({**dict(plan), "items": i}) for name, i in items.items()}
        progress: dict[str, Progress] = {}
        began_s, num_measured = time.monotonic(), 0

        def forward(name: str, latest: Progress) -> None:
            """Progress of all shards together."""
            nonlocal num_measured
            progress[name] = latest
            latest_of_shards = list(progress.values())
            num_measured += latest.last is not None
            num_done, num_planned = sum(one.num_done for one in latest_of_shards), plan.num_requests
            left_s = (num_planned - num_done) * (time.monotonic() - began_s)
            eta_s = left_s / num_measured if num_measured else None
            num_failed = sum(one.num_failed for one in latest_of_shards)
            message = f"{name} · {latest.message}"
            self.update(Progress(num_done, num_planned, message, eta_s, num_failed, latest.last))

        return workers.measure_all(shards, self.id, on_progress=forward, cancelled=self.cancelled)

    def run(self, measure: Callable[[], Summary]) -> Summary:
        """Measure it, and write to the log how it ended.

        Raises ConfigError: in a comparison or search, no prompt could be answered.
        """
        status: Literal["completed", "cancelled", "failed"] = "failed"
        outcome: dict[str, Any] = {}
        try:
            summary = measure()
            outcome["skipped"] = [asdict(skip) for skip in summary.skipped]
            outcome["num_failed"] = summary.num_failed
            outcome["faults"] = dict(summary.faults)
            problems = [*summary.faults.values(), *(skip.reason for skip in summary.skipped)]
            nothing = not (self.requests or summary.num_new or summary.num_failed)
            if problems and nothing and self.plan.kind != "benchmark":
                raise ConfigError(problems[0])
            status = summary.status
            return summary
        except CancelledError:
            status = "cancelled"
            raise
        except (PlaygroundError, StorageError) as error:
            outcome["error"] = str(error)
            raise
        finally:
            self.log.benchmarks.finish(self.id, status, outcome)

    # ---- progress

    def update(self, progress: Progress) -> None:
        self.progress, self.activity, self.share = progress, progress.message, progress.share
        self.on_progress(progress)
        if progress.last is None:
            return
        with self._lock:  # workers report concurrently
            self.requests.append(progress.last)
            is_due = time.monotonic() - self._reported_s >= REPORT_INTERVAL_S
            if self.has_live_report and (is_due or len(self.requests) == 1):
                attempt(self._read_results, where=f"the report of experiment {self.id}")
                self._reported_s = time.monotonic()

    def _read_results(self) -> None:
        version = f"running here {len(self.requests)}"
        self.results = (
            version,
            read_results(self.log, self.id, self.requests, faults=self.chooser.faults),
        )
