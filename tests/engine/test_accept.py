"""Acceptance: the greedy path on random trees, and rules of sampling that keep the target's law.

The chi-square tests are seeded, so they always give the same answer. With another seed a correct
verifier would fail one of them with probability `ALPHA`; one that forgets its rejections fails them
by far.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from engine.accept import (
    Acceptance,
    Lossless,
    Relaxed,
    Rule,
    ThinkingPhase,
    Typical,
    VerifiedTree,
    greedy,
)
from engine.config import Sampling
from engine.errors import TargetError
from engine.proposal import DraftDists, Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.tree import TreeShape
from tests.engine.scripted import (
    ALPHA,
    TREES,
    Parents,
    chi_square,
    draw_tree,
    first_two_tokens,
    law_of_two,
    random_logits,
    random_parents,
)

FAR = 1e-6
RUNS = 2000
VOCAB = 5
SAMPLINGS = [Sampling(temperature=1.0), Sampling(temperature=1.3, top_k=3)]
RULE, DRAWS = Lossless(Sampling()), SeededDraws(0)


def verified_at_random(seed: int) -> tuple[Proposal, TargetOutput]:
    """A tree whose siblings differ and often carry what the target says."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = TreeShape(random_parents(rng, rng.randint(1, 24)))
    extra = rng.choice([0, 3])
    logits = 3 * torch.randn(len(shape) + extra, 40, generator=generator)
    tokens = torch.zeros(len(shape), dtype=torch.int64)
    for node, children in enumerate(shape.children):
        likely = logits[node].argsort(descending=True).tolist()
        offered = rng.sample(likely[: max(2, len(children))], len(children))
        tokens[list(children)] = torch.tensor(offered, dtype=torch.int64)
    return Proposal(tokens, shape), TargetOutput(logits)


@pytest.mark.parametrize("seed", range(25))
def test_greedy_goes_on_while_a_child_carries_the_argmax(seed: int) -> None:
    proposal, output = verified_at_random(seed)
    best, shape, tokens = output.argmax(), proposal.shape, proposal.tokens.tolist()
    paths = [shape.path_to(node) for node in range(len(shape))]
    right = [path for path in paths if all(tokens[i] == best[shape.parents[i]] for i in path)]
    longest = max(right, key=len)
    accepted = greedy(VerifiedTree.of(proposal, output, RULE, DRAWS))
    assert accepted == Acceptance(longest, best[(0, *longest)[-1]])


@pytest.mark.parametrize("seed", range(5))
def test_what_a_device_hands_over_at_once_is_what_the_host_computes(seed: int) -> None:
    proposal, output = verified_at_random(seed)
    logits, nodes = output.logits, range(len(proposal.shape))
    sums, best = logits.logsumexp(dim=-1), logits.argmax(dim=-1)
    by_hand = logits.softmax(dim=-1)
    probs = [by_hand[p, proposal.tokens[i]] for i, p in enumerate(proposal.shape.parents) if i]
    known = TargetOutput(logits, logsumexp=sums), TargetOutput(logits, logsumexp=sums, best=best)
    for shown in (output, *known):
        for verified in (
            VerifiedTree.of(proposal, shown, RULE, DRAWS),
            VerifiedTree._from_device(proposal, shown, ()),
        ):
            assert verified.tokens == proposal.tokens.tolist()
            assert [verified.argmax(i) for i in nodes] == best[: len(nodes)].tolist()
            assert verified.token_probs() == pytest.approx([1.0, *map(float, probs)])


# ---- the target's law


def target_logits(path: tuple[int, ...]) -> torch.Tensor:
    return 1.5 * random_logits(path, VOCAB, seed=1)


def draft_law(path: tuple[int, ...]) -> torch.Tensor:
    return (2 * random_logits(path, VOCAB, seed=9000)).softmax(-1)


