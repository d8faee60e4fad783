"""Sampling: probabilities equal transformers' warpers, and verification keeps the target's law.

The chi-square tests are seeded, so they always give the same answer. With another seed a correct
verifier would fail one of them with probability `ALPHA`; the power checks show that wrong verifiers
fail them by far.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chi2, chisquare
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.accept import Acceptance, Lossless, Relaxed, Rule, Typical, VerifiedTree, greedy
from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import TargetError
from engine.model.target import Target
from engine.proposal import DraftDists
from engine.sampling import NUCLEUS_CANDIDATES, SeededDraws, inverse_cdf, probabilities
from engine.steps import End, Step
from engine.tree import TreeShape
from tests.engine.scripted import Parents, SamplingDrafter, draw_tree
from tests.models import build_context, tiny_target

ALPHA = 1e-4
FAR = 1e-6
RUNS = 2000
VOCAB = 5
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
TREES: dict[str, Parents] = {
    "chain": [-1, 0, 1],
    "siblings": [-1, 0, 0, 0],
    "tree": [-1, 0, 0, 1, 1, 2],
    "every-token": [-1, 0, 0, 0, 0, 0, 1, 1],
}


# ---- probabilities


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


def test_inverse_cdf_never_picks_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform, index in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.5, 3), (math.nextafter(1, 0), 3)):
        drawn = inverse_cdf(probs, torch.tensor(uniform, dtype=torch.float64))
        assert int(drawn) == index


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


def test_logits_that_are_not_finite_are_named() -> None:
    with pytest.raises(TargetError, match="not finite"):
        SeededDraws(0).pick(torch.tensor([0.5, float("nan")]))


# ---- rules on scripted logits


@functools.cache
def target_logits(path: tuple[int, ...]) -> torch.Tensor:
    seed = 1 + sum((token + 1) * (VOCAB + 1) ** i for i, token in enumerate(path))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


@functools.cache
def draft_law(path: tuple[int, ...]) -> torch.Tensor:
    seed = 9000 + sum((token + 1) * (VOCAB + 1) ** i for i, token in enumerate(path))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)


def two_tokens(
    tree: TreeShape, rule: Rule, draws: SeededDraws, sampling: Sampling, drafts: str
) -> tuple[int, int]:
    """The first two tokens of a text that begins with one verified step."""
    likeliest = drafts == "deterministic"
    tokens, dists = draw_tree(tree, draft_law, 0, draws.generator, likeliest=likeliest)
    if dists is not None and drafts == "mixed":  # the root's children drawn, node 1's certain
        dists.row_of_parent.pop(1)
    paths = [tuple(tokens[i] for i in (0, *tree.path_to(n))) for n in range(len(tree))]
    logits = torch.stack([target_logits(path) for path in paths])
    accepted = rule(VerifiedTree(tokens, tree, logits, dists), draws)
    text = [*(tokens[node] for node in accepted.path), accepted.next_token]
    if len(text) == 1:
        text.append(draws.pick(probabilities(target_logits((0, text[0])), sampling)))
    return text[0], text[1]


def p_value(tree: TreeShape, rule: Rule, sampling: Sampling, drafts: str) -> float:
    """Chi-square p-value of the first two tokens against the target's law of pairs."""
    draws = SeededDraws(3)
    seen = Counter(two_tokens(tree, rule, draws, sampling, drafts) for _ in range(RUNS))
    first = probabilities(target_logits((0,)), sampling)
    observed, expected = [0.0], [0.0]
    for a in range(VOCAB):
        second = probabilities(target_logits((0, a)), sampling)
        for b in range(VOCAB):
            mass = float(first[a] * second[b])
            if mass == 0.0:
                assert seen[a, b] == 0
                continue
            if expected[-1] >= 5:
                observed.append(0.0)
                expected.append(0.0)
            observed[-1] += seen[a, b]
            expected[-1] += mass * RUNS
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [*itertools.product(TREES, ("deterministic", "sampled")), ("tree", "mixed")],
)
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), SETTINGS[1]], ids=["plain", "k"])
def test_a_verified_tree_keeps_the_targets_law(name: str, drafts: str, sampling: Sampling) -> None:
    rule = Lossless(sampling.replace(verification="token"))
    assert p_value(TreeShape(TREES[name]), rule, sampling, drafts) > ALPHA


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), SETTINGS[1]], ids=["plain", "k"])
def test_a_chain_verified_as_a_block_keeps_the_targets_law(sampling: Sampling) -> None:
    rule = Lossless(sampling)
    for length in (1, 2, 3):
        chain = TreeShape.chain(length)
        assert p_value(chain, rule, sampling, "sampled") > ALPHA


