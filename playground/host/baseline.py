"""Whether plain decoding was timed well enough to divide by: the one answer of all surfaces.

A step of a method verifies at least the row that a plain step verifies, so on a steady clock it
takes no less time, and no speedup exceeds the tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.metrics import SAME, ratio, speedup, tok_s
from storage import DecodeTotals, SpeedupCounts

Doubt = Literal["cheap step", "apart", "drift", "noise", "disagreement"]
DOUBTS: dict[Doubt, str] = {
    "cheap step": "a step took less time than a step of plain decoding, so plain decoding was "
    "timed while the machine was slower.",
    "apart": "plain decoding was not timed both before and after this run.",
    "drift": "the machine's speed changed during this run.",
    "noise": "the machine was busy while plain decoding was timed.",
    "disagreement": "plain decoding was timed at another speed than just before.",
}
DRIFT, NOISE, DISAGREEMENT = 1.15, 1.5, 1.5
"""Ratios that are too much: of the timings before and after a run, of the quartiles within one, of
a timing to the recent ones."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a baseline.

    Attributes:
        own_step_s, plain_step_s: wall clock per step; None where it is not known.
        drift: how many times as long a plain step took after the run as before it; 1 where the two
            took turns, None where it was not timed on both sides.
        noise: ratio of the quartiles of the plain steps.
        disagreement: the baseline over the median of this target's recent ones, on the same device
            and in the same dtype; 1 where none is known or the two took turns, for a slow machine
            then slows both.
    """

    own_step_s: float | None
    plain_step_s: float | None
    drift: float | None = 1.0
    noise: float = 1.0
    disagreement: float = 1.0


def doubt_of(evidence: Evidence) -> Doubt | None:
    """Why nothing may be divided by this baseline; None where it can be trusted.

    After `cheap step` no number is given at all, after the others none to two decimals.
    """
    own_s, plain_s = evidence.own_step_s, evidence.plain_step_s
    if own_s and plain_s and plain_s > (1 + SAME) * own_s:
        return "cheap step"
    if evidence.drift is None:
        return "apart"
    if _is_off(evidence.drift, DRIFT):
        return "drift"
    if evidence.noise > NOISE:
        return "noise"
    return "disagreement" if _is_off(evidence.disagreement, DISAGREEMENT) else None


def _is_off(ratio: float, most: float) -> bool:
    return not 1 / most < ratio < most


def trusted_speedup(counts: SpeedupCounts) -> float | None:
    """Speedup of a configuration as the log counted it; None where its baseline is in doubt."""
    own_step_s, plain_step_s = (ratio(side.decode_s, side.num_steps) for side in counts)
    if doubt_of(Evidence(own_step_s, plain_step_s)):
        return None
    return speedup(pooled_tok_s(counts.own), pooled_tok_s(counts.plain))


def pooled_tok_s(totals: DecodeTotals) -> float | None:
    """Tokens of all runs over the seconds of all runs."""
    return tok_s([(totals.num_tokens + 1, totals.decode_s)])