def p_value(parents: Parents, rule: Rule, sampling: Sampling, drafts: str) -> float:
    """Chi-square p-value of the first two tokens against the target's law of pairs."""
    tree, draws, seen = TreeShape(parents), SeededDraws(3), Counter[tuple[int, int]]()
    for _ in range(RUNS):
        likeliest = drafts == "deterministic"
        tokens, dists = draw_tree(tree, draft_law, 0, draws.generator, likeliest=likeliest)
        if dists is not None and drafts == "mixed":  # the root's children drawn, node 1's certain
            dists.row_of_parent.pop(1)
        proposal = Proposal(torch.tensor(tokens), tree, dists=dists)
        seen[first_two_tokens(proposal, target_logits, rule, sampling, draws)] += 1
    return chi_square(seen, law_of_two(target_logits, sampling, range(VOCAB), range(VOCAB)))


@pytest.mark.parametrize(
    ("parents", "drafts", "verification"),
    [
        *itertools.product(TREES.values(), ("deterministic", "sampled"), ("token",)),
        (TREES["tree"], "mixed", "token"),
        *(([-1, *range(length)], "sampled", "block") for length in (1, 2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "k"])
def test_a_verified_tree_keeps_the_targets_law(
    parents: Parents, drafts: str, verification: str, sampling: Sampling
) -> None:
    rule = Lossless(sampling.replace(verification=verification))
    assert p_value(parents, rule, sampling, drafts) > ALPHA


@pytest.mark.parametrize("drafts", ["deterministic", "sampled"])
@pytest.mark.parametrize("name", ["chain", "siblings"])
@pytest.mark.slow
def test_a_verifier_that_forgets_its_rejections_breaks_the_law(
    name: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above: after a rejection, the target itself goes on."""
    monkeypatch.setattr("engine.readout.normalize", lambda residual, fallback: fallback)
    rule = Lossless(SAMPLINGS[0].replace(verification="token"))
    assert p_value(TREES[name], rule, SAMPLINGS[0], drafts) < FAR


@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_verification_accepts_by_the_papers_formulas(length: int) -> None:
    """Exactly, over all drafts: the law of the whole block, and the longer mean of accepted tokens.

    Every drafted text X of `length` tokens has probability q(X); the prefix that stays is i with
    probability h(i) · Π (1 - h(j)), j > i; then one token of the residual, and the rest of the
    block of the target. Summed over all, the block's law is the target's.
    """
    law: dict[tuple[int, ...], float] = {}
    block_mean = token_mean = 0.0
    few, rule = range(3), Lossless(SAMPLINGS[0])

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
        for kept, accepts, rest in prefixes(verified, rule, length):
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_no_rule_chooses_among_logits_that_are_not_finite(value: float, sampling: Sampling) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 1], logits[1, 3] = 1.0, value
    dists = DraftDists(torch.full((1, 5), 0.2), {0: 0})
    typical, relaxed = (
        Typical(1.0, 0.09, 0.3),
        Relaxed(Lossless(sampling), 1, 0.0, ThinkingPhase(0, 1)),
    )
    relaxed.read([0])
    rules: list[tuple[Rule, DraftDists | None]] = [
        *((Lossless(sampling), one) for one in (None, dists)),
        *((typical, None), (relaxed, None)),
    ]
    for rule, drawn in rules:
        verified = VerifiedTree([0, 1], TreeShape.chain(1), logits, drawn)
        with pytest.raises(TargetError, match="not finite"):
            for seed in range(20):  # where the draft is not accepted, nothing is wrong yet
                rule(verified, SeededDraws(seed))


def test_a_node_whose_sampled_children_were_left_out_is_one_without_children() -> None:
    """The controller verifies a part of a tree; a distribution of what it cut stays behind."""
    probs = torch.tensor([[0.25, 0.25, 0.5]])
    proposal = Proposal(torch.tensor([0, 1]), TreeShape.chain(1), dists=DraftDists(probs, {0: 0}))
    root = proposal.keep([0])
    assert root.dists is not None and 0 in root.dists.row_of_parent
    verified = VerifiedTree([0], root.shape, torch.zeros(1, 3), root.dists)
    rule = Lossless(Sampling(temperature=1.0, verification="token"))
    drawn = Counter(rule(verified, SeededDraws(seed)).next_token for seed in range(300))
    assert set(drawn) == {0, 1, 2} and min(drawn.values()) > 60
