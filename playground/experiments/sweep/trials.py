"""The trials of a sweep: the outcome of each, and the choice of the next point.

For the log, a trial that was stopped or whose process died is still running. When the sweep is
resumed, its measurement continues from the answers that the log has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

from engine.errors import ConfigError, PlaygroundError
from playground.experiments.finished import Pair
from playground.experiments.plan import SweepPlan
from playground.experiments.space import Mode, Objective, Point, Space, Tunable, VariedSetting
from playground.experiments.statistics import Counts, prompt_counts, speedup_of, totals_of
from playground.host.baseline import Doubt

MAX_REFUSED = 100
"""Refused trials in a row after which a search gives up."""
MAX_FAILED = 3
"""Failed trials in a row after which any sweep gives up."""
MAX_REPEATED = 8
"""Draws of known points in a row before an unmeasured point is chosen at random."""
Outcome = Literal["running", "measured", "pruned", "refused", "failed"]
"""Only sweeps of older versions have pruned trials."""
STATES: dict[Outcome, TrialState] = {
    "running": TrialState.RUNNING,
    "measured": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "refused": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
"""Optuna's states of the outcomes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements of one trial, over all prompts that both methods answered.

    Attributes:
        tok_s, plain_tok_s: of the method and of plain decoding, prompt by prompt in turn.
        speedup: their ratio; None where `doubt` leaves no speedup.
        num_prompts: answers compared.
        num_same: of these, answers that are token-identical to plain decoding's.
        counts: tokens and seconds by prompt; empty in sweeps of older versions.
        doubt: why no speedup is given.
    """

    tok_s: float | None
    plain_tok_s: float | None
    speedup: float | None
    mat: float | None
    num_prompts: int
    num_same: int
    counts: Mapping[str, Counts] = field(default_factory=dict)
    doubt: Doubt | None = None

    def value(self, objective: Objective) -> float | None:
        """The objective; None where no speedup is given."""
        return self.mat if objective == "mat" else self.speedup

    def told(self, objective: Objective) -> float | None:
        """The value reported to Optuna; MAT is the upper bound of a speedup in doubt."""
        return self.mat if self.doubt else self.value(objective)


def figures_of(pairs: Sequence[Pair], objective: Objective) -> Figures:
    """The figures of a point. Raises ConfigError: they lack the objective."""
    own, plain = totals_of(pairs)
    fast = speedup_of(pairs)
    speedup, doubt = (fast.ratio, fast.doubt) if fast else (None, None)
    same = sum(own.output_ids == plain.output_ids for own, plain in pairs)
    values = own.tok_s, plain.tok_s, speedup, own.mat, len(pairs), same
    figures = Figures(*values, prompt_counts(pairs), doubt)
    if figures.told(objective) is None:
        raise ConfigError(
            "The answers end after their first token, so nothing can be measured. Choose other "
            "prompts, a larger max_new_tokens, or ignore_eos."
        )
    return figures


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Attributes:
        number: 1, 2, 3 … in the order in which the trials began.
        seconds: from its start, or from its last continuation, to its end.
    """

    number: int
    point: Point
    outcome: Outcome
    figures: Figures | None = None
    reason: str = ""
    seconds: float | None = None

    @property
    def key(self) -> str:
        return key_of(self.point)

    def value(self, objective: Objective) -> float | None:
        """The objective; None unless it was measured completely, with a reliable baseline."""
        figures = self.figures if self.outcome == "measured" else None
        return figures.value(objective) if figures else None


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


def trial_benchmark_id(sweep_id: str, point: Mapping[str, Any]) -> str:
    """The benchmark id of the runs of a point, equal for every attempt at it."""
    return f"{sweep_id}-{hashlib.sha256(key_of(point).encode()).hexdigest()[:8]}"


def num_done(trials: Iterable[Trial], mode: Mode) -> int:
    """The number of trials that count as done; refused ones count in a grid only."""
    open_ones = ("running",) if mode == "grid" else ("running", "refused")
    return sum(trial.outcome not in open_ones for trial in trials)


# ---- which point is next