@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_verification_accepts_by_the_papers_formulas(length: int) -> None:
    """Exactly, over all drafts: the law of the whole block, and the longer mean of accepted tokens.

    Every drafted text X of `length` tokens has probability q(X); the prefix that stays is i with
    probability h(i) · Π (1 - h(j)), j > i; then one token of the residual, and the rest of the
    block of the target. Summed over all, the block's law is the target's.
    """
    law: dict[tuple[int, ...], float] = {}
    block_mean = token_mean = 0.0
    sampling = Sampling(temperature=1.0)
    few = range(3)

    def target(path: tuple[int, ...]) -> torch.Tensor:
        return target_logits((0, *path))[:3].double().softmax(-1)

    def draft(path: tuple[int, ...]) -> torch.Tensor:
        law_of = draft_law((0, *path))[:3].double()
        return law_of / law_of.sum()

    def spread(path: tuple[int, ...], mass: float) -> None:
        if len(path) == length + 1:
            law[path] = law.get(path, 0.0) + mass
            return
        for token, chance in enumerate(target(path).tolist()):
            spread((*path, token), mass * chance)

    for drafted in itertools.product(few, repeat=length):
        paths = [drafted[:i] for i in range(length + 1)]
        probs = torch.stack([draft(path) for path in paths[:-1]])
        mass = math.prod(float(probs[i, token]) for i, token in enumerate(drafted))
        logits = torch.stack([target(path).log() for path in paths])
        dists = DraftDists(probs, {i: i for i in range(length)})
        verified = VerifiedTree([0, *drafted], TreeShape.chain(length), logits, dists)
        ratios = [
            min(1.0, float(target(path)[token] / draft(path)[token]))
            for path, token in zip(paths, drafted, strict=False)
        ]
        token_mean += mass * sum(itertools.accumulate(ratios, operator.mul))
        left = mass
        for kept, accepts, rest in prefixes(verified, Lossless(sampling), length):
            here = left * accepts
            left -= here
            block_mean += here * kept
            for token, chance in enumerate(rest.tolist()):
                spread((*drafted[:kept], token), here * chance)
    for path in itertools.product(few, repeat=length + 1):
        own = math.prod(float(target(path[:i])[token]) for i, token in enumerate(path))
        assert law[path] == pytest.approx(own, abs=1e-5)
    assert block_mean >= token_mean - 1e-9
    assert (block_mean > token_mean + 1e-4) == (length > 1)


def prefixes(
    verified: VerifiedTree, rule: Lossless, length: int
) -> Iterator[tuple[int, float, torch.Tensor]]:
    """Longest first: a prefix, how likely it stays if no longer one does, what follows it.

    By bisection on the rule's own uniform numbers, so that what is tested is the code.
    """
    for kept in range(length, -1, -1):
        low, high = (0.0, 1.0) if kept else (1.0, 1.0)
        while high - low > 1e-15:
            middle = (low + high) / 2
            stays = len(rule(verified, Scripted(kept, middle)).path) >= kept
            low, high = (middle, high) if stays else (low, middle)
        draws = Scripted(kept, 0.0)
        rule(verified, draws)
        yield kept, low, draws.law


class Scripted(SeededDraws):
    """The n-th uniform number is given, those after it accept nothing, those before it neither."""

    def __init__(self, number: int, value: float) -> None:
        self.number, self.value, self.count = number, value, 0
        self.law = torch.zeros(3)

    def uniform(self) -> float:
        self.count += 1
        return self.value if self.count == self.number else 1.0

    def pick(self, probs: torch.Tensor) -> int:
        self.law = probs
        return 0


