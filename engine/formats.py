"""Formats of figures, by kind: one notation on pages, in tables, reports, sentences and logs.

The page's scripts have the same functions; a test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal

DASH = "–"
"""Stands for a figure that is not known."""
_EXACT = Context(prec=400, rounding=ROUND_HALF_UP)


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """With this many decimals; halves are rounded up, as in JavaScript: 0.125 is 0.13."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), context=_EXACT):f}{unit}"


def speedup(value: float | None) -> str:
    """1.23×"""
    return figure(value, 2, "×")


def interval(low: float | None, high: float | None) -> str:
    """Of a speedup: 1.20 … 1.31×"""
    return f"{figure(low)} … {speedup(high)}"


def percent(share: float | None) -> str:
    """86%, of 0.86."""
    return figure(None if share is None else 100 * share, 0, "%")


def count(value: float | None) -> str:
    return figure(value, 0)


def tok_s(value: float | None) -> str:
    return figure(value, 1)


def mat(value: float | None) -> str:
    return figure(value, 2)


def milliseconds(value: float | None) -> str:
    """3.1, 72 or 1302; without the unit."""
    return figure(value, 1 if value is not None and value < 20 else 0)


def duration(ms: float | None) -> str:
    """3.1 ms, 72 ms or 1.30 s."""
    if ms is None or not math.isfinite(ms):
        return DASH
    return f"{milliseconds(ms)} ms" if ms < 1000 else figure(ms / 1000, 2, " s")


def durations(first_ms: float | None, second_ms: float | None) -> str:
    """Two durations in the unit of the longer one, which is the second."""
    if first_ms is None or second_ms is None:
        return DASH
    if second_ms < 1000:
        return f"{milliseconds(first_ms)} / {milliseconds(second_ms)} ms"
    return f"{figure(first_ms / 1000)} / {figure(second_ms / 1000)} s"


def time_split(ms: Mapping[str, float] | None) -> str:
    """draft 1.2 · verify 31 · accept 0.1 · other 0.4 ms"""
    parts = (f"{name} {milliseconds(each)}" for name, each in (ms or {}).items())
    return " · ".join(parts) + " ms" if ms else DASH


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
