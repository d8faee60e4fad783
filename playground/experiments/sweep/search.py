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

from playground.experiments.sweep.space import Point, Space, Tunable, Vary
from playground.experiments.sweep.store import Sweep
from playground.experiments.sweep.trials import (
    FIGURES,
    FINAL,
    OUTCOME,
    REASON,
    SLOT,
    Figures,
    Status,
    Trial,
    key_of,
    last_of_slots,
    num_done,
)

MAX_TRIES = 3
"""Times that a trial is begun; a point that kills the process each time is given up."""
MAX_REPEATED = 8
"""Draws of known points in a row before a point that was never tried is taken."""
PRUNE_AFTER = 5
"""Finished trials before any is pruned."""
MIN_PAIRS = 2
"""Prompts that a trial answers before it may be pruned."""
DIED = f"The process died {MAX_TRIES} times while this was measured."


class TrialScheduler:
    """Hands out trials, one at a time, until the plan is done."""

    def __init__(self, sweep: Sweep) -> None:
        plan, begun = sweep.plan, sweep.trials()
        self._study = sweep.study
        self._plan = plan
        self._distributions = distributions(plan.space)
        self._slots = last_of_slots(begun)
        self._grid = plan.space.grid() if plan.mode == "grid" else ()
        self._random = random.Random(plan.seed + len(begun))
        # A tree-structured Parzen estimator after some random trials; resumed, it draws on afresh.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=plan.seed + len(begun), n_startup_trials=max(3, min(10, plan.num_trials // 3))
        )
        self._study.pruner = optuna.pruners.NopPruner()
        if plan.prune:
            self._study.pruner = optuna.pruners.MedianPruner(
                n_startup_trials=PRUNE_AFTER, n_warmup_steps=MIN_PAIRS
            )
        self._retry(begun)

    @property
    def num_done(self) -> int:
        """Trials of the plan that are behind it."""
        return num_done(self._slots.values(), self._plan.mode)

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
        outcome: Status,
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
            self._slots[slot] = Trial(trial.number, slot, dict(trial.params), outcome)

    # ---- what was broken off

    def _retry(self, begun: list[Trial]) -> None:
        """Queue what a killed or stopped process did not finish."""
        for trial in begun:
            if trial.outcome == "running":
                self._study.tell(trial.number, state=TrialState.FAIL)
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        queued = {trial.user_attrs.get(SLOT) for trial in waiting}
        for slot, trial in list(self._slots.items()):
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
        self._slots[slot] = Trial(number, slot, point, "failed", reason=DIED)

    # ---- new points

    def _ask(self) -> optuna.Trial:
        return self._study.ask(self._distributions)

    def _fixed(self, point: Point | None) -> optuna.Trial | None:
        if point is None:
            return None
        self._study.enqueue_trial(point)
        return self._ask()

    def _known(self) -> set[str]:
        return {trial.key for trial in self._slots.values()}

    def _of_grid(self) -> optuna.Trial | None:
        known = self._known()
        left = (point for point in self._grid if key_of(point) not in known)
        return self._fixed(next(left, None))

    def _drawn(self) -> optuna.Trial | None:
        """A draw that is new; the first is where the method is now, for comparison.

        A search of few points ends up taking all of them once.
        """
        known, space = self._known(), self._plan.space
        if not known and space.holds(space.start):
            return self._fixed(space.start)
        for _ in range(MAX_REPEATED):
            trial = self._ask()
            if key_of(trial.params) not in known:
                return trial
            self.tell(trial, "repeated")
        points = space.points()
        if points is None:
            return self._ask()
        left = [point for point in points if key_of(point) not in known]
        return self._fixed(self._random.choice(left) if left else None)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {v.field: _distribution(v, k) for v, k in zip(space.varied, space.tunables, strict=True)}


def _distribution(vary: Vary, tunable: Tunable) -> BaseDistribution:
    if vary.values:
        return CategoricalDistribution(vary.values)
    low, high = vary.ends
    if tunable.kind == "int":
        step = int(vary.step or 1)
        high = low + (high - low) // step * step
        return IntDistribution(int(low), int(high), log=vary.log, step=step)
    if vary.step is None:
        return FloatDistribution(float(low), float(high), log=vary.log)
    last = low + int((high - low) / vary.step + 1e-9) * vary.step
    return FloatDistribution(float(low), float(last), step=vary.step)
