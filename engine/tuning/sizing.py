"""How large a tree pays: predicted speed of the best tree of every size on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.drafters.method import MethodConfig
from engine.tuning.search import CurvePoint
from engine.tuning.shape import draft_shape, with_tree
from engine.tuning.step_latency import Clock, Prediction

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 63, 80, 96, 112, 127)
"""Drafted nodes that are tried; one more row is verified, the root."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A tree and the speed that it promises."""

    point: CurvePoint
    prediction: Prediction


def predict_sizes(
    points: Sequence[CurvePoint], config: MethodConfig, clock: Clock
) -> tuple[Sized, ...]:
    """Predicted speed of every point of a curve: MAT / (draft + verify + other).

    Raises:
        ConfigError: the method does not draft such trees.
    """
    found = []
    for point in points:
        shape = draft_shape(with_tree(config, point.tree))
        prediction = clock.predict(point.mat, levels=shape.levels, num_nodes=shape.num_nodes)
        found.append(Sized(point, prediction))
    return tuple(found)


def fastest(sized: Sequence[Sized]) -> Sized:
    """The one with the highest predicted tok/s; the smallest of equals."""
    return max(sized, key=lambda one: (one.prediction.tok_s, -one.point.num_nodes))
