"""The trials of a sweep: what came of each, and which point is next.

A trial that was stopped or whose process died is still running to Optuna; when the sweep is resumed
its point is tried again, from the answers that it had: they belong to the point.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from engine.errors import ConfigError, PlaygroundError
from playground.experiments.finished import Pair
from playground.experiments.report.statistics import Counts, Totals, counts_by_prompt, speedup_of
from playground.experiments.space import Mode, Objective, Point, Space, Tunable, Vary
from playground.experiments.sweep.plan import SweepPlan
from playground.host.baseline import Doubt

MAX_REFUSED = 100
"""Refusals in a row after which a search is given up."""
MAX_FAILED = 3
"""Failures in a row after which any sweep is given up."""
MAX_REPEATED = 8
"""Draws of known points in a row before a point that was never tried is taken."""
PRUNE_AFTER = 5
"""Finished trials before any is pruned."""
MIN_PAIRS = 2
"""Prompts that a trial answers before it may be pruned."""
REFERENCE = "reference_tok_s"
"""Attribute of a study: tok/s of plain decoding in its first trial."""
Outcome = Literal["running", "measured", "pruned", "refused", "failed"]
STATES: dict[TrialState, tuple[Outcome, ...]] = {
    TrialState.RUNNING: ("running",),
    TrialState.COMPLETE: ("measured",),
    TrialState.PRUNED: ("pruned", "refused"),
    TrialState.FAIL: ("failed",),
}
"""Optuna's states, and what a trial in one of them may have come to."""
TOLD: dict[Outcome, TrialState] = {one: state for state, ones in STATES.items() for one in ones}
"""What Optuna is told."""
OUTCOME, REASON, FIGURES, SECONDS, WORKER = "outcome", "reason", "figures", "seconds", "worker"
"""Names of the attributes that a trial carries."""


class SweepError(PlaygroundError):
    """The sweep as a whole cannot go on, whatever the point."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured in one trial, over all prompts that both methods answered.

    Attributes:
        value: the objective; None where `doubt` leaves no speedup.
        tok_s, plain_tok_s: of the method and of plain decoding, prompt by prompt in turn.
        speedup: their ratio.
        num_prompts: answers compared.
        num_same: of these, answers that are token-identical to plain decoding's.
        counts: what the speedup is made of, by prompt; sweeps of older versions have none.
        doubt: why no speedup is given.
        told: what a search goes on from: the objective or, where it is in doubt, its bound by MAT.
    """

    value: float | None
    tok_s: float | None
    plain_tok_s: float | None
    speedup: float | None
    mat: float | None
    num_prompts: int
    num_same: int
    counts: Mapping[str, Counts] = field(default_factory=dict)
    doubt: Doubt | None = None
    told: float | None = None

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Self:
        """As JSON has it, without what other versions kept."""
        values_by_name = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        counts = {key: Counts(*each) for key, each in values.get("counts", {}).items()}
        return cls(**{**values_by_name, "counts": counts})


