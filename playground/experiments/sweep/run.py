"""Runs a sweep: trial after trial until the plan is done, each written down before the next.

Killing the process at any moment loses the running request at most: running the same sweep again
tries the broken-off trial again, from the answers that it had, and then does what is left.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, DrafterError, OutOfMemoryError, PlaygroundError
from playground.experiments.cluster import WorkerLostError
from playground.experiments.finished import FinishedRequest, Pair, in_pairs
from playground.experiments.job import BrokenOffError, Progress, TrialProgress
from playground.experiments.sweep.plan import METHOD
from playground.experiments.sweep.space import Point, Space, Tunable, Vary
from playground.experiments.sweep.store import REFERENCE, SWEEP_ID, Status, Sweep, database_errors
from playground.experiments.sweep.trials import (
    ANSWERED,
    BUDGET,
    FIGURES,
    FINAL,
    OUTCOME,
    REASON,
    SLOT,
    TOLD,
    WORKER,
    Figures,
    Trial,
    figures_of,
    key_of,
    last_of_slots,
    num_done,
    num_fruitless,
)
from playground.experiments.sweep.trials import Status as Outcome
from storage import StorageError

MAX_REFUSED = 100
"""Refusals in a row after which a search is given up."""
MAX_FAILED = 3
"""Failures in a row after which any sweep is given up."""
MAX_TRIES = 3
"""Times in a row that a trial answers nothing and is killed; then its point is given up."""
MAX_REPEATED = 8
"""Draws of known points in a row before a point that was never tried is taken."""
PRUNE_AFTER = 5
"""Finished trials before any is pruned."""
MIN_PAIRS = 2
"""Prompts that a trial answers before it may be pruned."""
DIED = f"The process died {MAX_TRIES} times in a row before this trial answered another prompt."
Tell = Callable[[Progress], None]


class SweepError(PlaygroundError):
    """The sweep as a whole cannot go on, whatever the point."""


Measure = Callable[[MethodConfig, str, "RunningTrial"], Sequence[Pair]]
"""Every pair of answers of a point; fewer if the trial was to end.

