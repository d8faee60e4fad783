"""Averages, percentiles and ratios over requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

PERCENTILES = (99, 90, 75)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 … 100), linear between the closest ranks as numpy's default.

    Worked example: the 75th of 10, 20, 40 lies at rank 0.75 · 2 = 1.5, half way from 20 to 40: 30.
    """
    ordered = sorted(values)
    at = q / 100 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


@dataclass(frozen=True, slots=True)
class Statistic:
    """A row of genai-perf's table."""

    avg: float
    min: float
    max: float
    p99: float
    p90: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None where there is no value."""
        if not values:
            return None
        high = (percentile(values, q) for q in PERCENTILES)
        return cls(mean(values), min(values), max(values), *high)
