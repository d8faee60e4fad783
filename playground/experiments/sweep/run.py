"""Runs a sweep: trial after trial until the plan is done, each written down before the next.

Killing the process at any moment loses the running request at most: running the same sweep again
tries the broken-off trial again, from the answers that it had, and then does what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import optuna

from engine.drafters.base import BuildContext
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, DrafterError, OutOfMemoryError, PlaygroundError
from playground.experiments.finished import Pair, RunGroup, finished_requests, in_pairs
from playground.experiments.job import BrokenOffError, Progress, TrialProgress
from playground.experiments.measurement import Measurement
from playground.experiments.sweep.plan import METHOD, SweepPlan
from playground.experiments.sweep.search import MIN_PAIRS, TrialScheduler
from playground.experiments.sweep.store import REFERENCE, SWEEP_ID, Status, Sweep, database_errors
from playground.experiments.sweep.trials import BUDGET, SLOT, figures_of
from playground.experiments.sweep.trials import Status as Outcome
from storage import RunLog, StorageError

MAX_REFUSED = 100
"""Refusals in a row after which a search is given up."""
MAX_FAILED = 3
"""Failures in a row after which any sweep is given up."""
Tell = Callable[[Progress], None]


class SweepError(PlaygroundError):
    """The sweep as a whole cannot go on, whatever the point."""


class Measure(Protocol):
    """Where points are measured: on the command line's own models, or by a worker."""

    def __call__(self, config: MethodConfig, run_group: str, trial: RunningTrial) -> Sequence[Pair]:
        """Every pair of answers of a point; fewer if the trial was to end.

        Args:
            run_group: the runs' `benchmark_id` in the log. What is there under it already is not
                run again.

        Raises:
            ConfigError, DrafterError: the target cannot run this point; the sentence says why.
        """


def measure_on(bench: BuildContext, log: RunLog, plan: SweepPlan) -> Measure:
    """Measures on a loaded target."""

    def measure(config: MethodConfig, run_group: str, trial: RunningTrial) -> Sequence[Pair]:
        finished = finished_requests(log, run_group)

        def pairs() -> list[Pair]:
            own = [r for r in finished if r.configuration == METHOD]
            return in_pairs(own, [r for r in finished if r.configuration != METHOD])

        def tell(progress: Progress) -> None:
            trial.say(progress.message)
            if progress.last is not None:
                before = len(pairs())
                finished.append(progress.last)
                if len(found := pairs()) > before:
                    trial.report(found)

        measurement = Measurement(
            plan=plan.trial(config),
            log=log,
            group=RunGroup(run_group),
            tell=tell,
            cancelled=trial.is_over,
            audits_each=0,
        )
        summary = measurement.run(bench)
        if not (found := pairs()) and not summary.cancelled:
            reasons = [skipped.reason for skipped in summary.skipped]
            why = reasons[0] if reasons else "Its runs in the log say why."
            raise ConfigError(f"No prompt was answered by both methods. {why}")
        return found

    return measure


