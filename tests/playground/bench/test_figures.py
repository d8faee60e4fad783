"""Percentiles against numpy; tables and ratios against values computed by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from engine.metrics import percentile
from engine.model.audit import Audit, LogitGap
from playground.experiments.report.columns import Cell, speedup_cell, summary
from playground.experiments.report.plots import report_figure
from playground.experiments.report.report import make_report
from playground.experiments.report.verdict import CAUSES, trust_in
from playground.experiments.statistics import Pair, Statistic, latency_table
from playground.host.speedup import NO_INTERVAL, request_speedup_of, speedup_of, student_t
from tests.playground.bench.requests import measured, plan_of

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=60), st.sampled_from([1, 50, 75, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], q: int) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_latency_table_equals_hand_computed_values() -> None:
    """Three requests: latencies 0.5, 1.1 and 2.0 s; 5, 11 and 1 new tokens."""
    table = latency_table(
        [
            measured(),
            measured(num_new_tokens=11, ttft_s=0.1, decode_s=1.0, num_prompt_tokens=7),
            measured(num_new_tokens=1, num_steps=0, ttft_s=2.0, decode_s=0.0, num_prompt_tokens=9),
        ]
    )
    assert table is not None
    row = table.rows["request_latency_ms"]
    std = float(np.std([500, 1100, 2000], ddof=1))
    shares = {f"p{q}": 1100 + (q - 50) / 50 * 900 for q in (50, 75, 90, 95, 99)}
    expected = {"avg": 1200, "min": 500, "max": 2000, "p25": 800, "std": std, **shares}
    assert row is not None and asdict(row) == pytest.approx(expected)
    inter = table.rows["inter_token_latency_ms"]
    assert inter is not None, "the answer of one token has none, the others have"
    assert (inter.avg, inter.min, inter.max) == pytest.approx((100, 100, 100))
    first = table.rows["time_to_first_token_ms"]
    assert first is not None and first.avg == pytest.approx(2200 / 3)
    lengths = table.rows["output_sequence_length"], table.rows["input_sequence_length"]
    assert [row and (row.avg, row.min, row.max) for row in lengths] == [
        (pytest.approx(17 / 3), 1, 11),
        (7, 5, 9),
    ]
    assert table.output_token_throughput == pytest.approx(17 / 3.6)
    assert table.request_throughput == pytest.approx(3 / 3.6)
    lines = {title: values for title, _, values in table.lines(("avg", "p25"))}
    assert len(lines) == 7 and lines["Request latency (ms)"] == [row.avg, row.p25]
    assert lines["Request throughput (per sec)"] == [table.request_throughput, None]
    single = Statistic.of([1.0])
    assert single is not None and single.std is None


def test_the_speedup_is_of_pooled_tokens_and_times() -> None:
    """Plain: 4 tokens in 0.4 s and 10 in 2 s. Drafting: 4 in 0.3 s and 10 in 2 s."""
    plain = [measured(), measured(prompt="2", num_new_tokens=11, decode_s=2.0)]
    ours = [measured("x", decode_s=0.3)]
    ours += [measured("x", prompt="2", num_new_tokens=11, decode_s=2.0)]
    fast = speedup_of(list(zip(ours, plain, strict=True)))
    assert fast is not None
    assert fast.ratio == pytest.approx((14 / 2.3) / (14 / 2.4))
    assert (fast.num_prompts, fast.num_repeats, fast.num_pairs) == (2, 1, 2)
    u = (10 / 14 - 2 / 2.3) - (10 / 14 - 2 / 2.4)
    reach = np.exp(student.ppf(0.975, 1) * np.sqrt(2 * 2 * u**2))
    assert (fast.low, fast.high) == pytest.approx((fast.ratio / reach, fast.ratio * reach))


def test_the_speedup_of_whole_requests_has_the_prefill_in_it() -> None:
    """As the tutorial compares throughputs: 3 tokens in 0.5 + 1.0 s, or 3 in 0.5 + 0.25 s."""
    pairs = [(measured("x", decode_s=0.25, ttft_s=0.5), measured(decode_s=1.0, ttft_s=0.5))]
    fast = speedup_of(pairs)
    assert fast is not None and fast.ratio == pytest.approx(4.0)
    assert request_speedup_of(pairs) == pytest.approx(1.5 / 0.75)
    report = make_report(plan_of("plain", "x"), [one for pair in pairs for one in pair])
    heads, rows = summary(report)
    cells = dict(zip(heads, rows[1][1], strict=True))
    assert (cells["speedup"].text, cells["request speedup"].text) == ("4.00×", "2.00×")
    assert rows[0][1][1].text == "1.00×" and "prefill included" in heads["request speedup"]


def test_a_single_prompt_is_judged_by_its_repeats_as_the_docstring_computes() -> None:
    pairs = [
        (measured("x", repeat=n, decode_s=s), measured(repeat=n, decode_s=1.0))
        for n, s in enumerate((0.5, 0.48))
    ]
    fast = speedup_of(pairs)
    assert fast is not None and fast.ratio and fast.low and fast.high
    assert [round(x, 2) for x in (fast.ratio, fast.low, fast.high)] == [2.04, 1.57, 2.64]
    once = speedup_of(pairs[:1])
    assert once is not None and (once.low, once.high) == (None, None)
    assert not once.faster and not once.slower


def test_an_interval_that_says_nothing_is_not_given_to_anybody() -> None:
    """The docstring's second case, and a clock that was once held up for minutes.

    Many repeats would tell what the first is worth; of the second the scatter is to blame.
    """
    plain = [measured(repeat=n, decode_s=1.0) for n in (0, 1)]
    for second_s, cause in ((0.4, NO_INTERVAL["few"]), (240.0, NO_INTERVAL["scatter"])):
        ours = [measured("x", decode_s=0.5), measured("x", repeat=1, decode_s=second_s)]
        fast = speedup_of(list(zip(ours, plain, strict=True)))
        assert fast is not None and fast.ratio == pytest.approx(2 / (0.5 + second_s))
        assert (fast.low, fast.high) == (None, None) and fast.interval == cause
        assert not fast.faster and not fast.slower
        cell = speedup_cell(fast)
        assert isinstance(cell, Cell) and (cell.small, cell.mood) == (cause, "")
        report = make_report(plan_of("plain", "x"), [*plain, *ours])
        assert f"(1 prompt × 2 repeats). These are {cause}" in report.headline
        (bar,) = report_figure(report, [], "speedup").data
        assert set(bar.error_y.array) | set(bar.error_y.arrayminus) == {0}, "no whiskers"


def test_turns_and_repeats_of_a_prompt_are_no_further_evidence() -> None:
    def pairs(copies: int) -> list[Pair]:
        return [
            (measured("x", prompt=p, turn=t, decode_s=s), measured(prompt=p, turn=t))
            for p, s in (("1", 0.1), ("2", 0.15), ("3", 0.2))
            for t in range(copies)
        ]

    once, often = speedup_of(pairs(1)), speedup_of(pairs(5))
    assert once is not None and often is not None and often.num_pairs == 15
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


@pytest.mark.parametrize("num_prompts", [3, 8])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(num_prompts: int) -> None:
    """Prompts differ by 35%, the clock by 4%; the truth is that of very many prompts."""
    draw = np.random.default_rng(7)
    truth = float(np.exp(0.5 - 0.35**2 / 2))  # Σ plain / Σ own seconds of a log-normal speedup
    held, rounds = 0, 400
    for _ in range(rounds):
        own = 0.4 / np.exp(draw.normal(0.5, 0.35, num_prompts)) * draw.normal(1, 0.04, num_prompts)
        pairs = [
            (measured("x", prompt=str(n), decode_s=float(s)), measured(prompt=str(n)))
            for n, s in enumerate(own)
        ]
        fast = speedup_of(pairs)
        assert fast is not None
        if fast.low is None or fast.high is None:
            held += 1  # too wide to be given
        else:
            held += fast.low <= truth <= fast.high
    assert 0.91 <= held / rounds <= 0.985


def test_quantiles_are_students() -> None:
    for freedom in (1, 2, 3, 4, 5, 18, 19, 60, 1000):
        for comparisons in (1, 3, 12):
            quantile = float(student.ppf(1 - 0.025 / comparisons, freedom))
            assert student_t(freedom, comparisons) == pytest.approx(quantile, rel=1e-6)


def test_groups_are_told_apart_and_ordered() -> None:
    requests = [
        measured(group="maths", prompt="m"),
        measured("x", group="maths", prompt="m", decode_s=0.2),
        measured("x", decode_s=0.1),
        measured(),
        measured(group="own kind", prompt="o"),
        measured("x", group="one side", prompt="p"),
    ]
    report = make_report(plan_of("plain", "x"), requests)
    assert report.groups == ("chat", "maths", "one side", "own kind")
    ratios = {name: cell.speedup for name, cell in report.section("x").groups.items()}
    alone = ratios.pop("one side")
    assert alone is None, "what only one side answered counts in no ratio"
    assert {k: v and v.ratio for k, v in ratios.items()} == pytest.approx({"chat": 4, "maths": 2})
    overall = report.section("x").overall
    assert (overall.num_requests, overall.speedup and overall.speedup.num_pairs) == (3, 2)


def test_verdict_names_the_first_difference_and_is_silent_under_sampling() -> None:
    requests = [measured(), measured("good"), measured("bad", output_ids=(1, 2, 9, 4, 5))]
    report = make_report(plan_of("plain", "good", "bad"), requests)
    plain, good, bad = (section.verdict for section in report.configurations)
    assert plain is None and good is not None and good.identical
    assert bad is not None and not bad.identical and bad.divergences[0].at == 2
    drawn = make_report(plan_of("plain", "good", temperature=0.7), requests)
    assert drawn.section("good").verdict is None


LOOKED = {(): "unknown", (True,): "near ties", (True, False): "fault", (True, True): "near ties"}


@pytest.mark.parametrize(("looked", "cause"), LOOKED.items())
def test_the_cause_of_differences_follows_from_their_audits(
    looked: tuple[bool, ...], cause: str
) -> None:
    other = (1, 2, 9, 4, 5)
    requests = [measured(), measured("bad", output_ids=other)]
    requests += [measured(prompt="2"), measured("bad", prompt="2", run_id="2", output_ids=other)]
    pairs = list(zip(requests[1::2], requests[::2], strict=True))
    audits = {
        (own.run_id, plain.run_id): Audit(
            "c", "x", LogitGap("bfloat16", "c", "x", 0.125, 16.0, 15.875, 2, 0.125, near_tie)
        )
        for (own, plain), near_tie in zip(pairs, looked, strict=False)
    }
    report = make_report(plan_of("plain", "bad"), requests, audits)
    verdict = report.section("bad").verdict
    assert verdict is not None and verdict.cause == cause
    assert verdict.divergences[0].cause == cause
    assert CAUSES[verdict.divergences[0].cause][2] in verdict.sentence
    assert (looked == (True,)) == ("1 of 2 examined" in verdict.sentence)
    only_near_ties = "the examined ones" in trust_in(verdict, lossless=True)
    assert only_near_ties == (cause == "near ties")
    gaps = [one.gap for one in verdict.divergences]
    assert [bool(gap) for gap in gaps] == [n < len(looked) for n in range(2)]
    assert not looked or "top-2 logit gap 0.125" in gaps[0]


def by_two_workers(slow: float) -> list[Pair]:
    """Two prompts on each of two workers, the second of which takes `slow` times as long."""
    pairs = []
    for number, (own_s, plain_s) in enumerate([(0.2, 0.4), (0.3, 0.5), (0.4, 0.6), (0.5, 0.6)]):
        worker, times = ("b", slow) if number % 2 else ("a", 1.0)
        at: dict[str, Any]
        at = {"prompt": str(number), "worker": worker, "device": "d", "num_new_tokens": 5 + number}
        at["ttft_s"] = 0.1 * times
        own = measured("fast", decode_s=own_s * times, **at)
        pairs.append((own, measured(decode_s=plain_s * times, **at)))
    return pairs


def test_a_slow_worker_moves_no_ratio() -> None:
    even, slowed = speedup_of(by_two_workers(1.0)), speedup_of(by_two_workers(10.0))
    assert even is not None and slowed is not None
    assert (slowed.ratio, slowed.low, slowed.high) == pytest.approx(
        (even.ratio, even.low, even.high)
    )
    pairs = by_two_workers(10.0)
    assert speedup_of(pairs[::2]) != speedup_of(pairs[1::2])  # there is something to move
    requests = request_speedup_of(by_two_workers(1.0))
    assert request_speedup_of(pairs) == pytest.approx(requests) and requests is not None
    assert 1 < requests < (even.ratio or 0), "a prefill is as long on both sides"
