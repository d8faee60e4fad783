"""The sentences that say which configuration is fastest."""

from __future__ import annotations

import pytest

from playground.experiments.report.report import Report, make_report
from playground.experiments.report.verdict import TRUST, Contender, headline
from playground.host.speedup import Speedup
from tests.playground.bench.requests import measured, plan_of


def one(
    name: str, ratio: float, low: float | None, high: float | None, *, trust: str = TRUST[None]
) -> Contender:
    return Contender(name, Speedup(ratio, low, high, 6, 2, 12), trust)


DOUBTFUL = Contender("c", Speedup(None, None, None, 6, 2, 12, doubt="cheap step"), "")


def said(
    *contenders: Contender, apart: bool = True, preliminary: str = ""
) -> tuple[str, str | None]:
    by_name = {one.name: one.speedup for one in contenders}
    between = Speedup(1.3, 1.2 if apart else 0.9, 1.4, 6, 2, 12)

    def over(one: str, other: str) -> Speedup | None:
        if other == "plain":
            return by_name[one]
        fast = by_name[other]
        if one != "plain":
            return between if fast and fast.low else fast
        assert fast is not None and fast.ratio
        ends = (fast.high and 1 / fast.high, fast.low and 1 / fast.low)
        return Speedup(1 / fast.ratio, *ends, 6, 2, 12)

    return headline("plain", contenders, over, preliminary=preliminary)


TIED = "do not separate it from"
CASES: dict[str, tuple[list[Contender], str | None, str]] = {
    "the fastest with its interval and verdict": (
        [one("b", 1.84, 1.7, 1.9)],
        "b",
        "b is the fastest: 1.84× plain decoding (95% interval 1.70 … 1.90×; 6 prompts × 2 "
        "repeats). Its answers are token-identical to plain decoding’s.",
    ),
    "the best of several is exploratory": (
        [one("a", 1.2, 1.1, 1.3), one("b", 1.84, 1.7, 1.9)],
        "b",
        "(exploratory 95% interval 1.70 … 1.90×, best of 2; 6 prompts × 2 repeats)",
    ),
    "disjoint intervals are separated": (
        [one("a", 1.24, 1.14, 1.33), one("b", 0.7, 0.6, 0.8)],
        "a",
        "a is the fastest: 1.24×",
    ),
    "no interval is no tie": (
        [one("Suffix", 1.24, 1.14, 1.33), one("Recycling", 0.7, None, None)],
        None,
        "is ahead of Recycling (too few answers for an interval) is not known",
    ),
    "no baseline beside another": (
        [one("a", 1.24, 1.14, 1.33), DOUBTFUL],
        None,
        "No speedup is given for c: a step took less time",
    ),
    "no baseline": ([DOUBTFUL], None, "No speedup is given for c"),
    "a tie": ([one("a", 1.6, 1.5, 1.75), one("b", 1.7, 1.6, 1.9)], None, f"{TIED} a;"),
    "a tie with plain decoding": (
        [one("a", 1.1, 0.9, 1.3)],
        None,
        "a reaches 1.10× plain decoding (95% interval 0.90 … 1.30×; 6 prompts × 2 repeats). The "
        f"measurements {TIED} plain decoding; more prompts or repeats would.",
    ),
    "no gain": ([one("a", 0.9, 0.7, 1.3)], None, "No gain over plain decoding: a reaches 0.90×"),
    "too few answers": ([one("a", 1.4, None, None)], None, "too few answers for an interval"),
    "plain decoding": (
        [one("a", 0.6, 0.5, 0.7), one("b", 0.8, 0.7, 0.9)],
        "plain",
        "Plain decoding is the fastest here. Next, b reaches 0.80×",
    ),
    "a fault": ([one("a", 3.0, 2.9, 3.1, trust=TRUST["fault"])], "a", "Do not use it"),
    "nothing": ([], None, ""),
    "nothing measured": ([Contender("a", None, "")], None, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_called_fastest_that_the_measurements_do_not_tell_apart(case: str) -> None:
    contenders, fastest, words = CASES[case]
    text, named = said(*contenders, apart=fastest is not None and "disjoint" not in case)
    assert named == fastest and words in text
    assert ("is the fastest" in text) == (fastest is not None)
    assert (TIED in text) == case.startswith("a tie")


def test_the_winner_is_compared_with_the_correction_for_its_rivals() -> None:
    """Alone x is shown to be ahead; as the best of nine, three prompts are too few."""
    seconds = {"x": [0.2, 0.26, 0.21]}
    assert report(seconds).fastest == "x"
    rivals = {f"y{n}": [0.39, 0.4, 0.41] for n in range(8)}
    assert report({**seconds, **rivals}).fastest is None


def test_a_verdict_waits_for_all_requests() -> None:
    text, fastest = said(one("a", 1.6, 1.5, 1.7), preliminary="4 of 24 requests")
    assert (text, fastest) == ("Preliminary (4 of 24 requests): a leads at 1.60×.", None)
    text, fastest = said(one("a", 0.6, 0.5, 0.7), preliminary="4 of 24 requests")
    assert text == "Preliminary (4 of 24 requests): plain decoding leads; a is at 0.60×."


def report(seconds: dict[str, list[float]], *, planned: int | None = None) -> Report:
    """Of prompts that plain decoding answers in 0.4 s each."""
    requests = [
        measured(name, prompt=str(n), decode_s=s, run_id=f"{name}{n}")
        for name, all_seconds in {"plain": [0.4] * 3, **seconds}.items()
        for n, s in enumerate(all_seconds)
    ]
    return make_report(plan_of("plain", *seconds), requests, planned=planned)


@pytest.mark.parametrize(
    ("other", "fastest"), [([0.2, 0.21, 0.2], "x"), ([0.11, 0.1, 0.112], None)]
)
def test_two_configurations_are_compared_prompt_by_prompt(
    other: list[float], fastest: str | None
) -> None:
    """Their own intervals overlap; what counts is their ratio on the same prompts."""
    found = report({"x": [0.1, 0.11, 0.102], "y": other})
    assert found.fastest == fastest
    assert report({"x": [0.1, 0.11, 0.102]}, planned=9).fastest is None
