"""A sweep under way: trial after trial until its plan is done, each written down before the next.

A trial is a small benchmark of one configuration beside plain decoding. Killing the process at any
moment loses the running request at most: the sweep's trials are continued from the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import ClassVar

import optuna

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, DrafterError, OutOfMemoryError
from playground.experiments.cluster import WorkerLostError, Workers
from playground.experiments.experiment import Experiment, measure_shard
from playground.experiments.finished import FinishedRequest, Pair, finished_requests, in_pairs
from playground.experiments.job import BrokenOffError, Progress, submit
from playground.experiments.measurement import Measurement, Summary
from playground.experiments.plan import ExperimentPlan
from playground.experiments.space import point_text
from playground.experiments.sweep.plan import METHOD, SweepPlan
from playground.experiments.sweep.store import SweepStore, check_name, database_errors
from playground.experiments.sweep.trials import (
    MIN_PAIRS,
    Figures,
    OptunaChooser,
    Outcome,
    Trial,
    figures_of,
    runs_id,
)
from playground.host.runner import ClosingError, EngineHost
from storage import RunQuery

NO_PAIR = "No prompt was answered by both methods. "
CANCELLED = Summary(True, 0, 0, ())


class Sweep(Experiment):
    """One sweep, from the queue to its end; the runs of a point carry `runs_id`."""

    one_device: ClassVar[bool] = True
    plan: SweepPlan

    def __init__(
        self,
        store: SweepStore,
        plan: SweepPlan,
        *,
        benchmark_id: str | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(store.log, plan, benchmark_id=benchmark_id, owner=owner)
        self.store = store
        self._trials_lock, self._broken = threading.RLock(), threading.Event()

    def begin(self, name: str = "") -> None:
        """Write it down; without a name it gets one of its own."""
        kind = self.plan.swept.decoding_type.lower().replace("_", "-")
        name = name or f"{kind}-{self.plan.chooser.objective}-{datetime.now():%m%d-%H%M%S}"
        check_name(name)
        self.store.study(self.id)
        super().begin(name)

    @property
    def runs(self) -> RunQuery:
        return RunQuery(experiment=f"sweep:{self.id}")

    # ---- where its trials are measured

    def measure(self, bench: BuildContext) -> Summary:
        return self.search(partial(self._measure_trial, bench))

    def measure_by(self, workers: Workers) -> Summary:
        def measure(trial: RunningTrial) -> Summary:
            task = partial(measure_shard, plan=trial.plan, benchmark_id=trial.id)
            summary: Summary = workers.do(
                task, tell=trial.tell, cancelled=trial.is_over, title=f"trial {trial.number}"
            )
            return summary

        return self.search(measure, parallel=len(workers.rows()))

    def queue(self, host: EngineHost) -> Callable[[], Summary]:
        """Every trial waits in the queue of all runs by itself: others go between."""
        target = self.plan.target.title or self.plan.target.name

        def measure(trial: RunningTrial) -> Summary:
            trial.say(f"loading {target}")
            try:
                return submit(
                    host,
                    self,
                    self.plan,
                    lambda bench: self._measure_trial(bench, trial),
                    check=lambda loaded: self.check_target(loaded.environment()),
                    patient=True,
                )()
            except (CancelledError, ClosingError):
                self.cancel()
                return CANCELLED

        return partial(self.search, measure)

    def _measure_trial(self, bench: BuildContext, trial: RunningTrial) -> Summary:
        return Measurement(
            plan=trial.plan,
            log=self.log,
            benchmark_id=trial.id,
            tell=trial.tell,
            cancelled=trial.is_over,
        ).run(bench)

    # ---- trial after trial

    def search(self, measure: Callable[[RunningTrial], Summary], parallel: int = 1) -> Summary:
        """Do what is left of it.

        Args:
            parallel: trials that are measured at a time, each in a thread of its own.

        Raises:
            SweepError: combination after combination is refused, or fails.
            PlaygroundError, StorageError: target or database failed; the sweep can be resumed.
        """
        with database_errors():
            study = self.store.study(self.id)
            self.trials = OptunaChooser(study, self.plan, parallel=parallel)
        self.say("starting")
        if parallel == 1:
            self._go_on(measure)
        else:
            with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as threads:
                list(threads.map(lambda _: self._go_on(measure), range(parallel)))
        if self.cancelled():
            return CANCELLED
        self.say("done")
        return Summary(False, self.trials.num_done, 0, ())

    def cancelled(self) -> bool:
        return super().cancelled() or self._broken.is_set()

    def _go_on(self, measure: Callable[[RunningTrial], Summary]) -> None:
        """Until there is no trial to begin; a fault ends the others' trials too."""
        try:
            with database_errors():
                while not self.cancelled():
                    with self._trials_lock:
                        begun = self.trials.next()
                    if begun is None:
                        return
                    self._try(*begun, measure)
        except BaseException:
            self._broken.set()
            raise

    def say(self, message: str, begun: float = 0.0) -> None:
        """How far the sweep is; `begun` is the share of the running trial that is done."""
        with self._trials_lock:
            mean_s, num_left = self.trials.mean_s, self.trials.num_left
            eta_s = None if mean_s is None else mean_s * max(0.0, num_left - begun)
            self.tell(Progress(self.trials.num_done, self.plan.num_trials, message, eta_s))

    # ---- one trial

    def _try(
        self, number: int, trial: optuna.Trial, measure: Callable[[RunningTrial], Summary]
    ) -> None:
        """Measure one point, and write down what came of it unless it is to be continued."""
        began_s, running = time.monotonic(), RunningTrial(self, number, trial)
        figures: Figures | None = None
        try:
            outcome, figures, reason = self._outcome(running, measure)
        except (ConfigError, DrafterError) as error:
            outcome, reason = "refused", str(error)
        except (BrokenOffError, OutOfMemoryError, WorkerLostError) as error:
            outcome, reason = "failed", str(error)
        if outcome != "running":
            seconds, point = time.monotonic() - began_s, dict(trial.params)
            worker = running.requests[-1].worker if running.requests else ""
            ended = Trial(number, point, outcome, figures, reason, seconds, worker)
            with self._trials_lock:
                self.trials.end(trial, ended)
        self.say("next trial")

    def _outcome(
        self, running: RunningTrial, measure: Callable[[RunningTrial], Summary]
    ) -> tuple[Outcome, Figures | None, str]:
        """What a trial came to, its figures, and why; still running where it was stopped."""
        running.plan = self.plan.trial(self.plan.space.config(running.point))
        summary = measure(running)
        if self.cancelled():
            return "running", None, ""
        pairs = running.pairs
        if not pairs:
            skipped = next(iter(summary.skipped), None)
            raise ConfigError(
                NO_PAIR + (skipped.reason if skipped else "See its runs in the log for the reason.")
            )
        with self._trials_lock:
            figures = self.trials.figures(pairs)
        if not running.pruned:
            return "measured", figures, ""
        num_turns = self.plan.num_turns
        return "pruned", figures, f"below the median after {len(pairs)} of {num_turns} prompts"


