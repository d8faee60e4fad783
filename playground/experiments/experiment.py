"""One experiment: a stored plan, the job that measures it, and what is known of it meanwhile.

Compare, Benchmark, Find the fastest and `bench` all run this; they differ in their plan alone:
its kind, and who chooses the configurations that go on. A sweep is one too, trial after trial.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, PlaygroundError
from playground.errors import attempt
from playground.experiments.chooser import chooser_of
from playground.experiments.cluster import Workers
from playground.experiments.finished import finished_requests
from playground.experiments.job import Job, Progress, State, submit
from playground.experiments.measurement import Measurement, Prompt, Summary, check_same_target
from playground.experiments.plan import ExperimentPlan, Request
from playground.experiments.report.report import (
    Results,
    default_name,
    environment_of,
    read_results,
)
from playground.experiments.worker import TaskContext
from playground.host.live import LiveRun
from playground.host.runner import EngineHost
from storage import RunLog, RunQuery, StorageError, new_id

REPORT_EVERY_S = 3.0
SHARDS_EACH = 2
"""Shards per worker: fewer warm-ups with one, a shorter wait for the slowest with many."""
Version = str
"""Tells a report from the next one."""


# ---- under way


class View(Protocol):
    """A page that follows an experiment round by round."""

    def announce(
        self, number: int, requests: Sequence[Request], prompt: Prompt
    ) -> Mapping[str, LiveRun]:
        """The runs to stream of a round that begins, by configuration."""

    def draw(self) -> None:
        """Bring what is shown up to date."""


class Experiment(Job):
    """One experiment, from the queue to its end; its runs carry its id.

    Attributes:
        one_device: whether its workers must all run on the same kind of device.
        requests: finished ones, those of an earlier process too.
        faults: configurations that could not go on, and why.
        chooser: says which configurations go on.
        draws_report: whether to draw the report every few seconds, for pages that look.
        results: the report that was drawn last, and its version.
        view: follows its rounds, where people watch.
    """

    one_device: ClassVar[bool] = False

    def __init__(
        self,
        log: RunLog,
        plan: ExperimentPlan,
        *,
        benchmark_id: str | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(benchmark_id or new_id(), owner=owner)
        self.log, self.plan = log, plan
        self.chooser = chooser_of(plan)
        self.requests = [] if benchmark_id is None else finished_requests(log, benchmark_id)
        self.faults: Mapping[str, str] = {}
        self.draws_report = False
        self.results: tuple[Version, Results] | None = None
        self.view: View | None = None
        self._watcher: Callable[[Progress], None] = lambda progress: None
        self._interrupted: Callable[[], bool] = lambda: False
        self._draw_s = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, name: str = "") -> None:
        """Write its plan down, before its first request."""
        plan = self.plan.to_dict()
        self.log.benchmarks.begin(name or default_name(self.plan), plan, benchmark_id=self.id)

    def watch(self, tell: Callable[[Progress], None], interrupted: Callable[[], bool]) -> None:
        """Have progress told to `tell`; `interrupted` ends the experiment, as `cancel` does."""
        self._watcher, self._interrupted = tell, interrupted

    def cancelled(self) -> bool:
        return self._interrupted() or super().cancelled()

    def check_target(self, environment: Mapping[str, Any]) -> None:
        """Raises ConfigError: it began on other weights or in another dtype."""
        first = self.log.wait_for(lambda: environment_of(self.log, self.runs))
        check_same_target(first, environment)

    @property
    def runs(self) -> RunQuery:
        """Selects its runs in the log."""
        return RunQuery(benchmark_id=self.id)

    # ---- measuring

    def measure(self, bench: BuildContext) -> Summary:
        """Measure what the log lacks of it on a loaded target."""
        measurement = Measurement(
            plan=self.plan,
            log=self.log,
            benchmark_id=self.id,
            tell=self.tell,
            cancelled=self.cancelled,
            chooser=self.chooser,
            announce=None if self.view is None else self.view.announce,
        )
        self.faults = measurement.faults
        try:
            return measurement.run(bench)
        finally:
            if self.view is not None:
                attempt(self.view.draw, where=f"the report of experiment {self.id}")

    def queue(self, host: EngineHost) -> Callable[[], Summary]:
        """Have the engine measure it; what waits for that."""
        check = lambda target: self.check_target(target.environment())  # noqa: E731
        return submit(host, self, self.plan, self.measure, check=check)

    def measure_by(self, workers: Workers) -> Summary:
        """The same by the workers of a cluster: every n-th prompt is in a shard."""
        plan, num = self.plan, min(len(self.plan.items), SHARDS_EACH * len(workers.rows()))
        parts = [type(plan).parse({**dict(plan), "items": plan.items[i::num]}) for i in range(num)]
        progress: dict[str, Progress] = {}
        began_s, num_measured = time.monotonic(), 0

        def forward(name: str, latest: Progress) -> None:
            """Progress of all shards together."""
            nonlocal num_measured
            progress[name] = latest
            shards = list(progress.values())
            num_measured += latest.last is not None
            num_done, num_planned = sum(one.num_done for one in shards), plan.num_requests
            left_s = (num_planned - num_done) * (time.monotonic() - began_s)
            eta_s = left_s / num_measured if num_measured else None
            num_failed, words = sum(one.num_failed for one in shards), f"{name} · {latest.message}"
            self.tell(Progress(num_done, num_planned, words, eta_s, num_failed, latest.last))

        tasks = {
            f"shard {n}": partial(measure_shard, plan=part, benchmark_id=self.id)
            for n, part in enumerate(parts, start=1)
        }
        done = workers.do_all(tasks, tell=forward, cancelled=self.cancelled)
        return Summary.of(list(done.values()))

    def conduct(self, measure: Callable[[], Summary]) -> Summary:
        """Measure it, and write down how it ended.

        Raises ConfigError: a comparison or search could answer none of its prompts.
        """
        status: Literal["completed", "cancelled", "failed"] = "failed"
        ended: dict[str, Any] = {"skipped": [], "num_failed": 0}
        try:
            summary = measure()
            ended["skipped"] = [asdict(skip) for skip in summary.skipped]
            ended["num_failed"] = summary.num_failed
            ended["faults"] = dict(summary.faults)
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
            ended["error"] = str(error)
            raise
        finally:
            self.log.benchmarks.finish(self.id, status, ended)

    def conducted(self, measure: Callable[[], Summary]) -> State:
        """As `conduct`; how it ended."""
        summary = self.conduct(measure)
        if self.view is not None and not summary.cancelled:
            self.log.wait_for(self.view.draw)
        return summary.status

    # ---- progress

    def tell(self, progress: Progress) -> None:
        super().tell(progress)
        self._watcher(progress)
        if progress.last is None:
            return
        with self._lock:  # workers report side by side
            self.requests.append(progress.last)
            is_due = time.monotonic() - self._draw_s >= REPORT_EVERY_S or len(self.requests) == 1
            if self.draws_report and is_due:
                attempt(self._draw, where=f"the report of experiment {self.id}")
                self._draw_s = time.monotonic()

    def _draw(self) -> None:
        version = f"running here {len(self.requests)}"
        self.results = version, read_results(self.log, self.id, self.requests)

    @property
    def share(self) -> float | None:
        """How much of it is done; None while nothing is known."""
        now = self.progress
        return None if now is None or not now.num_done else now.num_done / now.num_planned


def measure_shard(context: TaskContext, plan: ExperimentPlan, benchmark_id: str) -> Summary:
    """What the log lacks of a plan, measured by one worker."""
    told: dict[str, Any] = {"tell": context.tell, "cancelled": context.cancelled}
    told["worker"] = context.name
    return Measurement(plan=plan, log=context.log, benchmark_id=benchmark_id, **told).run(
        context.bench
    )
