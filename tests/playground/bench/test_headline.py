"""The sentences that say which configuration is fastest."""

from __future__ import annotations

import pytest

from playground.experiments.report.report import Report, make_report
from playground.experiments.report.statistics import Speedup
from playground.experiments.report.verdict import TRUST, Contender, headline, trust_in
from tests.playground.bench.requests import measured, plan_of


def one(
    name: str, ratio: float, low: float | None, high: float | None, *, trust: str = TRUST[None]
) -> Contender:
    return Contender(name, Speedup(ratio, low, high, 6, 2, 12), trust)


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


def test_the_fastest_is_named_with_its_interval_and_its_verdict() -> None:
    text, fastest = said(one("b", 1.84, 1.7, 1.9))
    assert fastest == "b"
    assert text == (
        "b is the fastest: 1.84× plain decoding (95% interval 1.70 … 1.90×; 6 prompts × 2 "
        "repeats). Its answers are token-identical to plain decoding’s."
    )


def test_the_interval_of_the_best_of_several_is_exploratory() -> None:
    text, fastest = said(one("a", 1.2, 1.1, 1.3), one("b", 1.84, 1.7, 1.9))
    assert fastest == "b"
    assert "(exploratory 95% interval 1.70 … 1.90×, best of 2; 6 prompts × 2 repeats)" in text


def test_disjoint_intervals_are_never_said_not_to_be_separated() -> None:
    apart = said(one("a", 1.24, 1.14, 1.33), one("b", 0.7, 0.6, 0.8), apart=False)
    assert apart[1] == "a" and "do not separate" not in apart[0]
    text, fastest = said(
        one("Suffix", 1.24, 1.14, 1.33), one("Token recycling", 0.7, None, None), apart=False
    )
    assert fastest is None and "do not separate" not in text
    assert "is ahead of Token recycling (too few answers for an interval) is not known" in text


def test_what_has_no_baseline_is_named_without_a_number() -> None:
    doubtful = Contender("c", Speedup(None, None, None, 6, 2, 12, doubt="cheap step"), "")
    text, fastest = said(one("a", 1.24, 1.14, 1.33), doubtful, apart=False)
    assert fastest is None and "No speedup is given for c: a step took less time" in text
    text, fastest = said(doubtful)
    assert fastest is None and text.startswith("No speedup is given for c")


def test_the_winner_is_compared_with_the_correction_for_its_rivals() -> None:
    """Alone x is shown to be ahead; as the best of nine, three prompts are too few."""
    seconds = {"x": [0.2, 0.26, 0.21]}
    assert report(seconds).fastest == "x"
    rivals = {f"y{n}": [0.39, 0.4, 0.41] for n in range(8)}
    assert report({**seconds, **rivals}).fastest is None


def test_nothing_is_called_fastest_that_the_measurements_do_not_tell_apart() -> None:
    text, fastest = said(one("a", 1.6, 1.5, 1.75), one("b", 1.7, 1.6, 1.9), apart=False)
    assert fastest is None and "fastest" not in text and "do not separate it from a" in text
    text, fastest = said(one("a", 1.1, 0.9, 1.3))
    assert fastest is None and text.startswith("a reaches 1.10× plain decoding (95% interval 0.90")
    assert text.endswith("do not separate it from plain decoding; more prompts or repeats would.")
    text, fastest = said(one("a", 0.9, 0.7, 1.3))
    assert fastest is None and text.startswith("No gain over plain decoding: a reaches 0.90×")
    text, fastest = said(one("a", 1.4, None, None))
    assert (
        fastest is None and "a reaches 1.40×" in text and "too few answers for an interval" in text
    )


def test_a_verdict_waits_for_all_requests() -> None:
    text, fastest = said(one("a", 1.6, 1.5, 1.7), preliminary="4 of 24 requests")
    assert (text, fastest) == ("Preliminary (4 of 24 requests): a leads at 1.60×.", None)
    text, fastest = said(one("a", 0.6, 0.5, 0.7), preliminary="4 of 24 requests")
    assert text == "Preliminary (4 of 24 requests): plain decoding leads; a is at 0.60×."


def test_a_fault_is_not_recommended() -> None:
    assert "Do not use it" in said(one("a", 3.0, 2.9, 3.1, trust=TRUST["fault"]))[0]
    assert "near-ties" in said(one("a", 3.0, 2.9, 3.1, trust=TRUST["near ties"]))[0]
    lossy = trust_in(None, lossless=False)
    assert "It is lossy" in said(one("a", 3.0, 2.9, 3.1, trust=lossy))[0]


def test_plain_decoding_may_be_the_fastest() -> None:
    text, fastest = said(one("a", 0.6, 0.5, 0.7), one("b", 0.8, 0.7, 0.9))
    assert fastest == "plain"
    assert text.startswith("Plain decoding is the fastest here. Next, b reaches 0.80×")
    assert said() == said(Contender("a", None, "")) == ("", None)


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
