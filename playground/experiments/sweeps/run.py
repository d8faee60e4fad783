"""Runs a sweep: trial after trial until the plan is done, each written down before the next.

Killing the process at any moment loses the running request at most: `run_sweep` on the same sweep
tries the broken-off trial again, from the answers that it had, and then does what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna

from engine.errors import ConfigError, DrafterError, OutOfMemoryError, PlaygroundError
from playground.experiments.sweeps.measure import Measure, Pair, figures_of
from playground.experiments.sweeps.search import Picker
from playground.experiments.sweeps.store import REFERENCE, SWEEP_ID, Status, Sweep, database_errors
from playground.experiments.sweeps.trials import BUDGET, SLOT, Figures, Outcome
from storage import StorageError

MAX_REFUSED = 100
"""Refusals in a row after which a search is given up."""
MAX_FAILED = 3
"""Failures in a row after which any sweep is given up."""
PRUNE_AFTER = 5
"""Finished trials before any is pruned."""
MIN_PAIRS = 2
"""Prompts that a trial answers before it may be pruned."""


class SweepError(PlaygroundError):
    """The sweep as a whole cannot go on, whatever the point."""


class PointError(PlaygroundError):
    """Measuring a point broke off; other points may do."""


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is.

    Attributes:
        number, point: of the trial that is running.
        num_pairs: prompts of the running trial that both methods have answered, of `of_pairs`.
        eta_s: None until there is something to judge by.
    """

    num_done: int
    num_trials: int
    words: str
    eta_s: float | None
    number: int | None = None
    point: Mapping[str, Any] | None = None
    num_pairs: int = 0
    of_pairs: int = 0


Tell = Callable[[SweepProgress], None]


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
    return conduct(sweep, measure, tell=tell, cancelled=cancelled)


def conduct(
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
        self._sweep = sweep
        self._plan = sweep.plan
        self._measure = measure
        self._tell = tell
        self._cancelled = cancelled
        self._sweep_id = str(sweep.attributes[SWEEP_ID])
        self._reference: float | None = sweep.attributes.get(REFERENCE)
        self._last_outcome: Outcome = "running"
        self._in_a_row = 0
        self._taken = [t.seconds for t in sweep.trials() if t.outcome in BUDGET and t.seconds]
        sweep.study.pruner = pruner(self._plan.prune)
        self._picker = Picker(sweep)

    def run(self) -> Status:
        self.say("starting")
        while not self._cancelled():
            trial = self._picker.next()
            if trial is None:
                self.say("done")
                return "completed"
            self._try(trial)
        return "stopped"

    def _count(self, outcome: Outcome, sentence: str) -> None:
        """Give up when point after point comes to nothing.

        Raises:
            SweepError: naming what the last one said.
        """
        self._in_a_row = self._in_a_row + 1 if outcome == self._last_outcome else 1
        self._last_outcome = outcome
        most = {"refused": MAX_REFUSED, "failed": MAX_FAILED}.get(outcome)
        if outcome == "refused" and self._plan.mode == "grid":
            most = None
        if most is not None and self._in_a_row >= most:
            raise SweepError(f"{most} combinations in a row {outcome}; the last one: {sentence}")

    def _try(self, trial: optuna.Trial) -> None:
        """Measure one point and write down what came of it."""
        began_s = time.monotonic()
        watch = _Watch(self, trial)
        try:
            config = self._plan.space.config(trial.params)
            pairs = self._measure(config, self._run_group(trial), watch)
            self._tell_measured(trial, watch, pairs)
        except (ConfigError, DrafterError) as error:
            self._broken_off(trial, "refused", str(error))
        except (PointError, OutOfMemoryError) as error:
            self._broken_off(trial, "failed", str(error))
        except (PlaygroundError, StorageError, KeyboardInterrupt):
            self._picker.tell(trial, "stopped")
            raise
        else:
            self._count("measured", "")
            self._taken.append(time.monotonic() - began_s)
            self.say("next trial")

    def _broken_off(self, trial: optuna.Trial, outcome: Outcome, sentence: str) -> None:
        self._picker.tell(trial, outcome, reason=sentence)
        self._count(outcome, sentence)

    def _tell_measured(self, trial: optuna.Trial, watch: _Watch, pairs: list[Pair]) -> None:
        if watch.cancelled():
            self._picker.tell(trial, "stopped")
            return
        figures = figures_of(pairs, self._plan.objective, self._reference)
        if watch.pruned:
            after = f"below the median after {len(pairs)} of {self._plan.num_pairs} prompts"
            self._picker.tell(trial, "pruned", figures=figures, reason=after)
            return
        if self._reference is None and figures.plain_tok_s:
            self._reference = figures.plain_tok_s
            self._sweep.write(REFERENCE, self._reference)
        self._picker.tell(trial, "measured", figures=figures)

    def _run_group(self, trial: optuna.Trial) -> str:
        """The same for every try of a slot, so that its answers are found again."""
        return f"{self._sweep_id}-{trial.user_attrs.get(SLOT, trial.number)}"

    # ---- for the watch

    def cancelled(self) -> bool:
        return self._cancelled()

    def figures(self, pairs: list[Pair]) -> Figures:
        return figures_of(pairs, "mat" if self._plan.objective == "mat" else "speedup", None)

    @property
    def num_pairs(self) -> int:
        return self._plan.num_pairs

    def heartbeat(self) -> None:
        self._sweep.heartbeat()

    def say(self, words: str, trial: optuna.Trial | None = None, num_pairs: int = 0) -> None:
        left = self._picker.num_left
        mean = sum(self._taken) / len(self._taken) if self._taken else None
        begun = num_pairs / max(1, self._plan.num_pairs)
        self._tell(
            SweepProgress(
                self._picker.num_done,
                self._plan.num_trials,
                words,
                None if mean is None else mean * max(0.0, left - begun),
                None if trial is None else trial.number,
                None if trial is None else trial.params,
                num_pairs,
                self._plan.num_pairs,
            )
        )


class _Watch:
    """Reports a running trial and decides, prompt by prompt, whether it goes on."""

    def __init__(self, run: _Run, trial: optuna.Trial) -> None:
        self._run = run
        self._trial = trial
        self._num_pairs = 0
        self.pruned = False

    def pair(self, pairs: list[Pair]) -> bool:
        self._num_pairs = len(pairs)
        self._run.heartbeat()
        if not MIN_PAIRS <= len(pairs) < self._run.num_pairs:
            return True
        try:
            so_far = self._run.figures(pairs).value
        except ConfigError:
            return True
        self._trial.report(so_far, len(pairs))
        self.pruned = self._trial.should_prune()
        return not self.pruned

    def say(self, words: str) -> None:
        self._run.say(words, self._trial, self._num_pairs)

    def cancelled(self) -> bool:
        return self._run.cancelled()


def pruner(prune: bool) -> optuna.pruners.BasePruner:
    """Stops what is below the median of the finished trials at the same prompt; or nothing."""
    if not prune:
        return optuna.pruners.NopPruner()
    return optuna.pruners.MedianPruner(n_startup_trials=PRUNE_AFTER, n_warmup_steps=MIN_PAIRS)
