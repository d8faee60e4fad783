"""The sentences that say which configuration is fastest."""

from __future__ import annotations

from playground.experiments.report.statistics import Speedup
from playground.experiments.report.verdict import Contender, Trust, headline


def one(
    name: str,
    ratio: float,
    low: float,
    high: float,
    *,
    trust: Trust = "identical",
    over: str = "repeats",
    pairs: int = 6,
) -> Contender:
    return Contender(name, Speedup(ratio, ratio, low, high, over, None, pairs), trust)


def test_the_fastest_is_named_with_its_spread_and_its_verdict() -> None:
    said = headline([one("a", 1.2, 1.1, 1.3), one("b", 1.84, 1.7, 1.9)])
    assert said == (
        "Fastest: b, 1.84× the tok/s of plain decoding (repeats: 1.70 … 1.90). "
        "Its text is plain decoding's, token for token."
    )


def test_what_the_spread_does_not_tell_apart_is_said() -> None:
    said = headline([one("a", 1.6, 1.5, 1.75), one("b", 1.7, 1.6, 1.9), one("c", 1.2, 1.1, 1.3)])
    assert "Within its spread: a; more repeats" in said and "c" not in said.split(". ")[1]
    assert "not in every repeat" in headline([one("a", 1.1, 0.9, 1.3)])
    assert "One repeat does not show" in headline([one("a", 1.4, 1.3, 1.5, over="requests")])


def test_a_fault_is_not_recommended() -> None:
    assert "Do not use it" in headline([one("a", 3.0, 2.9, 3.1, trust="fault")])
    assert "near-ties" in headline([one("a", 3.0, 2.9, 3.1, trust="near ties")])
    assert "It is lossy" in headline([one("a", 3.0, 2.9, 3.1, trust="lossy")])


def test_nothing_faster_is_said_as_such() -> None:
    slow = headline([one("a", 0.6, 0.5, 0.7), one("b", 0.8, 0.7, 0.9)])
    assert slow.startswith(
        "Plain decoding is fastest here: the next, b, reaches 0.80× its tok/s (rep"
    )
    assert "Nothing is faster" in headline([one("a", 1.01, 0.9, 1.1)])
    assert headline([]) == headline([Contender("a", None, "identical")]) == ""
    assert "a reaches 0.50× its tok/s." in headline([one("a", 0.5, 0.5, 0.5, pairs=1)])
