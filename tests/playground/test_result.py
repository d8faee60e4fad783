"""The sentence under an answer: its arithmetic, where plain decoding's step comes from, its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playground.host.live import LiveRuns
from playground.host.plain import PlainStep, PlainSteps, plain_step_of
from playground.host.result import NO_DRAFTS, result_of
from playground.host.runner import EngineHost
from playground.host.stream import History, warning_of
from storage import RunLog
from tests.playground.asks import finished, start

PLAIN = PlainStep(0.009, 0.001, "measured")
"""100 tok/s."""


def metrics(tokens: float, draft_s: float, verify_s: float, other_s: float) -> dict[str, Any]:
    """Of 10 steps that commit so many tokens each."""
    seconds = draft_s + verify_s + other_s
    split = {"draft_s": draft_s, "verify_s": verify_s, "accept_s": other_s, "other_s": 0.0}
    new = int(1 + 10 * tokens)
    return {
        "num_new_tokens": new,
        "num_steps": 10,
        "tok_s": tokens / seconds,
        "time_split": split,
    }


def said(values: dict[str, Any], plain: PlainStep | None = PLAIN) -> dict[str, str]:
    found = result_of(values, plain, is_plain=False)
    assert found is not None
    return found


def test_result_is_the_ratio_of_the_two_rates() -> None:
    # 2.6 tokens in 12.4 ms are 209.7 tok/s, over 100 tok/s
    found = said(metrics(2.6, 0.002, 0.0094, 0.001))
    assert found["head"] == "2.10 × plain decoding:" and found["mood"] == "faster"
    assert found["text"] == "2.60 tokens a step, and a step costs 1.24 plain steps."
    assert "100.0 tok/s" in found["source"]


def test_slow_run_says_what_costs_most() -> None:
    found = said(metrics(1.2, 0.012, 0.010, 0.001))
    assert found["mood"] == "slower" and found["head"].startswith("0.52 ×")
    assert "drafting +1.20, verifying +0.10, the rest +0.00" in found["text"]
    assert found["advice"].startswith("Drafting costs most")
    assert said(metrics(1.2, 0.001, 0.018, 0.001))["advice"].startswith("Verifying costs most")
    assert said(metrics(1.0, 0.001, 0.018, 0.001))["advice"] == NO_DRAFTS


def test_level_run_is_neither() -> None:
    assert said(metrics(1.2, 0.001, 0.010, 0.001))["mood"] == "same"


def test_plain_decoding_says_what_it_is() -> None:
    found = result_of(metrics(1.0, 0.0, 0.009, 0.001), None, is_plain=True)
    assert found is not None and "10.0 ms each" in found["text"]


def test_nothing_is_said_of_what_is_not_known() -> None:
    values = metrics(2.6, 0.002, 0.0094, 0.001)
    assert result_of(values, None, is_plain=False) is None
    assert result_of({**values, "num_steps": 3}, PLAIN, is_plain=False) is None
    assert result_of({"tok_s": None}, PLAIN, is_plain=False) is None


def test_first_run_is_compared_with_a_moment_of_plain_decoding(
    host: EngineHost, log: RunLog
) -> None:
    run = finished(start(host))
    assert run.plain is not None and run.plain.source == "measured" and run.plain.tok_s > 0
    live = History(host.runs, log).since(run.id, 0)["figures"]["result"]
    stored = History(LiveRuns(), log).since(run.log_id or "", 0)["figures"]["result"]
    assert live == stored and "× plain decoding" in live["head"]
    again = start(host)
    assert finished(again).plain is run.plain, "measured once"


def test_recent_plain_run_comes_first(host: EngineHost, log: RunLog) -> None:
    plain = finished(start(host, method="plain"))
    assert plain.plain is None and log.get(plain.log_id or "") is not None
    run = finished(start(host))
    assert run.plain is not None and run.plain.run_id == plain.log_id
    stored = log.get(run.log_id or "")
    assert stored is not None and plain_step_of(log, stored) == run.plain
    assert plain.metrics is not None and plain.metrics.tok_s is not None
    assert run.plain.tok_s == pytest.approx(plain.metrics.tok_s)


def test_stopped_run_measures_nothing(host: EngineHost) -> None:
    run = start(host, settings={"delay_ms": "50"}, limits={"max_new_tokens": "400"})
    while len(run.rows) < 2:
        pass
    run.cancel()
    assert finished(run).plain is None


def test_measurement_grows_old(host: EngineHost, log: RunLog) -> None:
    now = [0.0]
    steps = PlainSteps(log, clock=lambda: now[0])
    finished(start(host))
    bench = host.bench()
    assert steps.known(bench.target, 20) is None
    found = steps.measured(bench, list(range(20)), lambda: False)
    assert found is not None and steps.known(bench.target, 20) is found
    now[0] = 4000.0
    assert steps.known(bench.target, 20) is None


@pytest.mark.parametrize("kept", [{}, {"verify_s": "x"}, [], {"verify_s": 0, "other_s": -1}])
def test_strange_figures_of_a_file_are_no_result(host: EngineHost, log: RunLog, kept: Any) -> None:
    stored = log.get(finished(start(host)).log_id or "")
    assert stored is not None
    strange = replace(stored, metrics={**stored.metrics, "plain": kept})
    assert plain_step_of(log, strange) is None


def test_only_trained_drafters_are_another_targets() -> None:
    poor = {"mat": 1.0, "num_steps": 50, "num_drafted": 9}
    assert warning_of(poor, {"trained": False}) is None
    assert "another target" in (warning_of(poor, {"trained": True}) or "")
