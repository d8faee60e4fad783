"""The trials of a sweep: the outcome of each, and the choice of the next point.

For the log, a trial that was stopped or whose process died is still running. When the sweep is
resumed, its measurement continues from the answers that the log has.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

from engine.errors import PlaygroundError
from engine.formats import DASH
from playground.experiments.plan import METHOD, Configuration, SweepPlan
from playground.experiments.report.columns import Cell, Column
from playground.experiments.report.report import Section, make_section
from playground.experiments.space import Mode, Objective, Point, Space, VariedSetting
from playground.experiments.statistics import FinishedRequest
from playground.host.controls import Control
from playground.host.speedup import Counts, key_of, pair_requests, prompt_counts, trial_id

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
class Trial:
    """One trial.

    Attributes:
        number: 1, 2, 3 … in the order in which the trials began.
        seconds: from its start, or from its last continuation, to its end.
        section: the report on its runs; None unless it was measured and they are in the log.
        counts: their tokens and seconds by prompt.
    """

    number: int
    point: Point
    outcome: Outcome
    reason: str = ""
    seconds: float | None = None
    section: Section | None = None
    counts: Mapping[str, Counts] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its configuration in the report."""
        return f"trial {self.number}"

    @property
    def key(self) -> str:
        return key_of(self.point)

    @property
    def id(self) -> str:
        """What its runs carry."""
        return trial_id(self.point)

    def cell(self, column: Column) -> Cell:
        """One of its figures."""
        section = self.section
        return Cell(DASH) if section is None else column.cell(section, section.overall)

    def value(self, objective: Objective) -> float | None:
        """The objective; None unless it was measured completely, with a reliable baseline."""
        if self.section is None:
            return None
        return self.section.overall.mat if objective == "mat" else self.section.ratio or None

    def told(self, objective: Objective) -> float | None:
        """The value reported to Optuna; MAT is the upper bound of a speedup in doubt."""
        figures = self.section and self.section.overall
        if figures and figures.speedup and figures.speedup.doubt:
            return figures.mat
        return self.value(objective)


def with_figures(trial: Trial, plan: SweepPlan, requests: Sequence[FinishedRequest]) -> Trial:
    """A trial with the figures of its requests; as it is if they lack one of both methods."""
    plain = [one for one in requests if one.configuration == plan.reference.name]
    own = [one for one in requests if one.configuration == METHOD]
    if not (pairs := pair_requests(own, plain)):
        return trial
    swept, config = plan.swept, {**plan.swept.values, **trial.point}
    stored = {"name": trial.name, "title": swept.title, "config": config}
    configuration = Configuration.stored(stored, {swept.decoding_type: type(swept.config)})
    section = make_section(configuration, own, plain, {} if plan.sampling.greedy else None)
    return replace(trial, section=section, counts=prompt_counts(pairs))


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
        told = ended.told(self._plan.chooser.objective)
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
    """A sweep's trials as a study, for Optuna's samplers and plots.

    Measured trials without figures, whose runs were deleted, are left out.
    """
    logging.getLogger("optuna").setLevel(logging.WARNING)
    study, ranges = optuna.create_study(direction="maximize"), distributions(plan.space)
    objective = plan.chooser.objective
    study.add_trials(
        create_trial(
            state=STATES[trial.outcome],
            params=trial.point,
            distributions=ranges,
            value=trial.told(objective),
        )
        for trial in trials
        if trial.outcome != "measured" or trial.told(objective) is not None
    )
    return study


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {v.field: _distribution(v, k) for v, k in zip(space.varied, space.tunables, strict=True)}


def _distribution(vary: VariedSetting, tunable: Control) -> BaseDistribution:
    if vary.values:
        return CategoricalDistribution(vary.values)
    low, high = vary.ends
    if vary.step is not None:
        high = float(f"{low + int((high - low) / vary.step + 1e-9) * vary.step:.12g}")
    if tunable.is_integer:
        return IntDistribution(int(low), int(high), log=vary.log, step=int(vary.step or 1))
    return FloatDistribution(float(low), float(high), log=vary.log, step=vary.step)
