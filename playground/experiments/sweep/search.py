"""A running sweep: trial after trial until its plan is done, each stored before the next begins.

A trial is a small benchmark of one configuration against plain decoding. Killing the process loses
at most the running request: the sweep's trials are continued from the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import optuna

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, DrafterError, OutOfMemoryError
from playground.experiments.cluster import WorkerLostError, Workers
from playground.experiments.experiment import Experiment
from playground.experiments.finished import finished_requests, plain_pairs
from playground.experiments.measurement import Progress, Summary
from playground.experiments.plan import METHOD, SweepPlan
from playground.experiments.space import point_text
from playground.experiments.sweep.report import SweepStore
from playground.experiments.sweep.trials import OptunaChooser, Outcome, Trial, with_figures
from playground.host.runner import EngineHost, MeasurementFailedError
from playground.host.speedup import trial_benchmark_id
from playground.host.task import ClosingError

NO_PAIR = "No prompt was answered by both methods. "
NO_FIGURE = (
    "The answers end after their first token, so nothing can be measured. Choose other prompts, a "
    "larger max_new_tokens, or ignore_eos."
)
CANCELLED = Summary(True, 0, 0, ())


class Sweep(Experiment):
    """One sweep from the queue to its end; runs of a point carry its `trial_benchmark_id`."""

    plan: SweepPlan

    def __init__(
        self, store: SweepStore, plan: SweepPlan, *, benchmark_id: str | None = None
    ) -> None:
        super().__init__(store.log, plan, benchmark_id=benchmark_id)
        self.store = store
        self._trials_lock, self._failed = threading.RLock(), threading.Event()

    # ---- where its trials are measured

    def measure(self, context: BuildContext) -> Summary:
        return self.search(lambda trial: trial.measure(context))

    def measure_on(self, workers: Workers) -> Summary:
        def measure(running: RunningTrial) -> Summary:
            return workers.measure(
                running.plan,
                running.id,
                title=running.trial.name,
                on_progress=running.update,
                cancelled=running.cancelled,
            )

        return self.search(measure, parallel=len(workers.rows()))

    def enqueue(self, host: EngineHost) -> Callable[[], Summary]:
        """Queue every trial on its own, so that other runs can go in between."""
        target = self.plan.target.title or self.plan.target.name

        def measure(trial: RunningTrial) -> Summary:
            trial.report_progress(f"loading {target}")
            try:
                return self.turn(host, trial.measure, wait_for_room=True)()
            except (CancelledError, ClosingError):
                self.cancel()
                return CANCELLED

        return partial(self.search, measure)

    # ---- trial after trial

    def search(self, measure: Callable[[RunningTrial], Summary], parallel: int = 1) -> Summary:
        """Measure the remaining trials.

        Args:
            parallel: number of trials measured at a time, each in a thread of its own.

        Raises:
            PlaygroundError, StorageError: target or log failed, or too many combinations in a row
                are refused or fail; the sweep can be resumed.
        """
        begun, save = self.store.load(self.id).trials, partial(self.store.save, self.id)
        self.trials = OptunaChooser(self.plan, begun, save, parallel=parallel)
        self.report_progress("starting")
        if parallel == 1:
            self._run_trials(measure)
        else:
            with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as threads:
                list(threads.map(lambda _: self._run_trials(measure), range(parallel)))
        if self.cancelled():
            return CANCELLED
        self.report_progress("done")
        return Summary(False, self.trials.num_done, 0, ())

    def cancelled(self) -> bool:
        return super().cancelled() or self._failed.is_set()

    def _run_trials(self, measure: Callable[[RunningTrial], Summary]) -> None:
        """Run trials until none is left; an error also ends those of the other threads."""
        try:
            while not self.cancelled():
                with self._trials_lock:
                    begun = self.trials.next()
                if begun is None:
                    return
                self._run_trial(*begun, measure)
        except BaseException:
            self._failed.set()
            raise

    def report_progress(self, message: str, begun: float = 0.0) -> None:
        """Report the sweep's progress; `begun` is the completed share of the running trial."""
        with self._trials_lock:
            mean_s, num_left = self.trials.mean_s, self.trials.num_left
            eta_s = None if mean_s is None else mean_s * max(0.0, num_left - begun)
            self.update(Progress(self.trials.num_done, self.plan.num_trials, message, eta_s))

    # ---- one trial

    def _run_trial(
        self, trial: Trial, optuna_trial: optuna.Trial, measure: Callable[[RunningTrial], Summary]
    ) -> None:
        """Measure one point and store the outcome, unless the sweep was stopped."""
        began_s = time.monotonic()
        outcome: Outcome = "measured"
        reason = ""
        try:
            running = RunningTrial(self, trial)
            summary = measure(running)
            if self.cancelled():
                return
            trial = running.result(summary)
        except (ConfigError, DrafterError) as error:
            outcome, reason = "refused", str(error)
        except (MeasurementFailedError, OutOfMemoryError, WorkerLostError) as error:
            outcome, reason = "failed", str(error)
        seconds = time.monotonic() - began_s
        ended = replace(trial, outcome=outcome, reason=reason, seconds=seconds)
        with self._trials_lock:
            self.trials.end(optuna_trial, ended)
        self.report_progress("next trial")


class RunningTrial(Experiment):
    """A trial while its point is measured."""

    def __init__(self, sweep: Sweep, trial: Trial) -> None:
        """Raises ConfigError: the method cannot have the settings of this point."""
        super().__init__(sweep.log, sweep.plan.trial(sweep.plan.space.config(trial.point)))
        self.id = trial_benchmark_id(sweep.id, trial.point)
        self.trial, self._sweep = trial, sweep
        self.requests = self.log.wait_for(lambda: finished_requests(self.log, self.id))

    def result(self, summary: Summary) -> Trial:
        """The trial with the figures of its runs in the log. Raises ConfigError: it has none."""
        requests = self.log.wait_for(lambda: finished_requests(self.log, self.id, self.requests))
        plan = self._sweep.plan
        trial = with_figures(self.trial, plan, requests)
        if trial.section is None:
            skipped = next(iter(summary.skipped), None)
            raise ConfigError(
                NO_PAIR + (skipped.reason if skipped else "See its runs in the log for the reason.")
            )
        if trial.told(plan.chooser.objective) is None:
            raise ConfigError(NO_FIGURE)
        return trial

    def update(self, progress: Progress) -> None:
        super().update(progress)
        self.report_progress(progress.message)

    def report_progress(self, message: str) -> None:
        """Report progress as part of the sweep's."""
        planned, trial = self._sweep.plan.num_turns, self.trial
        num_pairs = len(plain_pairs(self.requests, METHOD, self.plan))
        answered, share = f"{num_pairs} of {planned} answered", num_pairs / planned
        doing = f"{trial.name}: {point_text(trial.point)} · {answered} · {message}"
        self._sweep.report_progress(doing, share)

    def cancelled(self) -> bool:
        return self._sweep.cancelled()
