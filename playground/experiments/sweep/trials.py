"""What came of every trial of a sweep, read from Optuna's records.

A trial that was stopped or whose process died is still running to Optuna: it is continued under its
number, from the answers that it had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from optuna.trial import FrozenTrial, TrialState

from engine.errors import ConfigError
from playground.experiments.finished import Pair
from playground.experiments.report.statistics import Counts, Totals, counts_by_prompt, speedup_of
from playground.experiments.space import Mode, Objective, Point
from playground.host.baseline import Doubt

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


def key_of(point: Mapping[str, Any]) -> str:
    """A point as text that is equal for equal points; 1 and true differ."""
    return json.dumps(dict(sorted(point.items())))


def read_trials(records: Iterable[FrozenTrial]) -> list[Trial]:
    """The trials that have begun, by number; draws that only repeated a point are none."""
    trials = (_read(record) for record in records if record.state in STATES)
    return [trial for trial in trials if trial is not None]


def _read(record: FrozenTrial) -> Trial | None:
    """None for what is no trial: a draw that was dropped again."""
    attributes, outcomes = record.user_attrs, STATES[record.state]
    outcome = attributes.get(OUTCOME) if record.state.is_finished() else "running"
    if outcome not in outcomes:
        return None
    figures, seconds = attributes.get(FIGURES), attributes.get(SECONDS)
    if seconds is None and record.duration is not None:
        seconds = record.duration.total_seconds()
    return Trial(
        record.number,
        dict(record.params),
        outcome,
        None if figures is None else Figures.stored(figures),
        str(attributes.get(REASON, "")),
        seconds,
        str(attributes.get(WORKER, "")),
    )


def num_done(trials: Iterable[Trial], mode: Mode) -> int:
    """How much of a plan is behind these trials: a grid's refused points are, a search's not."""
    open_ones = ("running",) if mode == "grid" else ("running", "refused")
    return sum(trial.outcome not in open_ones for trial in trials)
