"""The made-up drafter is right as often as it is told, and changes no text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Ask
from engine.drafters.combined import CombinedConfig
from engine.drafters.synthetic import SyntheticConfig, SyntheticDrafter, _answers, _question
from engine.errors import ConfigError
from engine.model.target import Target
from engine.steps import Prefill, Step
from engine.tuning.adaptive import build_drafter
from engine.tuning.latency import LatencyCurve
from tests.engine.drafters import judges
from tests.models import build_context, tiny_target


def drafter_of(target: Target, **settings: Any) -> SyntheticDrafter:
    return SyntheticConfig.parse(settings).build(build_context(target))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "opt"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_greedy_output_equals_target_alone(family: str, rate: float) -> None:
    config = SyntheticConfig(acceptance_rate=rate, max_draft_len=5)
    assert (judges.assert_greedy_lossless(config, family) > 0) == (rate > 0)
    judges.assert_lossless_to_the_context_end(config, family)


@pytest.mark.parametrize(
    ("rates", "accepted"), [([1.0], 4), ([0.0], 0), ([1.0, 1.0, 0.0], 2), ([1.0, 0.0], 1)]
)
def test_sure_rates_accept_exactly_so_many(rates: list[float], accepted: int) -> None:
    target = judges.target_of("llama")
    text = judges.write(target, drafter_of(target, acceptance_rates=rates), [5, 6], tokens=31)
    assert {step.num_accepted for step in text.steps} == {accepted}
    assert {step.num_drafted for step in text.steps} == {4}


def test_acceptance_at_each_position_is_the_one_set() -> None:
    target = judges.target_of("llama")
    drafter = drafter_of(target, acceptance_rates=[0.9, 0.5], max_draft_len=3)
    tried, right = [0] * 3, [0] * 3
    for seed in range(20):
        for step in judges.write(target, drafter, [5, 6], tokens=60, seed=seed).steps:
            for place in range(min(step.num_accepted + 1, step.num_drafted)):
                tried[place] += 1
                right[place] += step.num_accepted > place
    for rate, n, hits in zip((0.9, 0.5, 0.5), tried, right, strict=True):
        assert n > 100 and abs(hits - n * rate) < 4 * math.sqrt(n * rate * (1 - rate))


def test_sampled_output_follows_the_target() -> None:
    target = judges.sampled_target()
    assert judges.p_value(target, drafter_of(target, acceptance_rate=0.9)) > 1e-3


def test_the_answer_is_known_before_the_clock_starts_and_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target(eos_token_id=None)
    calls: list[str] = []
    for name in ("prefill", "verify"):
        forward = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, f=forward, n=name: (calls.append(n), f(*a))[1])
    rates = (1.0, 0.2, 0.6)
    for rate in rates:  # another rate is another drafter
        records = decode(
            target,
            drafter_of(target, acceptance_rate=rate),
            [5, 6],
            limits=Limits(max_new_tokens=9),
        )
        assert isinstance(next(records), Prefill)
        before = len(calls)
        list(records)
        assert set(calls[before:]) == {"verify"}
    # The answer of 9 tokens and a draft beyond it, and a prefill per run.
    assert calls.count("prefill") == 9 + 4 + len(rates)


def test_drafting_takes_the_time_that_is_set() -> None:
    target = judges.target_of("llama")
    steps = judges.write(target, drafter_of(target, draft_ms=20.0), [5, 6], tokens=12).steps
    assert all(0.02 <= step.draft_s < 0.2 for step in steps)


def test_it_stops_where_the_answer_ends() -> None:
    target = tiny_target()
    text = judges.plain_text("llama", (5, 6), 40)
    target.model.generation_config.eos_token_id = text[10]
    drafter = drafter_of(target, acceptance_rate=1.0, max_draft_len=16)
    steps = [r for r in decode(target, drafter, [5, 6]) if isinstance(r, Step)]
    first = text.index(text[10])
    assert sum(step.num_drafted for step in steps) <= first + 1


def test_a_cancelled_run_does_not_wait_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(eos_token_id=None)
    records = decode(target, drafter_of(target), [5, 6], cancelled=lambda: True)
    assert [type(record).__name__ for record in records] == ["Prefill", "End"]


def test_it_is_labelled_and_nothing_adapts_it() -> None:
    config = SyntheticConfig()
    assert (config.badge, config.lossless) == ("synthetic", True)
    assert "made up" in config.title and "Made up" in config.summary
    assert CombinedConfig(model=config).badge == "synthetic"
    with pytest.raises(ConfigError, match="adaptive must"):
        SyntheticConfig.parse({"adaptive": True})
    with pytest.raises(ConfigError, match="less than or equal to 1"):
        SyntheticConfig.parse({"acceptance_rates": [0.5, 1.5]})


def test_look_up_goes_before_it_in_a_combination() -> None:
    config = CombinedConfig(model=SyntheticConfig(acceptance_rate=1.0))
    assert judges.assert_greedy_lossless(config, "llama") > 0


def test_the_answer_is_known_before_the_clock_starts_under_a_controller_too() -> None:
    """Adaptive, combined: `rehearse` reaches the made-up drafter, so no step pays for its truth."""
    target = tiny_target(eos_token_id=None)
    config = CombinedConfig(model=SyntheticConfig(), adaptive=True)
    drafter = build_drafter(
        config, build_context(target), lambda: LatencyCurve((1, 8), (1.0, 1.0), 8)
    )
    limits = Limits(max_new_tokens=8, ignore_eos=True)
    drafter.rehearse(Ask([5, 6], Sampling(), limits), lambda: False)
    assert _question(Ask([5, 6], Sampling(), limits)) in _answers[target]
