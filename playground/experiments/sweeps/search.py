"""Which point a sweep tries next: what was broken off, the rest of the grid, or Optuna's draw."""

from __future__ import annotations

import random

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from playground.experiments.sweeps.fields import Knob
from playground.experiments.sweeps.plan import SweepPlan
from playground.experiments.sweeps.space import Point, Space, Vary
from playground.experiments.sweeps.store import Sweep
from playground.experiments.sweeps.trials import (
    FIGURES,
    FINAL,
    OUTCOME,
    REASON,
    SLOT,
    Figures,
    Outcome,
    Trial,
    key_of,
    last_words,
    num_done,
)

MAX_TRIES = 3
"""Times that a trial is begun; a point that kills the process each time is given up."""
MAX_REPEATED = 8
"""Draws of known points in a row before a point that was never tried is taken."""
DIED = f"The process died {MAX_TRIES} times while this was measured."


class Picker:
    """Hands out trials, one at a time, until the plan is done."""

    def __init__(self, sweep: Sweep) -> None:
        self._study = sweep.study
        self._plan = sweep.plan
        self._distributions = distributions(sweep.plan.space)
        begun = sweep.trials()
        self._words = last_words(begun)
        self._grid = sweep.plan.space.grid() if sweep.plan.mode == "grid" else ()
        self._random = random.Random(sweep.plan.seed + len(begun))
        self._study.sampler = sampler(sweep.plan, len(begun))
        self._retry(begun)

    @property
    def num_done(self) -> int:
        """Trials of the plan that are behind it."""
        return num_done(self._words.values(), self._plan.mode)

    @property
    def num_left(self) -> int:
        return max(0, self._plan.num_trials - self.num_done)

    def next(self) -> optuna.Trial | None:
        """The next trial to run; None when the plan is done, or nothing is left to try."""
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return self._ask()
        if not self.num_left:
            return None
        return self._of_grid() if self._plan.mode == "grid" else self._drawn()

    def tell(
        self,
        trial: optuna.Trial,
        outcome: Outcome,
        *,
        figures: Figures | None = None,
        reason: str = "",
    ) -> None:
        """Write down what came of a trial."""
        if figures is not None:
            trial.set_user_attr(FIGURES, figures.to_dict())
        if reason:
            trial.set_user_attr(REASON, reason)
        trial.set_user_attr(OUTCOME, outcome)
        if outcome == "measured" and figures is not None:
            self._study.tell(trial, figures.value)
        else:
            pruned = outcome in ("pruned", "refused")
            self._study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        if outcome != "repeated":
            slot = trial.user_attrs.get(SLOT, trial.number)
            self._words[slot] = _noted(trial, slot, outcome)

    # ---- what was broken off

    def _retry(self, begun: list[Trial]) -> None:
        """Queue what a killed or stopped process did not finish."""
        for trial in begun:
            if trial.outcome == "running":
                self._study.tell(trial.number, state=TrialState.FAIL)
        queued = {
            trial.user_attrs.get(SLOT)
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        }
        for slot, trial in list(self._words.items()):
            whole = trial.point.keys() == self._distributions.keys()
            if trial.outcome in FINAL or slot in queued or not whole:
                continue
            killed = [t for t in begun if t.slot == slot and t.outcome in ("running", "killed")]
            if len(killed) < MAX_TRIES:
                self._study.enqueue_trial(trial.point, user_attrs={SLOT: slot})
            else:
                self._give_up(slot, trial.point)

    def _give_up(self, slot: int, point: Point) -> None:
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.FAIL,
                params=point,
                distributions=self._distributions,
                user_attrs={SLOT: slot, OUTCOME: "failed", REASON: DIED},
            )
        )
        number = len(self._study.get_trials(deepcopy=False)) - 1
        self._words[slot] = Trial(number, slot, point, "failed", None, DIED, None, None)

    # ---- new points

    def _ask(self) -> optuna.Trial:
        return self._study.ask(self._distributions)

    def _known(self) -> set[str]:
        return {trial.key for trial in self._words.values()}

    def _of_grid(self) -> optuna.Trial | None:
        known = self._known()
        left = (point for point in self._grid if key_of(point) not in known)
        return self._fixed(next(left, None))

    def _drawn(self) -> optuna.Trial | None:
        """A draw that is new; the first is where the method is now, for comparison.

        A search of few points ends up taking all of them once.
        """
        known = self._known()
        if not known and self._plan.space.holds(self._plan.space.start):
            return self._fixed(self._plan.space.start)
        for _ in range(MAX_REPEATED):
            trial = self._ask()
            if key_of(trial.params) not in known:
                return trial
            self.tell(trial, "repeated")
        points = self._plan.space.points()
        if points is None:
            return self._ask()
        left = [point for point in points if key_of(point) not in known]
        return self._fixed(self._random.choice(left) if left else None)

    def _fixed(self, point: Point | None) -> optuna.Trial | None:
        if point is None:
            return None
        self._study.enqueue_trial(point)
        return self._ask()


def _noted(trial: optuna.Trial, slot: int, outcome: Outcome) -> Trial:
    return Trial(trial.number, slot, dict(trial.params), outcome, None, "", None, None)


def sampler(plan: SweepPlan, num_begun: int) -> optuna.samplers.BaseSampler:
    """Tree-structured Parzen estimator after some random trials; resumed, it draws on afresh."""
    startup = max(3, min(10, plan.num_trials // 3))
    return optuna.samplers.TPESampler(seed=plan.seed + num_begun, n_startup_trials=startup)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's words."""
    return {v.field: _distribution(v, k) for v, k in zip(space.varied, space.knobs, strict=True)}


def _distribution(vary: Vary, knob: Knob) -> BaseDistribution:
    if vary.values:
        return CategoricalDistribution(vary.values)
    low, high = vary.ends
    if knob.kind == "int":
        step = int(vary.step or 1)
        high = low + (high - low) // step * step
        return IntDistribution(int(low), int(high), log=vary.log, step=step)
    count = vary.count(whole=False)
    if vary.step is None or count is None:
        return FloatDistribution(float(low), float(high), log=vary.log)
    return FloatDistribution(float(low), float(low + (count - 1) * vary.step), step=vary.step)
