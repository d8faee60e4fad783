"""What a step costs (verifying, drafting by level, the loop itself) and what speed it promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tuning.latency import LatencyCurve, interpolate, points
from engine.tuning.shape import draft_shape


@dataclass(frozen=True, slots=True)
class OtherCurve:
    """Milliseconds of a step beside draft and verify (accept, commit, record), by rows."""

    rows: tuple[int, ...]
    other_ms: tuple[float, ...]

    def at(self, n: float) -> float:
        """Milliseconds for n rows."""
        return interpolate(self.rows, self.other_ms, n)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"rows": list(self.rows), "other_ms": list(self.other_ms)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made. Raises ConfigError: it is no such curve."""
        return cls(*points(values, "other_ms"))


@dataclass(frozen=True, slots=True)
class DraftLatency:
    """Milliseconds of drafting: once per step, and per level by the rows that it runs.

    Attributes:
        start_ms: reading what the last step committed, and whatever else every draft costs.
        rows: ascending; empty for drafters without a network.
        level_ms: one per row count.
    """

    decoding_type: str
    start_ms: float
    rows: tuple[int, ...]
    level_ms: tuple[float, ...]

    def at(self, levels: Sequence[int]) -> float:
        """Milliseconds of a draft with these rows per level (`engine.tuning.shape`)."""
        if not self.rows:
            return self.start_ms
        return self.start_ms + sum(interpolate(self.rows, self.level_ms, n) for n in levels)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "decoding_type": self.decoding_type,
            "start_ms": self.start_ms,
            "rows": list(self.rows),
            "level_ms": list(self.level_ms),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` made.

        Raises:
            ConfigError: it is none.
        """
        try:
            start_ms, kind = float(values["start_ms"]), str(values["decoding_type"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"A draft latency must have start_ms, got {values}.") from error
        rows, level_ms = points(values, "level_ms") if values.get("rows") else ((), ())
        return cls(kind, start_ms, rows, level_ms)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to cost and bring.

    `tok_s` is MAT / step time; `speedup` is over plain decoding by the same curves.
    """

    mat: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    plain_tok_s: float

    @property
    def step_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def tok_s(self) -> float:
        return 1000 * self.mat / self.step_ms

    @property
    def speedup(self) -> float:
        return self.tok_s / self.plain_tok_s


@dataclass(frozen=True, slots=True)
class Clock:
    """All curves that a prediction needs."""

    verify: LatencyCurve
    other: OtherCurve
    draft: DraftLatency

    def predict(
        self, mat: float, *, levels: Sequence[int], num_nodes: int | Sequence[int]
    ) -> Prediction:
        """Speed of a draft with this MAT.

        Args:
            levels: rows per level of the draft.
            num_nodes: drafted nodes; or those of every step, where they differ.
        """
        counts = [num_nodes] if isinstance(num_nodes, int) else list(num_nodes)
        sizes, weights = np.unique(np.array(counts) + 1, return_counts=True)
        shares = (weights / weights.sum()).tolist()
        rows = list(zip(sizes.tolist(), shares, strict=True))
        return Prediction(
            mat,
            self.draft.at(levels),
            sum(share * self.verify.at(n) for n, share in rows),
            sum(share * self.other.at(n) for n, share in rows),
            1000 / (self.verify.at(1) + self.other.at(1)),
        )

    def predict_config(self, config: MethodConfig, mat: float) -> Prediction:
        """Speed of a method with these settings, if its drafts are as large as they may be."""
        shape = draft_shape(config)
        return self.predict(mat, levels=shape.levels, num_nodes=shape.num_nodes)