class RunningTrial:
    """A trial while its point is measured; decides, prompt by prompt, whether it goes on.

    Attributes:
        id: what its runs carry.
        requests: finished ones, those of an earlier process too.
    """

    plan: ExperimentPlan

    def __init__(self, sweep: Sweep, number: int, trial: optuna.Trial) -> None:
        self._sweep, self._trial = sweep, trial
        self.number, self.point = number, dict(trial.params)
        self.id, log = runs_id(sweep.id, self.point), sweep.log
        self.requests = log.wait_for(lambda: finished_requests(log, self.id))
        self.num_pairs, self.pruned = len(self.pairs), False

    @property
    def pairs(self) -> list[Pair]:
        """What it has answered, with plain decoding's answers."""
        sides: dict[bool, list[FinishedRequest]] = {True: [], False: []}
        for request in self.requests:
            sides[request.configuration == METHOD].append(request)
        return in_pairs(sides[True], sides[False])

    def tell(self, progress: Progress) -> None:
        """How far the measurement of the point is."""
        self.say(progress.message)
        if progress.last is None:
            return
        latest = {request.key: request for request in (*self.requests, progress.last)}
        self.requests = list(latest.values())
        if len(pairs := self.pairs) > self.num_pairs:
            self.num_pairs = len(pairs)
            with database_errors():
                self._consider(pairs)

    def _consider(self, pairs: list[Pair]) -> None:
        """Whether it goes on, whenever there is a new pair of answers."""
        if not MIN_PAIRS <= len(pairs) < self._sweep.plan.num_turns:
            return
        is_mat = self._sweep.plan.chooser.objective == "mat"
        try:
            bound = figures_of(pairs, "mat" if is_mat else "speedup", None).told
        except ConfigError:
            return
        assert bound is not None
        self._trial.report(bound, len(pairs))
        self.pruned = self._trial.should_prune()

    def say(self, message: str) -> None:
        """What is being done."""
        planned, point = self._sweep.plan.num_turns, point_text(self.point)
        answered = f"{self.num_pairs} of {planned} answered"
        share = self.num_pairs / planned
        self._sweep.say(f"trial {self.number}: {point} · {answered} · {message}", share)

    def is_over(self) -> bool:
        """Whether the measuring is to end at once."""
        return self.pruned or self._sweep.cancelled()
