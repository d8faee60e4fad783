"""The adaptive controller drafts what pays, and never changes the text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import Drafter, Start
from engine.model.target import Target
from engine.proposal import ExtraRows, Outcome, Proposal
from engine.steps import End, Step
from engine.tree import ChoiceTree, TreeShape
from engine.tuning.adaptive import (
    AcceptanceEstimate,
    AdaptiveDrafter,
    Calibration,
    build_drafter,
    path_probabilities,
)
from engine.tuning.latency import LatencyCurve
from engine.tuning.timing import measure_curve
from tests.models import build_context, plain_greedy, tiny_target

FLAT = LatencyCurve((1, 64), (10.0, 10.0), 0)
STEEP = LatencyCurve((1, 64), (10.0, 640.0), 0)
PROMPT = [10, 20, 30, 40]


class Oracle(Drafter):
    """Drafts the known continuation; from `right` tokens on every token is wrong."""

    draft_ms = 0.2

    def __init__(self, target: Target, text: list[int], *, right: int, tree: ChoiceTree) -> None:
        self._text = text
        self._right = right
        self._tree = tree
        self._vocab = target.vocab_size
        self._at = 0
        self.num_proposed = 0

    def start(self, start: Start) -> None:
        self._at = 0

    def propose(self, max_depth: int) -> Proposal:
        self.num_proposed += 1
        tokens = [self._text[self._at]]
        for path in self._tree.paths:
            true = self._text[min(self._at + len(path), len(self._text) - 1)]
            good = len(path) <= self._right and not any(path)
            tokens.append(true if good else (true + 1 + path[-1]) % self._vocab)
        proposal = Proposal(torch.tensor(tokens), self._tree.shape, self._tree.ranks)
        return proposal.cut(max_depth)

    def observe(self, outcome: Outcome) -> None:
        self._at += len(outcome.committed)


class OnAMachine(AdaptiveDrafter):
    """A draft takes `draft_ms` by its clock, a step what `machine` says, and nothing else any."""

    def __init__(
        self, inner: Oracle, target: Target, curve: LatencyCurve, machine: LatencyCurve
    ) -> None:
        super().__init__(inner, target, lambda: curve, clock=self._now)
        self._oracle = inner
        self._machine = machine
        self._verify_s = 0.0

    def _now(self) -> float:
        return self._verify_s + self._oracle.draft_ms * self._oracle.num_proposed / 1000

    def observe(self, outcome: Outcome) -> None:
        self._verify_s += self._machine.at(outcome.proposal.num_rows) / 1000
        super().observe(outcome)


def run(
    curve: LatencyCurve,
    *,
    right: int,
    depth: int = 6,
    tokens: int = 120,
    kind: type[Oracle] = Oracle,
    machine: LatencyCurve | None = None,
) -> tuple[list[Step], list[int], list[int], Oracle]:
    target = tiny_target(eos_token_id=None)
    text = plain_greedy(target, PROMPT, tokens + 20)
    oracle = kind(target, text, right=right, tree=ChoiceTree.chain(depth))
    drafter = OnAMachine(oracle, target, curve, machine or curve)
    limits = Limits(max_new_tokens=tokens, ignore_eos=True)
    records = list(decode(target, drafter, PROMPT, limits=limits))
    end = records[-1]
    assert isinstance(end, End)
    steps = [record for record in records if isinstance(record, Step)]
    return steps, list(end.output_ids), text[:tokens], oracle


@pytest.mark.parametrize("right", [0, 2, 6])
@pytest.mark.parametrize("curve", [FLAT, STEEP])
def test_output_is_the_targets_whatever_the_controller_decides(
    right: int, curve: LatencyCurve
) -> None:
    _, output, expected, _ = run(curve, right=right)
    assert output == expected


def test_useless_drafter_ends_in_plain_decoding_with_ever_longer_pauses() -> None:
    steps, _, _, oracle = run(STEEP, right=0)
    drafted = [step.index for step in steps if step.num_drafted]
    assert oracle.num_proposed <= 12
    assert sum(step.num_drafted == 0 for step in steps[20:]) / len(steps[20:]) > 0.9
    assert drafted[-1] > 10, "it must look again from time to time"


def test_perfect_drafter_is_used_to_its_full_depth() -> None:
    steps, _, _, _ = run(FLAT, right=6)
    assert all(step.num_drafted == 6 for step in steps[4:-2])


def test_depth_shrinks_to_what_is_accepted_when_rows_cost_time() -> None:
    curve = LatencyCurve((1, 8), (10.0, 17.0), 0)
    steps, _, _, _ = run(curve, right=2)
    assert {step.num_drafted for step in steps[20:-2] if step.num_drafted} <= {2, 3}
    assert any(step.num_drafted == 2 for step in steps[20:])


def test_every_decision_is_said_in_words() -> None:
    steps, _, _, _ = run(STEEP, right=1)
    assert all(step.decision for step in steps)


def test_smaller_tree_keeps_a_prefix_of_siblings_and_every_parent() -> None:
    tree = ChoiceTree.parse([[0], [1], [2], [0, 0], [1, 0], [1, 1]])
    proposal = Proposal(torch.arange(7), tree.shape, tree.ranks)
    estimate = AcceptanceEstimate()
    estimate.hits = {(1, 2): 50.0}
    estimate.trials = {(1, 2): 50.0}
    probs = path_probabilities(proposal, estimate)
    assert probs[3] <= probs[2] <= probs[1]
    for node, parent in enumerate(tree.shape.parents[1:], start=1):
        assert probs[node] <= probs[parent]


def test_curve_is_measured_per_row_count() -> None:
    curve = measure_curve(tiny_target(), rows=(1, 2, 4), context_len=16, repeats=2)
    assert curve.rows == (1, 2, 4) and all(ms > 0 for ms in curve.ms)


def test_adaptive_setting_wraps_any_method_under_sampling_too() -> None:
    target = tiny_target()
    config = parse_method({"decoding_type": "NGram", "adaptive": True, "max_draft_len": 4})
    drafter = build_drafter(config, build_context(target))
    assert isinstance(drafter, AdaptiveDrafter)
    sampling = Sampling(temperature=1.0, seed=3)
    end = list(decode(target, drafter, PROMPT * 5, sampling=sampling))[-1]
    assert isinstance(end, End) and end.output_ids


class Sure(Oracle):
    """Says of every token that it is likely by `said`, whatever it is."""

    said = 0.9

    def propose(self, max_depth: int) -> Proposal:
        proposal = super().propose(max_depth)
        return replace(proposal, draft_probs=torch.full((len(proposal.shape),), self.said))


def test_of_a_cheap_draft_the_nodes_that_pay_are_verified() -> None:
    flat, output, text, oracle = run(FLAT, right=6, kind=Sure)
    assert output == text and oracle.num_proposed == len(flat)
    assert all(len(step.parents) == 7 for step in flat[:-2])
    # A row costs as much as a plain step: nothing pays, and after some steps nothing is drafted.
    steep, output, text, oracle = run(STEEP, right=6, kind=Sure)
    assert output == text and all(len(step.parents) == 1 for step in steep)
    assert oracle.num_proposed < 0.7 * len(steep)
    assert any("did not pay" in step.decision for step in steep)


def test_a_drafter_that_is_too_sure_of_itself_is_corrected() -> None:
    slope = LatencyCurve((1, 64), (10.0, 136.0), 0)
    steps, output, text, _ = run(slope, right=0, kind=Sure, tokens=60)
    assert output == text
    assert len(steps[0].parents) == 7 and len(steps[-3].parents) == 1
    calibration = Calibration()
    proposal = Proposal(
        torch.tensor([1, 2, 3, 4]),
        TreeShape([-1, 0, 1, 0]),
        draft_probs=torch.tensor([1, 0.8, 0.8, 0.1]),
    )
    for _ in range(200):
        calibration.observe(proposal, (0, 3))
    root, first, second, other = calibration.path_probabilities(proposal).tolist()
    assert root == 1.0 and first < 0.2 and second < 0.1 * first + 0.02 and other > 0.4


def test_what_rows_cost_is_learnt_from_the_run_itself() -> None:
    curve = LatencyCurve((1, 64), (10.0, 10.0 + 63 * 3.0), 0)
    as_said, output, text, _ = run(curve, right=6, kind=Sure)
    assert output == text and all(len(step.parents) == 7 for step in as_said[20:-2])
    # Every token is accepted, but a row takes longer than a plain step.
    dearer, output, text, _ = run(
        curve, right=6, kind=Sure, machine=LatencyCurve((1, 64), (10.0, 10.0 + 63 * 20.0), 0)
    )
    assert output == text and len(dearer[0].parents) > 4
    assert all(len(step.parents) == 1 for step in dearer[-12:])
    # Twice as slow altogether: what is worth a plain step stays so.
    slower, output, text, _ = run(
        curve, right=6, kind=Sure, machine=LatencyCurve((1, 64), (20.0, 20.0 + 63 * 6.0), 0)
    )
    assert output == text and all(len(step.parents) == 7 for step in slower[20:-2])


class Dry(Oracle):
    """Looks for a draft at every step, and finds none after a few."""

    draft_ms, num_found = 5.0, 0

    def propose(self, max_depth: int) -> Proposal:
        proposal = super().propose(max_depth)
        return proposal if self.num_proposed <= self.num_found else proposal.keep([0])


class FoundAtFirst(Dry):
    num_found = 6


class CheapAndDry(Dry):
    draft_ms = 0.05


class SureAtFirst(FoundAtFirst):
    """It says how likely its tokens are."""

    def propose(self, max_depth: int) -> Proposal:
        proposal = super().propose(max_depth)
        return replace(proposal, draft_probs=torch.ones(len(proposal.tokens)))


@pytest.mark.parametrize("kind", [Dry, FoundAtFirst, SureAtFirst])
def test_a_drafter_that_finds_nothing_is_asked_less_and_less(kind: type[Oracle]) -> None:
    """To look takes half as long as a step, so it may not be done at every step."""
    steps, output, expected, oracle = run(FLAT, right=6, kind=kind, tokens=240)
    assert output == expected
    assert oracle.num_proposed < len(steps) / 2
    later = [step for step in steps if step.index > 60]
    assert sum("nothing was drafted" in step.decision for step in later) < len(later) / 5
    assert {step.bypass for step in steps if not step.num_drafted} == {"no_match", "not_worth_it"}


def test_a_drafter_that_finds_nothing_at_no_cost_is_always_asked() -> None:
    steps, _, _, oracle = run(FLAT, right=6, kind=CheapAndDry)
    assert oracle.num_proposed == len(steps)


class WithWindow(Oracle):
    """Has 60 rows more in every verify forward, which are no candidates."""

    def propose(self, max_depth: int) -> Proposal:
        proposal = super().propose(max_depth)
        n, m = len(proposal.shape), 60
        visible = torch.cat([torch.zeros(m, n), torch.eye(m)], dim=1).bool()
        visible[:, 0] = True
        extra = ExtraRows(torch.full((m,), 7), torch.ones(m, dtype=torch.int64), visible)
        return replace(proposal, extra=extra if max_depth else None)


def test_rows_that_are_no_candidates_are_paid_for_too() -> None:
    """Seven tokens at 76 ms are slower than one at 10 ms; without the window they would not be."""
    curve = LatencyCurve((1, 64), (10.0, 73.0))
    without, *_ = run(curve, right=6)
    assert all(step.num_drafted for step in without[10:-2])
    steps, output, expected, oracle = run(curve, right=6, kind=WithWindow, tokens=240)
    assert output == expected
    assert oracle.num_proposed < len(steps) / 2
    assert all(step.num_extra_rows == 0 for step in steps if step.bypass == "not_worth_it")


def test_every_text_goes_by_the_curve_as_it_is_then() -> None:
    """A drafter outlives its text, and the machine may be another one by then."""
    target, curves = tiny_target(eos_token_id=None), [STEEP]
    text = plain_greedy(target, PROMPT, 140)
    oracle = Oracle(target, text, right=6, tree=ChoiceTree.chain(6))
    drafter = AdaptiveDrafter(oracle, target, lambda: curves[-1])
    limits, num_drafted = Limits(max_new_tokens=60, ignore_eos=True), list[int]()
    for curve in (STEEP, FLAT, STEEP):
        curves.append(curve)
        *records, _ = decode(target, drafter, PROMPT, limits=limits)
        steps = [record for record in records if isinstance(record, Step)]
        num_drafted.append(max(step.num_drafted for step in steps[5:-3]))
    assert num_drafted[1] == 6 and max(num_drafted[0], num_drafted[2]) < 6