def run_sweep(
    sweep: Sweep,
    measure: Measure,
    *,
    tell: Tell = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Status:
    """Claim a sweep and do what is left of it; returns how it stands.

    Raises:
        ConfigError: it is running already.
        SweepError: combination after combination is refused, or fails.
        PlaygroundError, StorageError: target or database failed; the sweep can be resumed.
    """
    sweep.claim()
    return run_claimed(sweep, measure, tell=tell, cancelled=cancelled)


def run_claimed(
    sweep: Sweep,
    measure: Measure,
    *,
    tell: Tell = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Status:
    """`run_sweep` for a sweep that the caller has claimed."""
    status: Status = "failed"
    fault = "Something broke; the program's log says where. Resume the sweep to go on."
    try:
        with database_errors():
            status = _Run(sweep, measure, tell, cancelled).run()
        fault = ""
    except KeyboardInterrupt:
        status, fault = "stopped", ""
        raise
    except (PlaygroundError, StorageError) as error:
        fault = str(error)
        raise
    finally:
        sweep.release(status, fault)
    return status


class _Run:
    """State of one call."""

    def __init__(
        self, sweep: Sweep, measure: Measure, tell: Tell, cancelled: Callable[[], bool]
    ) -> None:
        self.sweep = sweep
        self.plan = sweep.plan
        self.cancelled = cancelled
        self._measure = measure
        self._tell = tell
        self._sweep_id = str(sweep.attributes[SWEEP_ID])
        self._reference: float | None = sweep.attributes.get(REFERENCE)
        self._last: Outcome = "running"
        self._in_a_row = 0
        self._taken = [t.seconds for t in sweep.trials() if t.outcome in BUDGET and t.seconds]
        self._scheduler = TrialScheduler(sweep)

    def run(self) -> Status:
        self.say("starting")
        while not self.cancelled():
            trial = self._scheduler.next()
            if trial is None:
                self.say("done")
                return "completed"
            self._try(trial)
        return "stopped"

    def _try(self, trial: optuna.Trial) -> None:
        """Measure one point and write down what came of it."""
        began_s = time.monotonic()
        running = RunningTrial(self, trial)
        # The same for every try of a slot, so that its answers are found again.
        run_group = f"{self._sweep_id}-{trial.user_attrs.get(SLOT, trial.number)}"
        try:
            config = self.plan.space.config(trial.params)
            pairs = self._measure(config, run_group, running)
            self._tell_measured(trial, running, pairs)
        except (ConfigError, DrafterError) as error:
            self._broken_off(trial, "refused", str(error))
        except (BrokenOffError, OutOfMemoryError) as error:
            self._broken_off(trial, "failed", str(error))
        except (PlaygroundError, StorageError, KeyboardInterrupt):
            self._scheduler.tell(trial, "stopped")
            raise
        else:
            self._last, self._in_a_row = "measured", 1
            self._taken.append(time.monotonic() - began_s)
            self.say("next trial")

    def _broken_off(self, trial: optuna.Trial, outcome: Outcome, sentence: str) -> None:
        """Write down why; give up when point after point comes to nothing.

        Raises:
            SweepError: naming what the last one said.
        """
        self._scheduler.tell(trial, outcome, reason=sentence)
        self._in_a_row = self._in_a_row + 1 if outcome == self._last else 1
        self._last = outcome
        most = MAX_FAILED if outcome == "failed" else MAX_REFUSED
        if self._in_a_row >= most and (outcome == "failed" or self.plan.mode != "grid"):
            raise SweepError(f"{most} combinations in a row {outcome}; the last one: {sentence}")

    def _tell_measured(
        self, trial: optuna.Trial, running: RunningTrial, pairs: Sequence[Pair]
    ) -> None:
        if self.cancelled():
            self._scheduler.tell(trial, "stopped")
            return
        figures = figures_of(pairs, self.plan.objective, self._reference)
        if running.pruned:
            after = f"below the median after {len(pairs)} of {self.plan.num_turns} prompts"
            self._scheduler.tell(trial, "pruned", figures=figures, reason=after)
            return
        if self._reference is None and figures.plain_tok_s:
            self._reference = figures.plain_tok_s
            self.sweep.write(REFERENCE, self._reference)
        self._scheduler.tell(trial, "measured", figures=figures)

    def say(self, message: str, trial: TrialProgress | None = None) -> None:
        mean_s = sum(self._taken) / len(self._taken) if self._taken else None
        begun = 0.0 if trial is None else trial.num_pairs / max(1, trial.num_planned)
        eta_s = None if mean_s is None else mean_s * max(0.0, self._scheduler.num_left - begun)
        done, planned = self._scheduler.num_done, self.plan.num_trials
        self._tell(Progress(done, planned, message, eta_s, trial=trial))


class RunningTrial:
    """A trial while its point is measured; decides, prompt by prompt, whether it goes on."""

    def __init__(self, run: _Run, trial: optuna.Trial) -> None:
        self._run = run
        self._trial = trial
        self._num_pairs = 0
        self.pruned = False

    def report(self, pairs: Sequence[Pair]) -> None:
        """All pairs of answers so far, whenever there is a new one."""
        self._num_pairs = len(pairs)
        self._run.sweep.heartbeat()
        if not MIN_PAIRS <= len(pairs) < self._run.plan.num_turns:
            return
        objective = "mat" if self._run.plan.objective == "mat" else "speedup"
        try:
            so_far = figures_of(pairs, objective, None).value  # type: ignore[arg-type]
        except ConfigError:
            return
        self._trial.report(so_far, len(pairs))
        self.pruned = self._trial.should_prune()

    def say(self, message: str) -> None:
        """What is being done."""
        planned = self._run.plan.num_turns
        now = TrialProgress(self._trial.number, self._trial.params, self._num_pairs, planned)
        self._run.say(message, now)

    def is_over(self) -> bool:
        """Whether the measuring is to end at once."""
        return self.pruned or self._run.cancelled()
