"""Builds a method's drafter, under the adaptive controller where the method asks for it."""

from __future__ import annotations

from collections.abc import Callable

from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig
from engine.model.target import Target
from engine.tuning.adaptive import AdaptiveDrafter
from engine.tuning.latency import LatencyCurve
from engine.tuning.timing import measure_curve

CONTROLLER_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that the controller measures: coarser than the chart's, done in a second or two."""


def build_drafter(
    config: MethodConfig, context: BuildContext, curve: Callable[[], LatencyCurve] | None = None
) -> Drafter:
    """The method's drafter on the context's target.

    Args:
        curve: the target's latency curve, asked for where it is needed; None = measured anew.

    Raises:
        DrafterError: the weights do not fit the target, or cannot be found.
    """
    drafter = config.build(context)
    if not config.adaptive:
        return drafter
    return AdaptiveDrafter(
        drafter, context.target, curve() if curve else controller_curve(context.target)
    )


def controller_curve(target: Target) -> LatencyCurve:
    """What the controller needs to know of a target, measured."""
    return measure_curve(target, rows=CONTROLLER_ROWS, repeats=3)