def figures_of(
    pairs: Sequence[Pair], objective: Objective, reference_tok_s: float | None
) -> Figures:
    """The figures of a point.

    Args:
        reference_tok_s: tok/s of plain decoding in the sweep's first trial; None in that trial.
    """
    own, plain = Totals.of([own for own, _ in pairs]), Totals.of([plain for _, plain in pairs])
    fast = speedup_of(pairs)
    speedup = None if fast is None else fast.ratio
    told = own.mat if objective == "mat" or (fast and fast.doubt) else speedup
    if objective == "tok_s" and told is not None:
        told *= reference_tok_s or plain.tok_s or 0.0
    if told is None:
        raise ConfigError(
            "The answers end after their first token, so nothing can be measured. Choose other "
            "prompts, a larger max_new_tokens, or ignore_eos."
        )
    same = sum(own.output_ids == plain.output_ids for own, plain in pairs)
    return Figures(
        told if objective == "mat" or speedup is not None else None,
        *(own.tok_s, plain.tok_s, speedup, own.mat, len(pairs), same),
        counts_by_prompt(pairs),
        None if fast is None else fast.doubt,
        told,
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial; `figures` of a pruned one are those of the prompts that it got to.

    Attributes:
        number: 1, 2, 3 … in the order in which the trials began.
        seconds: from its start, or from where it was continued, to its end.
        worker: which worker of a cluster measured it.
    """

    number: int
    point: Point
    outcome: Outcome
    figures: Figures | None = None
    reason: str = ""
    seconds: float | None = None
    worker: str = ""

    @property
    def key(self) -> str:
        return key_of(self.point)

    @property
    def value(self) -> float | None:
        """The objective; None unless it was measured to the end, on a baseline to be trusted."""
        return self.figures.value if self.figures and self.outcome == "measured" else None

    @classmethod
    def stored(cls, record: FrozenTrial, number: int) -> Self | None:
        """None for what is no trial: a draw that was dropped again."""
        attributes, outcomes = record.user_attrs, STATES.get(record.state, ())
        outcome = attributes.get(OUTCOME) if record.state.is_finished() else "running"
        if outcome not in outcomes:
            return None
        figures, seconds = attributes.get(FIGURES), attributes.get(SECONDS)
        if seconds is None and record.duration is not None:
            seconds = record.duration.total_seconds()
        return cls(
            number,
            dict(record.params),
            outcome,
            None if figures is None else Figures.stored(figures),
            str(attributes.get(REASON, "")),
            seconds,
            str(attributes.get(WORKER, "")),
        )


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


def runs_id(sweep_id: str, point: Mapping[str, Any]) -> str:
    """What the runs of a point carry as their benchmark, the same for every try."""
    return f"{sweep_id}-{hashlib.sha256(key_of(point).encode()).hexdigest()[:8]}"


def by_record(records: Iterable[FrozenTrial]) -> dict[int, Trial]:
    """The trials that have begun, by Optuna's numbers, without draws that repeated a point."""
    trials: dict[int, Trial] = {}
    for record in records:
        if (trial := Trial.stored(record, len(trials) + 1)) is not None:
            trials[record.number] = trial
    return trials


def num_done(trials: Iterable[Trial], mode: Mode) -> int:
    """How much of a plan is behind these trials: a grid's refused points are, a search's not."""
    open_ones = ("running",) if mode == "grid" else ("running", "refused")
    return sum(trial.outcome not in open_ones for trial in trials)


# ---- which point is next


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
        self._left = self._left_behind()
        self.trials = {one.number: one for one in by_record(study.get_trials()).values()}
        self._last, self._num_in_a_row = "", 0

    def _left_behind(self) -> list[Point]:
        """Points to try again; one whose process died while it was drawn is dropped."""
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        records = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for record in records:
            self._study.tell(record.number, state=TrialState.FAIL)
        names = self._distributions.keys()
        return [dict(record.params) for record in records if record.params.keys() == names]

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

    def next(self) -> tuple[int, optuna.Trial] | None:
        """A trial that nobody else measures, with its number; None when all planned are begun."""
        trial = self._fixed(self._left.pop(0)) if self._left else self._new()
        if trial is None:
            return None
        number = len(self.trials) + 1
        self.trials[number] = Trial(number, dict(trial.params), "running")
        return number, trial

    def _new(self) -> optuna.Trial | None:
        """The first is where the method is now; a search of few points takes each of them once."""
        if self.num_left <= sum(one.outcome == "running" for one in self.trials.values()):
            return None
        known = {trial.key for trial in self.trials.values()}
        if self._plan.chooser.mode == "grid":
            left = (point for point in self._space.grid() if key_of(point) not in known)
            return self._fixed(next(left, None))
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
        unknown = [point for point in points if key_of(point) not in known]
        return self._fixed(self._random.choice(unknown) if unknown else None)

    def _fixed(self, point: Point | None) -> optuna.Trial | None:
        if point is None:
            return None
        self._study.enqueue_trial(point)
        return self._study.ask(self._distributions)

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
        self.trials[ended.number] = ended
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
