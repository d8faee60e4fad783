"""The sentence under an answer: its arithmetic, where plain decoding's step comes from, its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

import presets
from engine.config import Sampling
from engine.metrics import TimeSplit, measure, undisturbed
from engine.steps import End, Prefill, Record, Step
from playground.host.balance import FEW_DRAFTS, NO_DRAFTS
from playground.host.live import LiveRuns
from playground.host.plain import BaselineTimer, PlainStep, Timing, stored_plain_step
from playground.host.request import read_request
from playground.host.result import compare_with_plain, result_of, too_short, warning_of
from playground.host.runner import EngineHost
from playground.host.stream import run_meta
from playground.runs.reading import History
from storage import RunLog
from tests.playground.asks import ask, finished, start, until

Timings = dict[Any, Timing]
PLAIN = PlainStep(0.009, 0.001, "around", drift=1.0)
"""100 tok/s."""


def metrics(tokens: float, draft_s: float, verify_s: float, other_s: float) -> dict[str, Any]:
    """Of 20 steps that commit so many tokens each."""
    seconds = draft_s + verify_s + other_s
    split = {"draft_s": draft_s, "verify_s": verify_s, "accept_s": other_s, "other_s": 0.0}
    counts = {"num_new_tokens": round(1 + 20 * tokens), "num_steps": 20}
    return {**counts, "tok_s": tokens / seconds, "decode_s": 20 * seconds, "time_split": split}


def said(values: dict[str, Any], plain: PlainStep | None = PLAIN) -> dict[str, str]:
    found = result_of(values, plain, is_plain=False)
    assert found is not None
    return found


def test_result_is_the_ratio_of_the_two_rates() -> None:
    """2.6 tokens in 12.4 ms are 209.7 tok/s, over 100 tok/s."""
    found = said(metrics(2.6, 0.002, 0.0094, 0.001))
    assert found["head"] == "2.10× plain decoding:" and found["mood"] == "faster"
    assert found["text"] == "2.60 tokens a step, and a step takes 1.24× as long as a plain step."
    assert "100.0 tok/s" in found["source"]


def test_more_rows_load_more_experts_is_said_of_a_mixture() -> None:
    """7 drafted tokens a step: 8 rows read 128 · (1 - (120 / 128)^8) = 51.6 experts, 6.5 × 8."""
    values = metrics(2.6, 0.002, 0.0094, 0.001) | {"num_drafted": 140, "num_accepted": 32}
    sentence = "More rows load more experts: 8.0 rows a step read about 6.5× the experts of one."
    found = result_of(values, PLAIN, is_plain=False, experts=(128, 8))
    assert found is not None and sentence in found["source"]
    assert "experts" not in said(values)["source"]
    few = values | {"num_drafted": 5}
    found = result_of(few, PLAIN, is_plain=False, experts=(128, 8))
    assert found is not None and "experts" not in found["source"]


def timed(ms: Sequence[float], num_tokens: int) -> dict[str, Any]:
    """The figures of steps that drafted four tokens and committed so many, verifying all the time.

    Each is followed by 1 ms in which the loop waits for whoever takes its records.
    """
    return asdict(measure(timed_records(ms, num_tokens, num_drafted=4)))


def timed_records(
    ms: Sequence[float], num_tokens: int, num_drafted: int = 0, num_extra_rows: int = 0
) -> list[Record]:
    nodes, at_s = 1 + num_drafted, 0.1
    records: list[Record] = [Prefill(5, 8, at_s)]
    for index, verify_ms in enumerate(ms):
        at_s += (verify_ms + 1) / 1000
        step: dict[str, Any]
        step = {"tokens": (5,) * nodes, "parents": range(-1, nodes - 1), "ranks": (0,) * nodes}
        step |= {"draft_probs": (None,) * nodes, "target_probs": (None,) * nodes, "bonus": 5}
        step |= {"draft_s": 0.0, "verify_s": verify_ms / 1000, "accept_s": 0.0, "other_s": 0.0}
        step |= {"accepted": tuple(range(1, num_tokens)), "num_committed": num_tokens}
        records.append(Step(index, 8, at_s=at_s, num_extra_rows=num_extra_rows, **step))
    return [*records, End((5,) * (1 + num_tokens * len(ms)), "length", len(ms))]


def test_the_speedup_is_the_ratio_of_the_tok_s_beside_it_however_busy_the_machine_was() -> None:
    for ms in ([300.0, 60.0, *[9.0] * 18], [60.0] * 8 + [9.0] * 16, [9.0] * 20):
        values = timed(ms, 2)
        comparison = compare_with_plain(values, PLAIN)
        assert comparison and comparison.speedup == pytest.approx(values["tok_s"] / PLAIN.tok_s)
        assert comparison.is_sure is (ms == [9.0] * 20)
    cold = said(timed([300.0, 60.0, *[9.0] * 18], 2))
    assert cold["head"] == "About 0.7× plain decoding:" and not cold["advice"]
    assert cold["mood"] == "same", "no colour for what is uncertain"
    assert "something else during 2 of 20 steps; the others were about 2.0× plain" in cold["source"]
    assert "only 9 steps" in said(timed([9.0] * 9, 2))["source"]


def test_a_step_cheaper_than_a_plain_step_gives_no_number() -> None:
    found = said(timed([3.0] * 20, 2))
    assert found["head"] == "No speedup is given:" and found["text"] == "2.00 tokens a step."
    assert "less time than a step of plain decoding" in found["source"]


def test_a_run_that_drafted_now_and_then_is_compared_with_its_own_undrafted_steps() -> None:
    """A page that draws on the same cores slows the run and not the timing around it."""
    drafted = timed_records([33.0] * 20, 2, num_drafted=4)
    undrafted = [
        replace(
            record, index=20 + at, bypass="not_worth_it", at_s=record.at_s + drafted[-2].at_s - 0.1
        )
        for at, record in enumerate(timed_records([30.0] * 20, 1)[1:-1])
        if isinstance(record, Step) and isinstance(drafted[-2], Step)
    ]
    values = asdict(measure([*drafted[:-1], *undrafted, End((5,) * 61, "length", 40)]))
    assert values["undrafted_verify_s"] == pytest.approx(0.030)
    comparison = compare_with_plain(values, PLAIN)
    assert comparison and comparison.plain.tok_s == pytest.approx(1 / 0.031)
    assert comparison.speedup == pytest.approx(values["tok_s"] * 0.031) and comparison.is_sure
    assert said(values)["head"] == "1.43× plain decoding:"
    assert "by the steps of this run that drafted nothing" in said(values)["source"]
    few = [*undrafted[:15], *(replace(one, num_extra_rows=5) for one in undrafted[15:])]
    for steps in (undrafted[:15], few):  # a window of lookahead's is verified with the root
        end = End((5,) * (41 + len(steps)), "length", 20 + len(steps))
        values = asdict(measure([*drafted[:-1], *steps, end]))
        assert values["num_undrafted"] == 15
        assert "timed briefly before and after" in said(values)["source"]


def test_plain_steps_that_differ_make_it_uncertain() -> None:
    values = timed([9.0] * 20, 2)
    assert said(values, replace(PLAIN, drift=1.1, noise=1.4))["head"].startswith("2.00×")
    for plain, words in (
        (replace(PLAIN, drift=1.4), "machine's speed changed"),
        (replace(PLAIN, noise=1.6), "busy while plain decoding was timed"),
        (replace(PLAIN, drift=None), "tok/s, timed briefly before this run."),  # it goes on
    ):
        found = said(values, plain)
        assert (found["head"], found["mood"]) == ("About 2.0× plain decoding:", "same")
        assert found["source"].startswith("Uncertain: ") and words in found["source"]
        assert found["source"].count("Uncertain") == 1


def test_longer_draft_may_take_longer() -> None:
    short, long, late = (TimeSplit(0.0, seconds, 0.0, 0.0) for seconds in (0.005, 0.030, 0.090))
    kept = undisturbed({0: [short] * 4 + [late], 8: [long] * 3})
    assert kept == [long] * 3 + [short] * 4


def test_slow_run_says_what_costs_most() -> None:
    found = said(metrics(1.2, 0.012, 0.010, 0.001))
    assert found["mood"] == "slower" and found["head"].startswith("0.52×")
    assert "drafting +1.20, verifying +0.10, the rest +0.00" in found["text"]
    assert found["advice"].startswith("Drafting dominates")
    assert "-0.00" not in said(metrics(1.2, 0.012, 0.010, 0.000999))["text"]
    assert said(metrics(1.2, 0.001, 0.018, 0.001))["advice"].startswith("Verification dominates")


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "advice"), [(60, 0, NO_DRAFTS), (1, 1, FEW_DRAFTS)]
)
def test_drafts_that_were_hardly_made_are_not_called_rejected(
    num_drafted: int, num_accepted: int, advice: str
) -> None:
    values = metrics(1.0, 0.001, 0.018, 0.001)
    found = said({**values, "num_drafted": num_drafted, "num_accepted": num_accepted})
    assert found["advice"] == f"{advice} on this text."


def test_without_a_comparison_it_says_what_is_known() -> None:
    plain = result_of(metrics(1.0, 0.0, 0.009, 0.001), None, is_plain=True)
    assert plain is not None and "10.0 ms each" in plain["text"]
    values = metrics(2.6, 0.002, 0.0094, 0.001)
    few = {**values, "num_steps": 3}
    for unknown, step in ((values, None), (few, PLAIN), ({"tok_s": None}, PLAIN)):
        assert result_of(unknown, step, is_plain=False) is None
    told = too_short(few)
    assert told and told["text"] == "3 steps; a speedup needs 8 at least."
    assert too_short({**few, "num_steps": 8}) is None


def test_a_run_is_compared_with_plain_steps_timed_around_it(host: EngineHost, log: RunLog) -> None:
    run = finished(start(host))
    assert run.plain is not None and run.plain.source == "around" and run.plain.drift is not None
    told = History(LiveRuns(), log).since(run.log_id or "", 0)["figures"]["result"]
    assert re.search("× plain decoding|No speedup", told["head"])
    again = finished(start(host))
    assert again.plain is not None and again.plain != run.plain, "timed anew"
    grammar: dict[str, Any] = {"structured_output": "regex", "grammar": "[ab]{30}"}
    sampled = finished(start(host, sampling={"temperature": "0.5", "seed": "7", **grammar}))
    assert sampled.plain is not None and host.loaded is not None
    assert host._last_timings[host.loaded].is_recent(Sampling(temperature=0.5, **grammar))
    programs = replace(read_request(host.catalog, ask()), compares_with_plain=False)
    assert finished(host.generate(programs, owner="api")).plain is None
    assert finished(start(host, method="plain")).plain is None


def test_plain_steps_are_as_fast_as_the_machine_was_in_between(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(start(host))
    ms: list[float] = []
    sampled: list[Sampling] = []

    def decode(*_: Any, sampling: Sampling, **__: Any) -> list[Record]:
        sampled.append(sampling)
        return timed_records([ms.pop(0)] * 20, 1)

    monkeypatch.setattr("engine.decode.decode", decode)

    def around(
        last: Timings, *verify_ms: float, own_step_s: float = 1.0, temperature: float = 0.0
    ) -> tuple[PlainStep, PlainStep]:
        """Before a run and after it, if each timing's steps take so long to verify."""
        ms[:] = verify_ms
        sampling = Sampling(temperature=temperature, seed=len(sampled))
        timer = BaselineTimer(host.build_context(), [5] * 40, sampling, lambda: False, last)
        before, after = timer.before, timer.after([5] * 40, own_step_s)
        assert before is not None and after is not None and ms == []
        return before, after

    _, even = around({}, 10.0, 10.0)
    assert even.verify_s == pytest.approx(0.010) and even.doubt(1.0) is None
    recent: Timings = {}
    before, step = around(recent, 10.0, 30.0)
    assert (before.doubt(1.0), step.doubt(1.0)) == ("apart", "drift")
    assert step.drift == pytest.approx(31 / 11)
    assert 1 / step.tok_s == pytest.approx((0.011 + 0.031) / 2)
    behind, after = around(recent, 31.0)  # it waits for no timing of its own
    assert behind.verify_s == pytest.approx(0.030) and after.doubt(1.0) is None
    hot, _ = around(recent, 40.0, 40.0, temperature=1.0)  # sampling takes its time, too
    assert hot.verify_s == pytest.approx(0.040)
    assert [one.temperature for one in sampled[-3:]] == [0.0, 1.0, 1.0]
    monkeypatch.setattr("playground.host.plain.RECENT_S", 0.0)
    late, _ = around(recent, 50.0, 50.0)
    assert late.verify_s == pytest.approx(0.050)
    _, again = around(recent, 10.0, 11.0, 10.0, own_step_s=0.0112)  # a step took less
    assert again.verify_s + again.other_s == pytest.approx(0.011)
    assert again.doubt(0.0112) is None