It is given the `benchmark_id` of the runs too: what the log has of them is not run again. A
`ConfigError` or `DrafterError` says why the target cannot run this point.
"""


def run_sweep(
    sweep: Sweep,
    measure: Measure,
    *,
    parallel: int = 1,
    tell: Tell = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Status:
    """Do what is left of a sweep, claimed unless the caller has; returns how it stands.

    Args:
        parallel: trials that are measured at a time, each in a thread of its own.

    Raises:
        ConfigError: it is running already.
        SweepError: combination after combination is refused, or fails.
        PlaygroundError, StorageError: target or database failed; the sweep can be resumed.
    """
    if not sweep.claimed:
        sweep.claim()
    status: Status = "failed"
    fault = "Something broke; the details are in the program's log. Resume the sweep to continue."
    try:
        with database_errors():
            status = _Run(sweep, measure, tell, cancelled, parallel).run()
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
    """State of one call; its lock is held wherever it is read or changed."""

    def __init__(
        self,
        sweep: Sweep,
        measure: Measure,
        tell: Tell,
        cancelled: Callable[[], bool],
        parallel: int,
    ) -> None:
        plan, begun = sweep.plan, sweep.trials()
        self.sweep, self.plan, self._parallel = sweep, plan, parallel
        self._measure, self._tell, self._asked_to_stop = measure, tell, cancelled
        self._lock, self._broken = threading.RLock(), threading.Event()
        self._sweep_id = str(sweep.attributes[SWEEP_ID])
        self._reference: float | None = sweep.attributes.get(REFERENCE)
        self._last: Outcome = "running"
        self._in_a_row = 0
        self._taken = [t.seconds for t in begun if t.outcome in BUDGET and t.seconds]
        self._slots = {
            slot: replace(trial, outcome="killed") if trial.outcome == "running" else trial
            for slot, trial in last_of_slots(begun).items()
        }
        self._distributions = distributions(plan.space)
        self._random = random.Random(plan.seed + len(begun))
        self._study = sweep.study
        # A tree-structured Parzen estimator after some random trials; resumed, it draws on afresh.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=plan.seed + len(begun),
            n_startup_trials=max(3, min(10, plan.num_trials // 3)),
            constant_liar=parallel > 1,  # what others are measuring counts as poor meanwhile
        )
        self._study.pruner = optuna.pruners.NopPruner()
        if plan.prune:
            self._study.pruner = optuna.pruners.MedianPruner(
                n_startup_trials=PRUNE_AFTER, n_warmup_steps=MIN_PAIRS
            )
        self._retry(begun)

    def run(self) -> Status:
        self.say("starting")
        if self._parallel == 1:
            self._go_on()
        else:
            with ThreadPoolExecutor(self._parallel, thread_name_prefix="trial") as threads:
                list(threads.map(lambda _: self._go_on(), range(self._parallel)))
        if self.cancelled():
            return "stopped"
        self.say("done")
        return "completed"

    def cancelled(self) -> bool:
        return self._asked_to_stop() or self._broken.is_set()

    def _go_on(self) -> None:
        """Trial after trial, until there is none to begin; a fault ends the others' trials too."""
        try:
            with database_errors():
                while not self.cancelled() and (trial := self._next()) is not None:
                    self._try(trial)
        except BaseException:
            self._broken.set()
            raise

    def say(self, message: str, trial: TrialProgress | None = None) -> None:
        with self._lock:
            self._say(message, trial)

    def _say(self, message: str, trial: TrialProgress | None) -> None:
        mean_s = sum(self._taken) / len(self._taken) if self._taken else None
        begun = 0.0 if trial is None else trial.num_pairs / max(1, trial.num_planned)
        eta_s = None if mean_s is None else mean_s * max(0.0, self._num_left - begun)
        planned = self.plan.num_trials
        self._tell(Progress(self._num_done, planned, message, eta_s, trial=trial))

    @property
    def _num_done(self) -> int:
        return num_done(self._slots.values(), self.plan.mode)

    @property
    def _num_left(self) -> int:
        return max(0, self.plan.num_trials - self._num_done)

    @property
    def _num_running(self) -> int:
        return sum(trial.outcome == "running" for trial in self._slots.values())

    # ---- one trial

    def _try(self, trial: optuna.Trial) -> None:
        """Measure one point and write down what came of it.

        Raises:
            SweepError: point after point comes to nothing; naming what the last one said.
        """
        began_s = time.monotonic()
        running = RunningTrial(self, trial)
        # The same for every try of a slot, so that its answers are found again.
        run_group = f"{self._sweep_id}-{_slot_of(trial)}"
        outcome: Outcome = "stopped"
        figures, reason = None, ""
        try:
            pairs = self._measure(self.plan.space.config(trial.params), run_group, running)
            if not self.cancelled():
                figures = self._figures(pairs)
                outcome = "pruned" if running.pruned else "measured"
                if running.pruned:
                    reason = f"below the median after {len(pairs)} of {self.plan.num_turns} prompts"
        except (ConfigError, DrafterError) as error:
            outcome, reason = "refused", str(error)
        except (BrokenOffError, OutOfMemoryError) as error:
            outcome, reason = "failed", str(error)
        except WorkerLostError as error:
            outcome, reason = "killed", str(error)
        finally:
            with self._lock:
                self._told(trial, outcome, figures, reason)
                if outcome == "killed":
                    self._retry(self.sweep.trials(), only=_slot_of(trial))
        if outcome in ("measured", "pruned"):
            self._taken.append(time.monotonic() - began_s)
        with self._lock:
            self._count(outcome, reason)
        self.say("next trial")

    def _figures(self, pairs: Sequence[Pair]) -> Figures:
        """A trial's figures; the first sets what tok/s are counted from."""
        with self._lock:
            figures = figures_of(pairs, self.plan.objective, self._reference)
            if self._reference is None and figures.plain_tok_s:
                self._reference = figures.plain_tok_s
                self.sweep.write({REFERENCE: self._reference})
            return figures

    def _count(self, outcome: Outcome, reason: str) -> None:
        """Raises SweepError: too many in a row came to nothing."""
        self._in_a_row = self._in_a_row + 1 if outcome == self._last else 1
        self._last = outcome
        most = {"failed": MAX_FAILED, "refused": MAX_REFUSED}.get(outcome)
        endless = outcome == "failed" or self.plan.mode != "grid"
        if most is not None and self._in_a_row >= most and endless:
            raise SweepError(f"{most} combinations in a row {outcome}; the last one: {reason}")

    def _told(
        self,
        trial: optuna.Trial,
        outcome: Outcome,
        figures: Figures | None = None,
        reason: str = "",
    ) -> None:
        """Write down what came of a trial."""
        if figures is not None:
            trial.set_user_attr(FIGURES, asdict(figures))
        if reason:
            trial.set_user_attr(REASON, reason)
        trial.set_user_attr(OUTCOME, outcome)
        value = figures.told if figures is not None and outcome == "measured" else None
        self._study.tell(trial, value, state=TOLD[outcome])
        if outcome != "repeated":
            slot = _slot_of(trial)
            self._slots[slot] = Trial(trial.number, slot, dict(trial.params), outcome)

    # ---- which point is next

    def _next(self) -> optuna.Trial | None:
        """A trial that nobody else measures; None when all that the plan has are begun."""
        with self._lock:
            if (trial := self._drawn()) is not None:
                slot = _slot_of(trial)
                self._slots[slot] = Trial(trial.number, slot, dict(trial.params), "running")
            return trial

    def _drawn(self) -> optuna.Trial | None:
        """What was broken off, the rest of the grid, or a new draw.

        The first draw is where the method is now, for comparison; a search of few points ends up
        taking all of them once.
        """
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return self._ask()
        if self._num_left <= self._num_running:
            return None
        known, space = {trial.key for trial in self._slots.values()}, self.plan.space
        if self.plan.mode == "grid":
            return self._fixed(next((p for p in space.grid() if key_of(p) not in known), None))
        if not known and space.holds(space.start):
            return self._fixed(space.start)
        for _ in range(MAX_REPEATED):
            trial = self._ask()
            if key_of(trial.params) not in known:
                return trial
            self._told(trial, "repeated")
        points = space.points()
        if points is None:
            return self._ask()
        left = [point for point in points if key_of(point) not in known]
        return self._fixed(self._random.choice(left) if left else None)

    def _ask(self) -> optuna.Trial:
        return self._study.ask(self._distributions)

    def _fixed(self, point: Point | None) -> optuna.Trial | None:
        if point is None:
            return None
        self._study.enqueue_trial(point)
        return self._ask()

    def _retry(self, begun: Sequence[Trial], only: int | None = None) -> None:
        """Queue what a killed or stopped process did not finish, or `only` one slot of it."""
        for trial in begun:
            if trial.outcome == "running" and only is None:
                self._study.tell(trial.number, state=TrialState.FAIL)
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        queued = {trial.user_attrs.get(SLOT) for trial in waiting}
        for slot, trial in list(self._slots.items()):
            whole = trial.point.keys() == self._distributions.keys()
            if trial.outcome in FINAL or slot in queued or not whole or only not in (None, slot):
                continue
            killed = [t for t in begun if t.slot == slot and t.outcome in ("running", "killed")]
            if num_fruitless(killed) < MAX_TRIES:
                self._study.enqueue_trial(trial.point, user_attrs={SLOT: slot})
                continue
            given_up = optuna.trial.create_trial(
                state=TrialState.FAIL,
                params=trial.point,
                distributions=self._distributions,
                user_attrs={SLOT: slot, OUTCOME: "failed", REASON: DIED},
            )
            self._study.add_trial(given_up)
            self._slots[slot] = Trial(trial.number, slot, trial.point, "failed", reason=DIED)


