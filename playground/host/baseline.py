"""Whether the timing of plain decoding is reliable; page, commands and API all decide it here.

A step of a method verifies at least the row that a plain step verifies, so on a steady clock it
takes no less time, and no speedup exceeds the tokens of a step.
"""

from __future__ import annotations

from typing import Literal

from engine.metrics import EQUAL_MARGIN

Doubt = Literal["cheap step", "apart", "drift", "noise"]
DOUBTS: dict[Doubt, str] = {
    "cheap step": "a step took less time than a step of plain decoding, so plain decoding was "
    "timed while the machine was slower.",
    "apart": "plain decoding was not timed both before and after this run.",
    "drift": "the machine's speed changed during this run.",
    "noise": "the machine was busy while plain decoding was timed.",
}
DRIFT, NOISE = 1.15, 1.5
"""Ratios above which a baseline is unreliable: of the timings before and after a run, and of the
quartiles of one timing."""


def doubt_of(
    own_step_s: float | None,
    plain_step_s: float | None,
    *,
    drift: float | None = 1.0,
    noise: float = 1.0,
) -> Doubt | None:
    """Why this baseline is unreliable; None where it is reliable.

    With `cheap step` no speedup is given at all; with the others none to two decimals.

    Args:
        own_step_s, plain_step_s: wall-clock seconds per step; None where unknown.
        drift: duration of a plain step after the run over that before it; 1 where the two were
            timed alternately, None where it was not timed on both sides.
        noise: ratio of the quartiles of the plain steps.
    """
    if own_step_s and plain_step_s and plain_step_s > (1 + EQUAL_MARGIN) * own_step_s:
        return "cheap step"
    if drift is None:
        return "apart"
    if not 1 / DRIFT < drift < DRIFT:
        return "drift"
    return "noise" if noise > NOISE else None