class OptunaChooser:
    """Chooses the trials of a sweep and stores their outcomes; callers must hold a lock.

    Attributes:
        trials: those that have begun, by number.
    """

    def __init__(
        self,
        plan: SweepPlan,
        trials: Iterable[Trial],
        save: Callable[[Trial], object],
        *,
        parallel: int = 1,
    ) -> None:
        """`trials` are those of earlier processes; `save` stores one when it begins and ends."""
        self._plan, self._space, self._save = plan, plan.space, save
        self.trials = {trial.number: trial for trial in trials}
        ended = [trial for trial in self.trials.values() if trial.outcome != "running"]
        self._unfinished = [trial for trial in self.trials.values() if trial.outcome == "running"]
        self._distributions = distributions(plan.space)
        self._study = study_of(plan, ended)
        # A tree-structured Parzen estimator after some random trials.
        seed = plan.chooser.seed + len(self.trials)
        self._random = random.Random(seed)
        self._study.sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=max(3, min(10, plan.num_trials // 3)),
            constant_liar=parallel > 1,  # running trials count as poor until they end
        )
        self._last, self._num_in_row = "", 0

    @property
    def num_done(self) -> int:
        return num_done(self.trials.values(), self._plan.chooser.mode)

    @property
    def num_left(self) -> int:
        return max(0, self._plan.num_trials - self.num_done)

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of a trial."""
        taken = [t.seconds for t in self.trials.values() if t.outcome != "refused" and t.seconds]
        return sum(taken) / len(taken) if taken else None

    def next(self) -> tuple[Trial, optuna.Trial] | None:
        """The next trial and Optuna's object for it; None when all have begun."""
        if self._unfinished:
            trial = self._unfinished.pop(0)
            return trial, self._trial_at(trial.point)
        if (optuna_trial := self._draw_trial()) is None:
            return None
        trial = Trial(len(self.trials) + 1, dict(optuna_trial.params), "running")
        self._save(trial)
        self.trials[trial.number] = trial
        return trial, optuna_trial

    def _draw_trial(self) -> optuna.Trial | None:
        """The first has the method's own settings; in a small space, each point is drawn once."""
        if self.num_left <= sum(one.outcome == "running" for one in self.trials.values()):
            return None
        known, space = {trial.key for trial in self.trials.values()}, self._space
        is_grid = self._plan.chooser.mode == "grid"
        if not is_grid:
            if not known and space.contains(space.start):
                return self._trial_at(space.start)
            for _ in range(MAX_REPEATED):
                trial = self._study.ask(self._distributions)
                if key_of(trial.params) not in known:
                    return trial
                self._study.tell(trial, state=TrialState.FAIL)
        points = space.grid() if is_grid else space.points()
        if points is None:
            return self._study.ask(self._distributions)
        left = [point for point in points if key_of(point) not in known]
        if not left:
            return None
        return self._trial_at(left[0] if is_grid else self._random.choice(left))

    def _trial_at(self, point: Point) -> optuna.Trial:
        self._study.enqueue_trial(point)
        return self._study.ask(self._distributions)

    def end(self, optuna_trial: optuna.Trial, ended: Trial) -> None:
        """Store the outcome of a trial.

        Raises PlaygroundError: too many trials in a row failed; quotes the last error.
        """
        told = _told(ended, self._plan)
        self._study.tell(optuna_trial, told, state=STATES[ended.outcome])
        self._save(ended)
        self.trials[ended.number] = ended
        self._num_in_row = self._num_in_row + 1 if ended.outcome == self._last else 1
        self._last = ended.outcome
        limits = {"failed": MAX_FAILED}
        if self._plan.chooser.mode != "grid":
            limits["refused"] = MAX_REFUSED
        most = limits.get(ended.outcome)
        if most is not None and self._num_in_row >= most:
            raise PlaygroundError(
                f"{most} combinations in a row {ended.outcome}; the last one: {ended.reason}"
            )


# ---- in Optuna's terms


def study_of(plan: SweepPlan, trials: Iterable[Trial]) -> optuna.Study:
    """A sweep's trials as a study, for Optuna's samplers and plots."""
    logging.getLogger("optuna").setLevel(logging.WARNING)
    study, ranges = optuna.create_study(direction="maximize"), distributions(plan.space)
    study.add_trials(
        create_trial(
            state=STATES[trial.outcome],
            params=trial.point,
            distributions=ranges,
            value=_told(trial, plan),
        )
        for trial in trials
    )
    return study


def _told(trial: Trial, plan: SweepPlan) -> float | None:
    figures = trial.figures if trial.outcome == "measured" else None
    return figures.told(plan.chooser.objective) if figures else None


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {v.field: _distribution(v, k) for v, k in zip(space.varied, space.tunables, strict=True)}


def _distribution(vary: VariedSetting, tunable: Tunable) -> BaseDistribution:
    if vary.values:
        return CategoricalDistribution(vary.values)
    low, high = vary.ends
    if vary.step is not None:
        high = float(f"{low + int((high - low) / vary.step + 1e-9) * vary.step:.12g}")
    if tunable.is_integer:
        return IntDistribution(int(low), int(high), log=vary.log, step=int(vary.step or 1))
    return FloatDistribution(float(low), float(high), log=vary.log, step=vary.step)
