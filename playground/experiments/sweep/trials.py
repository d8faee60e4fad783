"""What came of every trial of a sweep, read from Optuna's records.

A *slot* is one place of the plan: a trial that was killed or stopped is tried again under a new
number and the same slot, and only the last word on a slot counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, Self

from optuna.trial import FrozenTrial, TrialState

from engine.errors import ConfigError
from playground.experiments.finished import Pair
from playground.experiments.report.statistics import Counts, Totals, counts_by_prompt, speedup_of
from playground.experiments.sweep.plan import Objective
from playground.experiments.sweep.space import Point
from playground.host.baseline import Doubt

Status = Literal[
    "running", "measured", "pruned", "refused", "failed", "killed", "stopped", "repeated"
]
FINAL: frozenset[Status] = frozenset({"measured", "pruned", "refused", "failed"})
"""What is not tried again."""
BUDGET: frozenset[Status] = FINAL - {"refused"}
"""What uses up one of a search's trials; what cannot be run costs nothing."""
OUTCOME, SLOT, REASON, FIGURES = "outcome", "slot", "reason", "figures"
ANSWERED, WORKER = "answered", "worker"
"""Names of the attributes that a trial carries."""


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
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        counts = {key: Counts(*each) for key, each in values.get("counts", {}).items()}
        return cls(**{**known, "counts": counts})


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
        num_answered: requests of its point that the log had when it was last heard of.
        worker: which worker of a cluster measured it.
    """

    number: int
    slot: int
    point: Point
    outcome: Status
    figures: Figures | None = None
    reason: str = ""
    seconds: float | None = None
    num_answered: int = 0
    worker: str = ""

    @property
    def key(self) -> str:
        return key_of(self.point)

    @property
    def value(self) -> float | None:
        """The objective; None unless it was measured to the end, on a baseline to be trusted."""
        return self.figures.value if self.figures and self.outcome == "measured" else None


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


TOLD: dict[Status, TrialState] = {
    "measured": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "refused": TrialState.PRUNED,
    **dict.fromkeys(("failed", "stopped", "repeated", "killed"), TrialState.FAIL),
}
"""What Optuna is told."""


def read_trials(all_trials: Iterable[FrozenTrial]) -> list[Trial]:
    """Trials that have begun, by number; those only waiting are left out."""
    return [_read(trial) for trial in all_trials if trial.state != TrialState.WAITING]


def _read(frozen: FrozenTrial) -> Trial:
    """A trial counts once Optuna was told; a process may die between the two writes."""
    attributes, outcome = frozen.user_attrs, "running"
    if frozen.state.is_finished():
        outcome = attributes.get(OUTCOME, "killed")
        outcome = outcome if TOLD.get(outcome) == frozen.state else "killed"
    figures = attributes.get(FIGURES)
    began: datetime | None = frozen.datetime_start
    ended: datetime | None = frozen.datetime_complete
    return Trial(
        frozen.number,
        int(attributes.get(SLOT, frozen.number)),
        dict(frozen.params),
        outcome,  # type: ignore[arg-type]
        None if figures is None else Figures.stored(figures),
        str(attributes.get(REASON, "")),
        (ended - began).total_seconds() if began and ended else None,
        int(attributes.get(ANSWERED, 0)),
        str(attributes.get(WORKER, "")),
    )


def num_done(trials: Iterable[Trial], mode: str) -> int:
    """How much of the plan is behind these trials: a grid's refused points are, a search's not."""
    counted = FINAL if mode == "grid" else BUDGET
    return sum(trial.outcome in counted for trial in trials)


def num_fruitless(tries: Iterable[Trial]) -> int:
    """Of one slot's tries, in order: how many at the end answered no request more than before."""
    most = fruitless = 0
    for trial in tries:
        fruitless = 0 if trial.num_answered > most else fruitless + 1
        most = max(most, trial.num_answered)
    return fruitless


def last_of_slots(trials: Iterable[Trial]) -> dict[int, Trial]:
    """The newest trial of every slot, without draws that only repeated a point."""
    return {trial.slot: trial for trial in trials if trial.outcome != "repeated"}