def _slot_of(trial: optuna.Trial) -> int:
    return int(trial.user_attrs.get(SLOT, trial.number))


class RunningTrial:
    """A trial while its point is measured; decides, prompt by prompt, whether it goes on."""

    def __init__(self, run: _Run, trial: optuna.Trial) -> None:
        self._run = run
        self._trial = trial
        self.number = trial.number
        self.num_pairs = 0
        self.pruned = False
        self._requests: list[FinishedRequest] = []

    def tell(self, progress: Progress) -> None:
        """How far the measurement of the point is."""
        self.say(progress.message)
        if progress.last is None:
            return
        self.answered(progress.num_done)
        self._requests.append(progress.last)
        own, plain = (
            [r for r in self._requests if (r.configuration == METHOD) is is_own]
            for is_own in (True, False)
        )
        if len(pairs := in_pairs(own, plain)) > self.num_pairs:
            self.report(pairs)

    def begin(self, worker: str) -> None:
        """Which worker has it."""
        self._trial.set_user_attr(WORKER, worker)

    def answered(self, num_requests: int) -> None:
        """How many requests are answered, whenever there is a new one."""
        with database_errors():
            self._trial.set_user_attr(ANSWERED, num_requests)
        self._run.sweep.heartbeat()

    def report(self, pairs: Sequence[Pair]) -> None:
        """All pairs of answers so far, whenever there is a new one."""
        self.num_pairs = len(pairs)
        if not MIN_PAIRS <= len(pairs) < self._run.plan.num_turns:
            return
        try:
            objective = "mat" if self._run.plan.objective == "mat" else "speedup"
            so_far = figures_of(pairs, objective, None).told  # type: ignore[arg-type]
        except ConfigError:
            return
        assert so_far is not None
        self._trial.report(so_far, len(pairs))
        self.pruned = self._trial.should_prune()

    def say(self, message: str) -> None:
        """What is being done."""
        planned = self._run.plan.num_turns
        now = TrialProgress(self._trial.number, self._trial.params, self.num_pairs, planned)
        self._run.say(message, now)

    def is_over(self) -> bool:
        """Whether the measuring is to end at once."""
        return self.pruned or self._run.cancelled()


# ---- the space in Optuna's terms


def distributions(space: Space) -> dict[str, BaseDistribution]:
    return {v.field: _distribution(v, k) for v, k in zip(space.varied, space.tunables, strict=True)}


def _distribution(vary: Vary, tunable: Tunable) -> BaseDistribution:
    if vary.values:
        return CategoricalDistribution(vary.values)
    low, high = vary.ends
    if vary.step is not None:
        high = low + int((high - low) / vary.step + 1e-9) * vary.step
    if tunable.kind == "int":
        return IntDistribution(int(low), int(high), log=vary.log, step=int(vary.step or 1))
    return FloatDistribution(float(low), float(high), log=vary.log, step=vary.step)
