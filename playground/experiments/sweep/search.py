"""A running sweep: trial after trial until its plan is done, each stored before the next begins.

The requests of a trial are one configuration's and plain decoding's. Killing the process loses at
most the running request: the sweep's trials are continued from the log.
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
from playground.experiments.measurement import Measurement, Progress, Summary
from playground.experiments.plan import METHOD, ExperimentPlan, SweepPlan
from playground.experiments.space import point_text
from playground.experiments.statistics import FinishedRequest, finished_requests, plain_pairs
from playground.experiments.sweep.report import save_trial, stored_trials
from playground.experiments.sweep.trials import OptunaChooser, Outcome, Trial, with_figures
from playground.host.runner import EngineHost, MeasurementFailedError
from playground.host.task import ClosingError
from storage import RunLog

NO_PAIR = "No prompt was answered by both methods. "
NO_FIGURE = (
    "The answers end after their first token, so nothing can be measured. Choose other prompts, a "
    "larger max_new_tokens, or ignore_eos."
)
CANCELLED = Summary(True, 0, 0, ())
OnProgress = Callable[[Progress], None]
MeasureTrial = Callable[[Trial, ExperimentPlan, OnProgress], Summary]
"""Measures whatever the log lacks of a trial's plan."""


class Sweep(Experiment):
    """One sweep from the queue to its end; the runs of a trial carry its id."""

    plan: SweepPlan

    def __init__(self, log: RunLog, plan: SweepPlan, *, benchmark_id: str | None = None) -> None:
        super().__init__(log, plan, benchmark_id=benchmark_id)
        self._trials_lock, self._failed = threading.RLock(), threading.Event()

    # ---- where its trials are measured

    def measure(self, context: BuildContext) -> Summary:
        return self.search(partial(self._measure_trial, context))

    def measure_on(self, workers: Workers) -> Summary:
        def measure(trial: Trial, plan: ExperimentPlan, on_progress: OnProgress) -> Summary:
            return workers.measure(
                plan,
                self.id,
                title=trial.name,
                trial=trial.id,
                on_progress=on_progress,
                cancelled=self.cancelled,
            )

        return self.search(measure, parallel=len(workers.rows()))

    def enqueue(self, host: EngineHost) -> Callable[[], Summary]:
        """Queue every trial on its own, so that other runs can go in between."""
        loading = Progress(0, 0, f"loading {self.plan.target.title or self.plan.target.name}", None)

        def measure(trial: Trial, plan: ExperimentPlan, on_progress: OnProgress) -> Summary:
            on_progress(loading)

            def work(context: BuildContext) -> Summary:
                return self._measure_trial(context, trial, plan, on_progress)

            try:
                return self.turn(host, work, wait_for_room=True)()
            except (CancelledError, ClosingError):
                self.cancel()
                return CANCELLED

        return partial(self.search, measure)

    def _measure_trial(
        self, context: BuildContext, trial: Trial, plan: ExperimentPlan, on_progress: OnProgress
    ) -> Summary:
        return Measurement(
            plan=plan,
            log=self.log,
            benchmark_id=self.id,
            trial=trial.id,
            on_progress=on_progress,
            cancelled=self.cancelled,
        ).run(context)

    # ---- trial after trial

    def search(self, measure: MeasureTrial, parallel: int = 1) -> Summary:
        """Measure the remaining trials.

        Args:
            parallel: number of trials measured at a time, each in a thread of its own.

        Raises:
            PlaygroundError, StorageError: target or log failed, or too many combinations in a row
                are refused or fail; the sweep can be resumed.
        """
        begun, save = stored_trials(self.log, self.id), partial(save_trial, self.log, self.id)
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

    def _run_trials(self, measure: MeasureTrial) -> None:
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

    def _run_trial(self, trial: Trial, optuna_trial: optuna.Trial, measure: MeasureTrial) -> None:
        """Measure one point and store the outcome, unless the sweep was stopped."""
        began_s = time.monotonic()
        outcome: Outcome = "measured"
        reason = ""
        try:
            plan = self.plan.trial(self.plan.space.config(trial.point))
            summary = measure(trial, plan, self._progress_of(trial, plan))
            if self.cancelled():
                return
            trial = self._measured(trial, summary)
        except (ConfigError, DrafterError) as error:
            outcome, reason = "refused", str(error)
        except (MeasurementFailedError, OutOfMemoryError, WorkerLostError) as error:
            outcome, reason = "failed", str(error)
        seconds = time.monotonic() - began_s
        ended = replace(trial, outcome=outcome, reason=reason, seconds=seconds)
        with self._trials_lock:
            self.trials.end(optuna_trial, ended)
        self.report_progress("next trial")

    def _progress_of(self, trial: Trial, plan: ExperimentPlan) -> OnProgress:
        """Reports a trial's progress as part of the sweep's."""
        requests = self._requests_of(trial)

        def on_progress(progress: Progress) -> None:
            if progress.last is not None:
                requests.append(progress.last)
            num_pairs, planned = len(plain_pairs(requests, METHOD, plan)), plan.num_turns
            doing = f"{trial.name}: {point_text(trial.point)} · {num_pairs} of {planned} answered"
            self.report_progress(f"{doing} · {progress.message}", num_pairs / planned)

        return on_progress

    def _measured(self, trial: Trial, summary: Summary) -> Trial:
        """The trial with the figures of its runs in the log. Raises ConfigError: it has none."""
        trial = with_figures(trial, self.plan, self._requests_of(trial))
        if trial.section is None:
            skipped = next(iter(summary.skipped), None)
            raise ConfigError(
                NO_PAIR + (skipped.reason if skipped else "See its runs in the log for the reason.")
            )
        if trial.told(self.plan.chooser.objective) is None:
            raise ConfigError(NO_FIGURE)
        return trial

    def _requests_of(self, trial: Trial) -> list[FinishedRequest]:
        return self.log.wait_for(lambda: finished_requests(self.log, self.id, trial=trial.id))
