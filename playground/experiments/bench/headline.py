"""Which configuration is fastest, by how much, and whether to trust it: a few plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from playground.experiments.bench.speedup import Speedup

SAME = 0.02
"""A speedup this close to 1 is neither faster nor slower."""
Trust = Literal["identical", "near ties", "fault", "unknown", "sampled", "lossy"]
TRUST_WORDS: dict[Trust, str] = {
    "identical": "Its text is plain decoding's, token for token.",
    "near ties": "Its text leaves plain decoding's only at near-ties, which rounding alone flips.",
    "fault": "Do not use it: its text differs from plain decoding's, and no rounding does that.",
    "unknown": "Its text differs from plain decoding's; why was not looked into.",
    "sampled": "",
    "lossy": "It is lossy: it may keep tokens that the target would not choose.",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration beside plain decoding; no speedup where nothing could be compared."""

    name: str
    speedup: Speedup | None
    trust: Trust


def headline(contenders: Sequence[Contender]) -> str:
    """The answer in a few sentences; empty while nothing is measured."""
    measured = [(one, one.speedup) for one in contenders if one.speedup is not None]
    if not measured:
        return ""
    best, fast = max(measured, key=lambda pair: pair[1].ratio)
    name, ratio, spread = best.name, f"{fast.ratio:.2f}×", _spread(fast)
    if fast.ratio < 1 - SAME:
        which = f"the next, {name}," if len(measured) > 1 else name
        return f"Plain decoding is fastest here: {which} reaches {ratio} its tok/s{spread}."
    if fast.ratio <= 1 + SAME:
        return f"Nothing is faster than plain decoding here: {name} is level, {ratio}{spread}."
    near = [
        one.name
        for one, other in measured
        if one is not best and other.ratio > 1 + SAME and other.high >= fast.low
    ]
    said = [
        f"Fastest: {name}, {ratio} the tok/s of plain decoding{spread}.",
        _doubt(fast, near),
        TRUST_WORDS[best.trust],
    ]
    return " ".join(filter(None, said))


def _spread(fast: Speedup) -> str:
    if fast.num_pairs == 1:
        return ""
    over = "repeats" if fast.spread_over == "repeats" else "quartiles of the requests"
    return f" ({over}: {fast.low:.2f} … {fast.high:.2f})"


def _doubt(fast: Speedup, near: Sequence[str]) -> str:
    """What the spread does not tell apart."""
    if fast.spread_over != "repeats":
        return "One repeat does not show the noise of the clock."
    if fast.low <= 1:
        return "But not in every repeat: more of them would tell whether it gains."
    if near:
        return f"Within its spread: {', '.join(near)}; more repeats would tell them apart."
    return ""