def test_block_and_token_verification_are_chosen_by_a_setting() -> None:
    chain, dists = TreeShape.chain(1), DraftDists(torch.full((1, 3), 1 / 3), {0: 0})
    assert Lossless(Sampling(temperature=1.0))._as_block(chain, dists)
    assert not Lossless(Sampling(temperature=1.0, verification="token"))._as_block(chain, dists)
    assert "verification" not in Sampling().model_dump()
    assert Sampling(temperature=0.5).model_dump()["verification"] == "block"


@dataclass(frozen=True)
class NoResidual:
    """Accepts as it should, but after a rejection draws from the target itself."""

    sampling: Sampling

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        at, path = 0, list[int]()
        while True:
            probs = probabilities(verified.logits[at], self.sampling)
            children = verified.shape.children[at]
            for child in children:
                token, chance = verified.tokens[child], 1.0
                if verified.dists is not None:
                    chance = float(verified.dists.probs[verified.dists.row_of_parent[at], token])
                if draws.uniform() * chance < float(probs[token]):
                    break
            else:
                return Acceptance(tuple(path), draws.pick(probs))
            at = child
            path.append(at)


@pytest.mark.slow
def test_power_wrong_verifiers_fail_the_same_test() -> None:
    plain = Sampling(temperature=1.0)
    for name in ("chain", "siblings"):
        for drafts in ("deterministic", "sampled"):
            wrong = p_value(TreeShape(TREES[name]), NoResidual(plain), plain, drafts)
            assert wrong < FAR


@dataclass(frozen=True)
class Replacing:
    """Takes siblings for independent draws: a rejected one stays in their distribution."""

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        dists = verified.dists
        assert dists is not None
        target, draft = verified.logits[0].softmax(-1), dists.probs[0]
        for child in verified.shape.children[0]:
            token = verified.tokens[child]
            if draws.uniform() * float(draft[token]) < float(target[token]):
                return Acceptance((child,), 0)
            target = (target - draft).clamp_min(0)
            target = target / target.sum()
        return Acceptance((), draws.pick(target))


@pytest.mark.parametrize(
    ("rule", "lawful"), [(Lossless(Sampling(temperature=1.0)), True), (Replacing(), False)]
)
def test_siblings_are_verified_as_drawn_without_replacement(rule: Rule, lawful: bool) -> None:
    """Target (0, .6, .4), draft (.6, .2, .2): after 0 is rejected, 1 and 2 come up equally often
    as the second draft, but must be taken 2 : 1."""
    target, draft = torch.tensor([1e-9, 0.6, 0.4]), torch.tensor([0.6, 0.2, 0.2])
    star, draws = TreeShape([-1, 0, 0]), SeededDraws(5)
    seen = [0, 0, 0]
    for _ in range(RUNS):
        tokens, dists = draw_tree(star, lambda path: draft, 0, draws.generator)
        accepted = rule(VerifiedTree(tokens, star, target.log().expand(3, 3), dists), draws)
        seen[tokens[accepted.path[0]] if accepted.path else accepted.next_token] += 1
    assert seen[0] == 0
    found = float(chisquare(seen[1:], [0.6 * RUNS, 0.4 * RUNS]).pvalue)
    assert found > ALPHA if lawful else found < FAR


def test_greedy_follows_the_worked_example() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 7] = logits[2, 9] = 1.0
    assert greedy(VerifiedTree([1, 5, 7, 3], TreeShape([-1, 0, 0, 2]), logits)) == Acceptance(
        (2,), 9
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_no_rule_chooses_among_logits_that_are_not_finite(value: float, sampling: Sampling) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 1], logits[1, 3] = 1.0, value
    dists = DraftDists(torch.full((1, 5), 0.2), {0: 0})
    typical, relaxed = Typical(1.0, 0.09, 0.3), Relaxed(Lossless(sampling), 1, 0.0, lambda: True)
    rules: list[tuple[Rule, DraftDists | None]] = [
        *((Lossless(sampling), one) for one in (None, dists)),
        *((typical, None), (relaxed, None)),
    ]
    for rule, drawn in rules:
        verified = VerifiedTree([0, 1], TreeShape.chain(1), logits, drawn)
        with pytest.raises(TargetError, match="not finite"):
            for seed in range(20):  # where the draft is not accepted, nothing is wrong yet
                rule(verified, SeededDraws(seed))