@pytest.mark.slow
def test_stopped_run_is_compared_with_what_was_timed_before_it(host: EngineHost) -> None:
    run = start(host, settings={"delay_ms": "50"}, limits={"max_new_tokens": "400"})
    until(lambda: len(run.rows) >= 2)
    run.cancel()
    step = finished(run).plain
    assert step is not None and step.doubt(1.0) == "apart"


@pytest.mark.parametrize("kept", [{}, {"verify_s": "x"}, [], {"verify_s": 0, "other_s": -1}])
def test_strange_figures_of_a_file_are_no_baseline(kept: Any) -> None:
    assert stored_plain_step({"plain": kept}) is None


@pytest.mark.parametrize(
    ("mat", "steps", "undrafted", "warns"),
    [
        (1.04, 10, 0, True),
        (1.05, 10, 0, False),
        (1.0, 9, 0, False),
        (1.0, 163, 162, False),  # one draft proves nothing
        (1.01, 100, 80, False),  # 1.05 where it drafted
        (1.01, 100, 70, True),
        (None, None, 0, False),
    ],
)
def test_a_warning_comes_below_mat_1_05_over_ten_drafted_steps(
    mat: float | None, steps: int | None, undrafted: int, warns: bool
) -> None:
    values: dict[str, Any] = {"mat": mat, "num_steps": steps, "num_drafted": 40}
    values["bypasses"] = {"budget": undrafted}
    assert ("another target" in (warning_of(values, {"trained": True}) or "")) is warns


def test_only_trained_drafters_are_another_targets_and_not_at_a_high_temperature() -> None:
    def warning(method: str, temperature: float = 0.0) -> str:
        facts: dict[str, Any] = {"title": "", "target": "t", "badge": "", "prompt": ""}
        config = presets.methods()[method].config.model_dump()
        meta = run_meta("r", method=config, messages=(), temperature=temperature, **facts)
        return warning_of({"mat": 1.0, "num_steps": 50, "num_drafted": 9}, meta) or ""

    assert "another target" in warning("draft-smollm2-135m")
    assert not warning("pard-smollm2-135m") and not warning("ngram")
    hot = warning("draft-smollm2-135m", 1.5)
    assert "temperature 1.5" in hot and "another target" not in hot
