"""Builds a method's drafter, under the adaptive controller where the method asks for it."""

from __future__ import annotations

from engine.config import MethodConfig
from engine.drafters.base import Drafter, Workbench
from engine.tuning.adaptive import AdaptiveDrafter
from engine.tuning.latency import measure_curve

CONTROLLER_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that the controller measures: coarser than the chart's, done in a second or two."""


def build_drafter(config: MethodConfig, bench: Workbench) -> Drafter:
    """The method's drafter on the bench's target.

    Raises:
        DrafterError: the weights do not fit the target, or cannot be found.
    """
    drafter = config.build(bench)
    if not config.adaptive:
        return drafter
    if bench.latency is not None:
        curve = bench.latency()
    else:
        curve = measure_curve(bench.target, rows=CONTROLLER_ROWS, repeats=3)
    return AdaptiveDrafter(drafter, bench.target, curve)
