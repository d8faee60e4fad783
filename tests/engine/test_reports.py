"""What users of other engines reported of speculative decoding, each tried here."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters import parse_method
from engine.drafters.base import root_only
from engine.proposal import Budget, Proposal
from engine.steps import End
from tests.engine.scripted import ScriptedDrafter
from tests.engine.test_prefixes import METHODS, TOKENS, case_of, turn
from tests.engine.test_sampling import ALPHA, STATES, draft_model, markov_target, transitions
from tests.engine.test_verify_tree import SHAPES
from tests.models import VOCAB, build_context, plain_greedy, tiny_target

OPEN, CLOSE = 17, 18
"""Markers around a tool call."""


@pytest.mark.parametrize("settings", [
    {"decoding_type": "NGram", "max_matching_ngram_size": 4},
    {"decoding_type": "NGram", "lookup": "transformers"},
    {"decoding_type": "Suffix"},
], ids=lambda s: "-".join(map(str, s.values())))  # fmt: skip
def test_lookup_among_repeated_tool_call_markers_changes_no_token(settings: dict[str, Any]) -> None:
    """Every call begins and ends alike, so that each marker has many continuations."""
    target = tiny_target("llama", eos_token_id=None)
    calls = [[OPEN, 40, name, 41, OPEN, OPEN, CLOSE, CLOSE] for name in (3, 4, 5, 3, 6)]
    prompt = [*sum(calls, []), OPEN, 40]
    drafter = parse_method({**settings, "drafting": "as set"}).build(build_context(target))
    answer = turn(target, drafter, prompt, cached=False)
    assert answer.output == plain_greedy(target, prompt, TOKENS)
    assert any(len(step.tokens) > 1 for step in answer.steps)


@pytest.mark.parametrize(
    "name", [n for n in METHODS if n not in ("Autoregressive", "User_Provided")]
)
def test_the_same_prompt_again_is_drafted_for_again(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    drafter = case.method.replace(drafting="as set").build(
        build_context(case.target, small=case.small)
    )
    first, second = (
        turn(case.target, drafter, [3, 4, 5, 3, 4, 5, 3, 4], cached=True) for _ in "12"
    )
    assert second.prefill.num_cached > 0 and first.output == second.output
    drafted = [sum(len(step.tokens) - 1 for step in each.steps) for each in (first, second)]
    assert min(drafted) > 0


class OccasionalDrafter(ScriptedDrafter):
    """Drafts at every third step only."""

    calls = 0

    def propose(self, budget: Budget) -> Proposal:
        self.calls += 1
        if self.calls % 3:
            return root_only(self.root, torch.device("cpu"))
        return super().propose(budget)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "jamba", "granitemoehybrid"])
def test_steps_without_a_draft_keep_a_recurrent_target_s_state(family: str) -> None:
    target = tiny_target(family, eos_token_id=None)
    prompt = [7, 8, 9, 10, 7, 8, 9]
    expected = plain_greedy(target, prompt, TOKENS)
    for truth in (0.0, 0.6, 1.0):
        drafter = OccasionalDrafter(expected, vocab=VOCAB, shape=SHAPES["any"], truth=truth)
        answer = turn(target, drafter, prompt, cached=False)
        assert answer.output == expected
        assert {len(step.tokens) > 1 for step in answer.steps} == {True, False}


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "mistral"])
def test_a_sliding_window_reuses_a_prefix_that_is_longer_than_it(family: str) -> None:
    target = tiny_target(family, eos_token_id=None, sliding_window=8)
    prefix = [3 + n % 11 for n in range(30)]
    for cached, prompt in ((0, [*prefix, 1, 2]), (30, [*prefix, 5, 6, 7]), (22, [*prefix[:22], 9])):
        output = plain_greedy(target, prompt, TOKENS + 8)
        drafter = ScriptedDrafter(output, vocab=VOCAB, shape=SHAPES["any"], truth=0.8)
        answer = turn(target, drafter, prompt, cached=True)
        assert answer.output == output[:TOKENS]
        assert answer.prefill.num_cached == cached


@pytest.mark.slow
def test_drawn_drafts_under_top_k_follow_the_law_over_five_thousand_seeds() -> None:
    """Three tokens of 5,000 texts against the joint law, draft tokens drawn under top-k too."""
    sampling, target, drafter = Sampling(temperature=1.0, top_k=4), markov_target(), draft_model()
    law = transitions(target, sampling)
    joint = torch.zeros(STATES**3)
    for n, (a, b, c) in enumerate(product(range(STATES), repeat=3)):
        joint[n] = law[0, a] * law[a, b] * law[b, c]
    seen = torch.zeros(STATES**3)
    for seed in range(5000):
        *_, end = decode(
            target,
            drafter,
            [0, 1, 2, 0],
            sampling=sampling.replace(seed=seed),
            limits=Limits(max_new_tokens=3, ignore_eos=True),
        )
        assert isinstance(end, End)
        a, b, c = end.output_ids
        seen[(a * STATES + b) * STATES + c] += 1
    assert not seen[joint == 0].any()
    expected = (joint * seen.sum())[joint > 0]
    statistic = float(((seen[joint > 0] - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, len(expected) - 1) > ALPHA
