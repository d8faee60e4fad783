"""Which configuration of a sweep is next: a new one of Optuna's, or the next of a grid."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from engine.errors import PlaygroundError
from playground.experiments.finished import Pair
from playground.experiments.space import Point, Space, Tunable, Vary
from playground.experiments.sweep.plan import SweepPlan
from playground.experiments.sweep.trials import (
    FIGURES,
    OUTCOME,
    REASON,
    SECONDS,
    TOLD,
    WORKER,
    Figures,
    Trial,
    figures_of,
    key_of,
    num_done,
    read_trials,
)

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
REFERENCE = "reference_tok_s"
"""Attribute of a study: tok/s of plain decoding in its first trial."""
TRIES = "tries"
"""Attribute of a trial: the answers that it had when it was begun last, and how often with them."""


class SweepError(PlaygroundError):
    """The sweep as a whole cannot go on, whatever the point."""


class OptunaChooser:
    """Hands out the trials of a sweep and keeps what came of them; not safe to share unlocked.

    Attributes:
        trials: those that have begun, by number.
    """

    def __init__(self, study: optuna.Study, plan: SweepPlan, *, parallel: int = 1) -> None:
        self._study, self._plan, self._space = study, plan, plan.space
        self._distributions = distributions(plan.space)
        search, num_begun = plan.chooser, len(study.get_trials(deepcopy=False))
        self._random = random.Random(search.seed + num_begun)
        # A tree-structured Parzen estimator after some random trials; resumed, it draws on afresh.
        study.sampler = optuna.samplers.TPESampler(
            seed=search.seed + num_begun,
            n_startup_trials=max(3, min(10, plan.num_trials // 3)),
            constant_liar=parallel > 1,  # what others are measuring counts as poor meanwhile
        )
        study.pruner = optuna.pruners.NopPruner()
        if search.prune:
            study.pruner = optuna.pruners.MedianPruner(
                n_startup_trials=PRUNE_AFTER, n_warmup_steps=MIN_PAIRS
            )
        self._unfinished = self._left_behind()
        self.trials = {trial.number: trial for trial in read_trials(study.get_trials())}
        self._last, self._num_in_a_row = "", 0

    def _left_behind(self) -> list[optuna.Trial]:
        """Trials to continue; one whose process died while its point was drawn is dropped."""
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        unfinished = []
        for record in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if record.params.keys() == self._distributions.keys():
                unfinished.append(optuna.Trial(self._study, record._trial_id))
            else:
                self._study.tell(record.number, state=TrialState.FAIL)
        return unfinished

    # ---- how far it is

    @property
    def num_done(self) -> int:
        """How much of the plan is behind: a grid's refused points are, a search's are not."""
        return num_done(self.trials.values(), self._plan.chooser.mode)

    @property
    def num_left(self) -> int:
        return max(0, self._plan.num_trials - self.num_done)

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of a trial."""
        taken = [t.seconds for t in self.trials.values() if t.outcome != "refused" and t.seconds]
        return sum(taken) / len(taken) if taken else None

    def figures(self, pairs: Sequence[Pair]) -> Figures:
        """A trial's figures; tok/s are counted from plain decoding's in the first trial."""
        reference = self._study.user_attrs.get(REFERENCE)
        figures = figures_of(pairs, self._plan.chooser.objective, reference)
        if reference is None and figures.plain_tok_s:
            self._study.set_user_attr(REFERENCE, figures.plain_tok_s)
        return figures

    # ---- which point is next

    def next(self) -> optuna.Trial | None:
        """A trial that nobody else measures; None when all that the plan has are begun."""
        trial = self._unfinished.pop(0) if self._unfinished else self._new()
        if trial is not None:
            self.trials[trial.number] = Trial(trial.number, dict(trial.params), "running")
        return trial

    def _new(self) -> optuna.Trial | None:
        """The first is where the method is now; a search of few points takes each of them once."""
        if self.num_left <= sum(one.outcome == "running" for one in self.trials.values()):
            return None
        known = {trial.key for trial in self.trials.values()}
        if self._plan.chooser.mode == "grid":
            return self._fixed(
                next((p for p in self._space.grid() if key_of(p) not in known), None)
            )
        if not known and self._space.holds(self._space.start):
            return self._fixed(self._space.start)
        for _ in range(MAX_REPEATED):
            trial = self._study.ask(self._distributions)
            if key_of(trial.params) not in known:
                return trial
            self._study.tell(trial, state=TrialState.FAIL)
        points = self._space.points()
        if points is None:
            return self._study.ask(self._distributions)
        left = [point for point in points if key_of(point) not in known]
        return self._fixed(self._random.choice(left) if left else None)

    def _fixed(self, point: Point | None) -> optuna.Trial | None:
        if point is None:
            return None
        self._study.enqueue_trial(point)
        return self._study.ask(self._distributions)

    # ---- what came of it

    def begin(self, trial: optuna.Trial, num_answered: int) -> bool:
        """Note that a trial begins, with so many answers in the log; False if it is given up."""
        before, times = trial.user_attrs.get(TRIES, (-1, 0))
        times = 0 if num_answered > before else times
        if times >= MAX_TRIES:
            return False
        trial.set_user_attr(TRIES, (num_answered, times + 1))
        return True

    def put_back(self, trial: optuna.Trial) -> None:
        """It was stopped, which is nobody's fault; it is continued when the sweep is resumed."""
        trial.set_user_attr(TRIES, (-1, 0))

    def end(self, trial: optuna.Trial, ended: Trial) -> None:
        """Write down what came of a trial.

        Raises SweepError: trial after trial comes to nothing; naming what the last one said.
        """
        figures = ended.figures
        values = {
            FIGURES: None if figures is None else asdict(figures),
            REASON: ended.reason,
            WORKER: ended.worker,
            SECONDS: ended.seconds,
            OUTCOME: ended.outcome,
        }
        for name, value in values.items():
            if value:
                trial.set_user_attr(name, value)
        bound = figures.told if figures is not None and ended.outcome == "measured" else None
        self._study.tell(trial, bound, state=TOLD[ended.outcome])
        self.trials[trial.number] = ended
        self._count(ended)

    def _count(self, ended: Trial) -> None:
        """Raises SweepError: too many in a row came to nothing."""
        self._num_in_a_row = self._num_in_a_row + 1 if ended.outcome == self._last else 1
        self._last = ended.outcome
        most = {"failed": MAX_FAILED, "refused": MAX_REFUSED}.get(ended.outcome)
        endless = ended.outcome == "failed" or self._plan.chooser.mode != "grid"
        if most is not None and self._num_in_a_row >= most and endless:
            raise SweepError(
                f"{most} combinations in a row {ended.outcome}; the last one: {ended.reason}"
            )


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
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
