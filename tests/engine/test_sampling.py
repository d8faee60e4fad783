"""Probabilities equal transformers' warpers, and sampled texts follow the target's law."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.config import Sampling
from engine.drafters.draft_target import DraftTargetConfig
from engine.model.target import Target
from engine.sampling import NUCLEUS_CANDIDATES, inverse_cdf, probabilities
from tests.engine.drafters.judges import write
from tests.engine.scripted import ALPHA
from tests.models import build_context, tiny_target

STATES = 6
SETTINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=2.5, top_k=7, top_p=0.35),
    Sampling(temperature=0.01, top_k=1_000_000, top_p=0.999),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.4, top_k=9, top_p=0.9, min_p=0.05),
    Sampling(temperature=3.0, min_p=1.0),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_probabilities_equal_transformers_warpers(sampling: Sampling) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    no_ids = torch.LongTensor()
    scores = TemperatureLogitsWarper(sampling.temperature)(no_ids, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(no_ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(no_ids, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(no_ids, scores)
    torch.testing.assert_close(probabilities(logits, sampling), scores.softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-7])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    probs = probabilities(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=temperature))
    assert probs.tolist() == [0.0, 1.0, 0.0]


def test_inverse_cdf_of_a_large_vocabulary_equals_the_plain_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(5003, generator=generator).mul(4).softmax(-1)
    probs[torch.rand(5003, generator=generator) < 0.5] = 0.0
    probs[:700] = 0.0  # whole blocks are empty
    ends = probs.double().cumsum(-1)
    for uniform in torch.rand(500, generator=generator, dtype=torch.float64):
        drawn = int(inverse_cdf(probs, uniform))
        at = float(uniform * ends[-1])
        assert probs[drawn] > 0
        assert float(ends[drawn] - probs[drawn].double()) - 1e-12 <= at < float(ends[drawn]) + 1e-12
    for uniform in (0.0, math.nextafter(1, 0)):
        assert probs[int(inverse_cdf(probs, torch.tensor(uniform, dtype=torch.float64)))] > 0


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_nucleus_of_a_large_vocabulary_equals_transformers(spread: float) -> None:
    """A flat distribution's nucleus has more tokens than are looked at first."""
    logits = (
        torch.randn(4, 5 * NUCLEUS_CANDIDATES, generator=torch.Generator().manual_seed(0)) * spread
    )
    probs = probabilities(logits, Sampling(temperature=1.0, top_p=0.9))
    expected = TopPLogitsWarper(0.9)(None, logits).softmax(-1)
    assert ((probs[0] > 0).sum() > NUCLEUS_CANDIDATES) == (spread < 1)
    # Where a sum over thousands meets the bound, rounding decides about the last token or two.
    assert ((probs > 0) != (expected > 0)).sum(-1).max() <= 2
    torch.testing.assert_close(probs, expected, atol=2e-4, rtol=1e-3)


# ---- texts under filters, which `test_every_method` leaves out


@functools.cache
def markov_target() -> Target:
    """A target whose law depends on the last token alone: its attention adds nothing."""
    target = tiny_target(
        "llama",
        vocab_size=STATES,
        num_hidden_layers=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        target.model.model.layers[0].self_attn.o_proj.weight.zero_()
        target.lm_head.get_parameter("weight").mul_(0.35)
    return target


@functools.cache
def transitions(sampling: Sampling) -> torch.Tensor:
    """`(STATES, STATES)`: row a is the law after token a."""
    with torch.inference_mode():
        rows = [markov_target().model(torch.tensor([[a]])).logits[0, -1] for a in range(STATES)]
    return probabilities(torch.stack(rows), sampling)


def draft_model(**settings: object) -> Any:
    """A model that errs now and then: the target with noise."""
    alike = tiny_target("llama", vocab_size=STATES, num_hidden_layers=1, eos_token_id=None)
    generator = torch.Generator().manual_seed(0)
    alike.model.load_state_dict(markov_target().model.state_dict())
    with torch.no_grad():
        weight = alike.lm_head.get_parameter("weight")
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    config = DraftTargetConfig.parse({"speculative_model": "alike", "max_draft_len": 2, **settings})
    return config.build(build_context(markov_target(), alike=alike))


NUCLEUS = Sampling(temperature=1.2, top_k=4, top_p=0.9)


@pytest.mark.parametrize(
    ("sampling", "settings", "seeds", "tokens"),
    [
        (NUCLEUS, {}, 3, 250),
        (NUCLEUS, {"confidence_threshold": 0.5}, 3, 250),
        pytest.param(NUCLEUS, {"use_draft_probs": False}, 3, 250, marks=pytest.mark.slow),
        pytest.param(NUCLEUS.replace(min_p=0.3), {}, 3, 250, marks=pytest.mark.slow),
        pytest.param(NUCLEUS, {}, 2500, 3, marks=pytest.mark.slow),  # every seed is its own draw
    ],
)
def test_every_token_pair_of_sampled_texts_follows_the_law(
    sampling: Sampling, settings: dict[str, Any], seeds: int, tokens: int
) -> None:
    target, drafter = markov_target(), draft_model(**settings)
    law, seen, accepted = transitions(sampling), torch.zeros(STATES, STATES), 0
    for seed in range(seeds):
        seeded = sampling.replace(seed=seed)
        text = write(target, drafter, [0, 1, 2, 0], sampling=seeded, tokens=tokens)
        for a, b in pairwise([0, *text.output]):
            seen[a, b] += 1
        accepted += text.num_accepted
    assert accepted > 0
    possible = law > 0
    assert not seen[~possible].any()
    expected = law * seen.sum(dim=1, keepdim=True)
    statistic = ((seen - expected) ** 2)[possible] / expected[possible]
    freedom = int((possible.sum(dim=1) - 1).sum())
    assert float(chi2.sf(float(statistic.sum()), freedom)) > ALPHA
