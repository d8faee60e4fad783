"""Figures and explanation from runs made by hand: every number can be checked on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playground.experiments.report.explain import Explanation, explain
from playground.experiments.report.report import make_report
from playground.experiments.report.verdict import num_unsteady
from playground.experiments.statistics import FinishedRequest, Totals
from playground.host.speedup import pair_requests, speedup_of
from tests.playground.bench.requests import measured, plan_of

OWN: dict[str, Any] = {
    "configuration": "own",
    "num_new_tokens": 21,
    "num_steps": 8,
    "num_drafted": 32,
    "num_accepted": 12,
    "decode_s": 0.080,
    "at_least": (8, 4),
    "split_s": (0.016, 0.056, 0.004, 0.004, 0.0),
}
PLAIN: dict[str, Any] = {
    **OWN,
    "configuration": "plain",
    "num_steps": 20,
    "num_drafted": 0,
    "num_accepted": 0,
    "decode_s": 0.100,
    "at_least": (),
    "split_s": (0.0, 0.096, 0.002, 0.002, 0.0),
}


def run(**changes: Any) -> FinishedRequest:
    """8 steps of 10 ms of which 12 drafts were accepted: MAT 2.5, 20 tokens after the first."""
    return measured(**{**OWN, **changes})


def plain(**changes: Any) -> FinishedRequest:
    """20 steps of 5 ms."""
    return measured(**{**PLAIN, **changes})


def why(own: FinishedRequest, other: FinishedRequest) -> Explanation:
    found = explain([(own, other)])
    assert found is not None
    return found


def test_runs_that_ended_with_the_first_token_do_not_count() -> None:
    empty = run(num_new_tokens=1, num_steps=0, num_accepted=0, decode_s=0.0)
    assert explain([(empty, plain())]) is None and speedup_of([(empty, plain())]) is None
    assert Totals.of([run(), empty]).tok_s == Totals.of([run()]).tok_s
    assert explain([(run(), plain()), (empty, plain())]) == explain([(run(), plain())])


def test_a_run_is_paired_with_the_plain_run_of_its_prompt_repeat_and_machine() -> None:
    own = [run(prompt="1"), run(prompt="2"), run(prompt="1", repeat=1)]
    others = [plain(prompt="1", repeat=1), plain(prompt="1"), plain(prompt="9")]
    pairs = pair_requests(own, others)
    assert [(o.prompt, o.repeat, p.prompt, p.repeat) for o, p in pairs] == [
        ("1", 0, "1", 0),
        ("1", 1, "1", 1),
    ]
    for other in ({"worker": "b"}, {"worker": "a", "device": "other"}):
        assert pair_requests([run(worker="a")], [plain(**other)]) == []


def test_the_formula_with_the_measured_numbers() -> None:
    found = why(run(), plain())
    assert found.measured == pytest.approx((20 / 0.080) / (20 / 0.100))
    assert found.formula == pytest.approx(2.5 * 5 / (2 + 7 + 1))
    assert found.terms.endswith("= 2.50 · 5.00 ms / (2.00 + 7.00 + 1.00 ms) = 1.25×")
    assert found.because.startswith(
        "Faster: 2.50 tokens a step, and a step takes 2.00× as long as a plain "
        "step (1 +0.40 drafting, +0.44 verification, +0.16 the rest)"
    )
    assert "as the formula says" in found.differs


def cost(**ms: float) -> FinishedRequest:
    """A configuration of MAT 2.5 whose steps cost this."""
    split = [
        ms.get(part, 0.0) * 0.008 for part in ("draft", "verify", "accept", "other", "rollback")
    ]
    return run(split_s=tuple(split), decode_s=sum(split))


@pytest.mark.parametrize(
    ("own", "begins", "names"),
    [
        (cost(draft=1.0, verify=6.0), "Faster", "cost is verification"),
        (cost(draft=9.0, verify=6.0), "Slower", "drafting; without it the speedup would be 2.08"),
        (cost(draft=2.0, verify=6.0, other=9.0), "Slower", "cost is the rest"),
        (cost(draft=20.0, verify=18.0), "Slower", "even without it, too little is accepted"),
        (cost(draft=5.0, verify=7.4), "As fast as plain", "drafting"),
        (
            replace(cost(draft=5.0, verify=10.0), num_accepted=0, num_steps=20, at_least=()),
            *("Hardly any draft is accepted", "tokens a step"),
        ),
        (
            replace(cost(draft=10.0, verify=20.0), num_drafted=1, num_accepted=1, num_steps=40),
            *("Hardly anything was drafted", "tokens a step"),
        ),
    ],
)
def test_the_sentence_names_what_costs_most(own: FinishedRequest, begins: str, names: str) -> None:
    found = why(own, plain())
    assert found.because.startswith(begins)
    assert names in found.because


def test_what_the_interval_does_not_hold_is_said_to_be_noise() -> None:
    """A third prompt takes twice as long as the others, or so long that no interval is given."""
    for scale, doubt in ((2.0, "within the noise"), (2.5, "with too few answers for an interval")):
        split_s = tuple(scale * part for part in run().split_s)
        runs = [
            *(run(prompt=n) for n in "01"),
            run(prompt="2", decode_s=sum(split_s), split_s=split_s),
        ]
        found = explain([(own, plain(prompt=own.prompt)) for own in runs])
        assert found is not None and found.because.startswith(f"Slower, {doubt}: ")


def test_the_difference_to_the_measured_ratio_is_accounted_for() -> None:
    """Two tokens cut off (20 of 22 left), and 20 ms of the loop between 8 steps."""
    found = why(run(num_accepted=14, decode_s=0.100), plain(decode_s=0.104))
    kept = 20 / 22
    between = (104 / 100) / (100 / 80)
    assert found.measured == pytest.approx(found.formula * kept * between)
    assert f"{100 * (kept - 1):+.1f}%" in found.differs
    assert f"{100 * (between - 1):+.1f}%" in found.differs
    assert "Neither figure includes prefill" in found.differs


def test_plain_decoding_that_does_not_repeat_itself_is_pointed_out() -> None:
    steady = [plain(repeat=0), plain(repeat=1), plain(repeat=1, prompt="2", output_ids=(9,))]
    assert num_unsteady(steady) == 0
    moody = [*steady, plain(repeat=0, prompt="2", output_ids=(8,))]
    assert num_unsteady(moody) == 1
    reports = {
        temperature: make_report(plan_of("plain", temperature=temperature), moody)
        for temperature in (0.0, 1.0)
    }
    drawn, greedy = reports[1.0].section("plain"), reports[0.0].section("plain")
    assert "changes from repeat to repeat for 1 of 2 prompts" in greedy.verdict_sentence
    assert drawn.verdict_sentence == ""
