"""What acceptance reads of a verify forward, and the greedy path, on random trees."""

from __future__ import annotations

import random

import pytest
import torch

from engine.accept import Acceptance, Lossless, VerifiedTree, greedy
from engine.config import Sampling
from engine.proposal import Proposal, TargetOutput
from engine.sampling import SeededDraws
from engine.tree import TreeShape
from tests.engine.scripted import random_parents

VOCAB = 40
RULE, DRAWS = Lossless(Sampling()), SeededDraws(0)


def verified_at_random(seed: int) -> tuple[Proposal, TargetOutput]:
    """A tree whose siblings differ and often carry what the target says."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = TreeShape(random_parents(rng, rng.randint(1, 24)))
    extra = rng.choice([0, 3])
    logits = 3 * torch.randn(len(shape) + extra, VOCAB, generator=generator)
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
    right = [node for node in range(len(shape)) if agrees(node, shape, tokens, best)]
    deepest = max(right, key=lambda node: int(shape.depths[node]))
    accepted = greedy(VerifiedTree.of(proposal, output, RULE, DRAWS))
    assert accepted == Acceptance(shape.path_to(deepest), best[deepest])


def agrees(node: int, shape: TreeShape, tokens: list[int], best: list[int]) -> bool:
    """Whether every token down to a node is the target's choice."""
    return all(tokens[i] == best[shape.parents[i]] for i in shape.path_to(node))


@pytest.mark.parametrize("known", [(), ("logsumexp",), ("logsumexp", "best")])
@pytest.mark.parametrize("seed", range(5))
def test_what_a_device_hands_over_at_once_is_what_the_host_computes(
    seed: int, known: tuple[str, ...]
) -> None:
    proposal, output = verified_at_random(seed)
    n = len(proposal.shape)
    by_hand = output.logits.softmax(dim=-1)
    if "logsumexp" in known:
        output = TargetOutput(output.logits, logsumexp=output.logits.logsumexp(dim=-1))
    if "best" in known:
        best = output.logits.argmax(dim=-1)
        output = TargetOutput(output.logits, logsumexp=output.logsumexp, best=best)
    host = VerifiedTree.of(proposal, output, RULE, DRAWS)
    at_once = VerifiedTree._from_device(proposal, output, ())
    assert at_once.tokens == host.tokens == proposal.tokens.tolist()
    assert [at_once.argmax(i) for i in range(n)] == [host.argmax(i) for i in range(n)]
    probs = [float(by_hand[p, host.tokens[i]]) for i, p in enumerate(proposal.shape.parents) if i]
    assert host.token_probs() == pytest.approx([1.0, *probs])
    assert at_once.token_probs() == pytest.approx([1.0, *probs])