def test_tokens_that_are_ruled_out_rule_out_nothing_else() -> None:
    logits = torch.tensor([[-math.inf, 1.0, 0.0]])
    verified = VerifiedTree([0], TreeShape.chain(0), logits)
    assert greedy(verified).next_token == 1
    with pytest.raises(TargetError, match="not finite"):
        greedy(VerifiedTree([0], TreeShape.chain(0), torch.full((1, 3), -math.inf)))


# ---- through the decode loop


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
def transitions(target: Target, sampling: Sampling) -> torch.Tensor:
    """`(STATES, STATES)`: row a is the law after token a."""
    with torch.inference_mode():
        rows = [target.model(torch.tensor([[a]])).logits[0, -1] for a in range(STATES)]
    return probabilities(torch.stack(rows), sampling)


def loop_p_value(
    drafter: Drafter, sampling: Sampling, *, seeds: int = 3, tokens: int = 250
) -> float:
    """Chi-square p-value of every token pair of sampled texts against the target's law."""
    target = markov_target()
    law = transitions(target, sampling)
    seen, accepted = torch.zeros(STATES, STATES), 0
    for seed in range(seeds):
        *records, end = decode(
            target,
            drafter,
            [0, 1, 2, 0],
            sampling=sampling.replace(seed=seed),
            limits=Limits(max_new_tokens=tokens, ignore_eos=True),
        )
        assert isinstance(end, End)
        text = [0, *end.output_ids]
        for a, b in zip(text, text[1:], strict=False):
            seen[a, b] += 1
        accepted += sum(r.num_accepted for r in records if isinstance(r, Step))
    assert accepted > 0
    expected = law * seen.sum(dim=1, keepdim=True)
    assert not seen[law == 0].any()
    possible = law > 0
    statistic = ((seen - expected) ** 2)[possible] / expected[possible]
    freedom = int((possible.sum(dim=1) - 1).sum())
    return float(chi2.sf(float(statistic.sum()), freedom))


def draft_model(**settings: object) -> Drafter:
    """A model that errs now and then: the target with noise."""
    alike = tiny_target("llama", vocab_size=STATES, num_hidden_layers=1, eos_token_id=None)
    generator = torch.Generator().manual_seed(0)
    alike.model.load_state_dict(markov_target().model.state_dict())
    with torch.no_grad():
        weight = alike.lm_head.get_parameter("weight")
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    config = DraftTargetConfig.parse({"speculative_model": "alike", "max_draft_len": 2, **settings})
    return config.build(build_context(markov_target(), alike=alike))


@functools.cache
def free_law(path: tuple[int, ...]) -> torch.Tensor:
    seed = sum((token + 1) * 13**i for i, token in enumerate(path))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(STATES, generator=generator).softmax(-1)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft-model": draft_model,
    "draft-model-likeliest": lambda: draft_model(use_draft_probs=False),
    "draft-model-early-stop": lambda: draft_model(confidence_threshold=0.5),
    "ngram": lambda: NGramConfig(max_matching_ngram_size=1).build(build_context(markov_target())),
    "chain": lambda: SamplingDrafter(TREES["chain"], free_law),
    "tree": lambda: SamplingDrafter(TREES["tree"], free_law),
    "likeliest-tree": lambda: SamplingDrafter(TREES["tree"], free_law, likeliest=True),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_texts_follow_the_targets_law(name: str) -> None:
    assert loop_p_value(DRAFTERS[name](), Sampling(temperature=1.0)) > ALPHA


@pytest.mark.parametrize("name", ["draft-model", "tree"])
@pytest.mark.parametrize("cuts", [{"top_k": 4, "top_p": 0.9}, {"min_p": 0.3}], ids=str)
@pytest.mark.slow
def test_sampled_texts_follow_the_law_cut_by_its_filters(name: str, cuts: dict[str, Any]) -> None:
    assert loop_p_value(DRAFTERS[name](), Sampling(temperature=1.2, **cuts)) > ALPHA


@pytest.mark.slow
def test_the_first_tokens_of_five_thousand_texts_follow_the_law() -> None:
    """Every seed is a draw of its own, also where draft tokens are drawn under top-k."""
    sampling = Sampling(temperature=1.0, top_k=4)
    assert loop_p_value(draft_model(), sampling, seeds=5000, tokens=3) > ALPHA
