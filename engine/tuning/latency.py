"""Latency curves and the speed that follows from them; `engine.tuning.timing` measures them.

A step's time is that of the draft (a fixed part, and one per level) and that of the verify forward:
a curve over rows, linear between the measured row counts. Recurrent layers read a tree level by
level or branch by branch, so that the time depends on depth as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, Field

from engine.drafters.method import MethodConfig
from engine.metrics import predicted_tok_s, ratio


def interpolate(rows: Sequence[int], ms: Sequence[float], n: float) -> float:
    """Linear between points; constant before the first, extrapolated beyond the last."""
    if n <= rows[0] or len(rows) == 1:
        return ms[0]
    right = next((i for i, r in enumerate(rows) if r >= n), len(rows) - 1)
    left = right - 1
    slope = (ms[right] - ms[left]) / (rows[right] - rows[left])
    return ms[left] + slope * (n - rows[left])


@dataclass(frozen=True, slots=True)
class TreeLatency:
    """Median milliseconds of trees other than chains, where time depends on depth.

    Attributes:
        rows: ascending row counts, root included.
        star_ms: of trees of depth 1, one per row count.
        level_ms: of each further level, one per row count.
    """

    rows: tuple[int, ...]
    star_ms: tuple[float, ...]
    level_ms: tuple[float, ...]

    def at(self, n: float, depth: int) -> float:
        """Milliseconds of a tree of n rows and this depth."""
        level_ms = interpolate(self.rows, self.level_ms, n)
        return interpolate(self.rows, self.star_ms, n) + (depth - 1) * level_ms


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Median milliseconds at a few row counts.

    Attributes:
        rows: ascending row counts, root included.
        ms: of chains, one per row count.
        context_len: committed rows in the cache during the measurement.
        trees: of other trees; None where time does not depend on depth.
    """

    rows: tuple[int, ...]
    # `verify_ms` in the run logs of earlier versions.
    ms: Annotated[tuple[float, ...], Field(validation_alias=AliasChoices("ms", "verify_ms"))]
    context_len: int = 0
    trees: TreeLatency | None = None

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.ms):
            raise ValueError("A latency curve must have row counts and a time for each.")

    def scaled(self, factor: float) -> LatencyCurve:
        """The curve with all times multiplied by a factor."""

        def scale(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * ms for ms in times)

        trees = self.trees
        if trees is not None:
            trees = TreeLatency(trees.rows, scale(trees.star_ms), scale(trees.level_ms))
        return LatencyCurve(self.rows, scale(self.ms), self.context_len, trees)

    def at(self, n: float, depth: int | None = None) -> float:
        """Milliseconds of a tree of n rows and this depth; None = a chain."""
        if self.trees is None or depth is None or depth >= n - 1:
            return interpolate(self.rows, self.ms, n)
        return self.trees.at(n, depth)


@dataclass(frozen=True, slots=True)
class BatchLatency:
    """Verify forwards of several texts in lock-step: all read the same number of rows at once.

    Attributes:
        batches: ascending batch sizes, from 1.
        curves: of one forward for the whole batch, by the rows of each text.
        by: what ran the forwards, for readers.
    """

    batches: tuple[int, ...]
    curves: tuple[LatencyCurve, ...]
    by: str

    def growth(self, batch: int, rows: float) -> float:
        """Time of a batch's forward over that of one text; `batch` is one of `batches`."""
        return self.curves[self.batches.index(batch)].at(rows) / self.curves[0].at(rows)

    def drafting(self, batch: int, rows: float | None) -> float:
        """Time of drafting for a batch over that for one text.

        A network of `rows` rows is assumed to scale as the target does. None = no network: text by
        text, like everything that is neither draft nor verify.
        """
        return batch if rows is None else self.growth(batch, rows)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected MAT and times of a step; `speedup` is over plain decoding by the same curves."""

    mat: float
    draft_ms: float
    verify_ms: float
    plain_tok_s: float

    @property
    def step_ms(self) -> float:
        return self.draft_ms + self.verify_ms

    @property
    def tok_s(self) -> float:
        return predicted_tok_s(self.mat, self.step_ms)

    @property
    def speedup(self) -> float:
        return ratio(self.tok_s, self.plain_tok_s) or 0.0


@dataclass(frozen=True, slots=True)
class StepLatency:
    """The times that a prediction needs; `engine.tuning.costs` keeps them up to date.

    Attributes:
        verify: of a step without its draft, by rows.
        start_ms, level_ms: of a draft: its fixed part, and each level.
    """

    verify: LatencyCurve
    start_ms: float
    level_ms: float

    def predict(self, mat: float, *, num_nodes: float, depth: int) -> Prediction:
        """Speed with drafts of this MAT, number of nodes and depth."""
        draft_ms = self.start_ms + depth * self.level_ms
        verify_ms = self.verify.at(num_nodes + 1, depth)
        return Prediction(mat, draft_ms, verify_ms, 1000 / self.verify.at(1))

    def predict_config(self, config: MethodConfig, mat: float) -> Prediction:
        """Speed of a method with these settings if every draft has its full size."""
        depth, nodes = config.largest_draft
        return self.predict(mat, num_nodes=nodes, depth=depth)
