"""What came of every trial of a sweep, read from Optuna's records.

A *slot* is one place of the plan: a trial that was killed or stopped is tried again under a new
number and the same slot, and only the last word on a slot counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal, Self

from optuna.trial import FrozenTrial, TrialState

from playground.experiments.sweeps.space import Point

Outcome = Literal[
    "running", "measured", "pruned", "refused", "failed", "killed", "stopped", "repeated"
]
FINAL: frozenset[Outcome] = frozenset({"measured", "pruned", "refused", "failed"})
"""Outcomes that are not tried again."""
BUDGET: frozenset[Outcome] = FINAL - {"refused"}
"""Outcomes that use up one of a search's trials; what cannot be run costs nothing."""
OUTCOME, SLOT, REASON, FIGURES = "outcome", "slot", "reason", "figures"
"""Names of the attributes that a trial carries."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured in one trial, over all prompts that both methods answered.

    Attributes:
        value: the objective.
        tok_s, plain_tok_s: new tokens after the first / seconds of decoding, of the method and of
            plain decoding, prompt by prompt in turn.
        speedup: their ratio.
        mat: 1 + accepted draft tokens / steps.
        num_prompts: answers compared.
        num_same: of these, answers that are token-identical to plain decoding's.
        ratios: speedup of every answer, by prompt.
    """

    value: float
    tok_s: float | None
    plain_tok_s: float | None
    speedup: float | None
    mat: float | None
    num_prompts: int
    num_same: int
    ratios: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial; `figures` of a pruned one are those of the prompts that it got to."""

    number: int
    slot: int
    point: Point
    outcome: Outcome
    figures: Figures | None
    reason: str
    began_at: datetime | None
    seconds: float | None

    @property
    def key(self) -> str:
        return key_of(self.point)


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


_TOLD: dict[TrialState, frozenset[Outcome]] = {
    TrialState.COMPLETE: frozenset({"measured"}),
    TrialState.PRUNED: frozenset({"pruned", "refused"}),
    TrialState.FAIL: frozenset({"failed", "stopped", "repeated"}),
}
"""Outcomes that a process told to the end, by Optuna's state."""


def _outcome_of(frozen: FrozenTrial) -> Outcome:
    """An outcome counts once Optuna was told; a process may die between the two."""
    if not frozen.state.is_finished():
        return "running"
    noted: Outcome = frozen.user_attrs.get(OUTCOME, "killed")
    return noted if noted in _TOLD[frozen.state] else "killed"


def read_trial(frozen: FrozenTrial) -> Trial:
    """A trial as Optuna keeps it."""
    attributes = frozen.user_attrs
    figures = attributes.get(FIGURES)
    began, ended = frozen.datetime_start, frozen.datetime_complete
    return Trial(
        frozen.number,
        int(attributes.get(SLOT, frozen.number)),
        dict(frozen.params),
        _outcome_of(frozen),
        None if figures is None else Figures.from_dict(figures),
        str(attributes.get(REASON, "")),
        began,
        (ended - began).total_seconds() if began and ended else None,
    )


def read_trials(all_trials: Iterable[FrozenTrial]) -> list[Trial]:
    """Trials that have begun, by number; those only waiting are left out."""
    return [read_trial(t) for t in all_trials if t.state != TrialState.WAITING]


def num_done(trials: Iterable[Trial], mode: str) -> int:
    """How much of the plan is behind these trials: a grid's refused points are, a search's not."""
    counted = FINAL if mode == "grid" else BUDGET
    return sum(trial.outcome in counted for trial in trials)


def last_words(trials: Iterable[Trial]) -> dict[int, Trial]:
    """The newest trial of every slot, without draws that only repeated a point."""
    return {trial.slot: trial for trial in trials if trial.outcome != "repeated"}
