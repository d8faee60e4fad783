"""Accepting on the device: the same paths as on the host, the target's law, one wait."""

from __future__ import annotations

import random

import pytest
import torch
from scipy.stats import chi2

from engine.accept import Lossless, Typical, Verified, greedy
from engine.config import Sampling
from engine.decode import _node_probs
from engine.errors import TargetError
from engine.kernels.cuda.settle import Settled, Settler
from engine.model.cache import TreeCache
from engine.proposal import Proposal, TargetOutput
from engine.sampling import SeededDraws, probabilities
from engine.tree import TreeShape
from tests.engine.scripted import draw_tree, random_parents

VOCAB = 9


def cache_of(rows: int, length: int, seed: int = 0) -> TreeCache:
    """A cache of two layers, `length` rows of it committed and `rows` of a forward behind them."""
    torch.manual_seed(seed)
    cache = TreeCache(2, capacity=length + rows)
    for part in (length, rows):
        for layer in range(2):
            cache.update(torch.randn(1, 2, part, 4), torch.randn(1, 2, part, 4), layer)
        cache.length = length
    return cache


def settle(
    sampling: Sampling, proposal: Proposal, logits: torch.Tensor, draws: SeededDraws
) -> Settled:
    return Settler(sampling)(proposal, logits, draws, cache_of(len(proposal.shape), 3))


@pytest.mark.parametrize("seed", range(25))
def test_greedy_paths_probabilities_and_rows_are_those_of_the_host(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = TreeShape(random_parents(rng, rng.randint(1, 24)))
    logits = 3 * torch.randn(len(shape), 40, generator=generator)
    tokens = torch.zeros(len(shape), dtype=torch.int64)
    for node, children in enumerate(shape.children):
        best = logits[node].topk(len(children) or 1).indices  # siblings differ, one is right
        order = torch.randperm(len(children), generator=generator)
        for i, child in zip(order.tolist(), children, strict=True):
            tokens[child] = best[i] if rng.random() < 0.8 else (best[i] if i else 39 - best[0])
    draft_probs = torch.rand(len(shape), generator=generator)
    proposal = Proposal(tokens, shape, draft_probs=draft_probs)
    expected = greedy(Verified(tokens.tolist(), shape, logits))
    host, device = cache_of(len(shape), 5), cache_of(len(shape), 5)
    found = Settler(Sampling())(proposal, logits, SeededDraws(0), device)
    assert found.accepted == expected
    assert found.tokens == tokens.tolist() and found.draft_probs == draft_probs.tolist()
    assert found.target_probs == pytest.approx(
        _node_probs(TargetOutput(logits), found.tokens, shape.parents)
    )
    rows = (0, *expected.path)
    host.commit(rows)
    device.advance(len(rows))
    assert host.length == device.length
    for mine, other in zip(device._buffers, host._buffers, strict=True):
        assert torch.equal(mine[:, :, : host.length], other[:, :, : host.length])


TREES = {
    "root": [-1],
    "chain": [-1, 0, 1, 2],
    "bushy": [-1, 0, 0, 0, 1, 1, 2, 4],
    "everything": [-1, *([0] * VOCAB)],
}
LAWS = [
    ("root", "likeliest"),
    ("chain", "drawn"),
    ("bushy", "drawn"),
    ("bushy", "likeliest"),
    ("bushy", "half"),
    ("everything", "drawn"),
]


@pytest.mark.parametrize(("tree", "kind"), LAWS)
@torch.inference_mode()
def test_sampled_output_follows_the_target(tree: str, kind: str) -> None:
    """The first two new tokens against the target's law, and what lies below the root beside it."""
    shape = TreeShape(TREES[tree])
    generator = torch.Generator().manual_seed(3)
    tables = 1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator)
    sampling = Sampling(temperature=0.8, top_p=0.95)

    def law(path: tuple[int, ...]) -> torch.Tensor:
        return tables[1, path[-1]].softmax(dim=-1)

    draws = SeededDraws(11)
    root, runs = 4, 1000
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(runs):
        tokens, dists = draw_tree(shape, law, root, generator, likeliest=kind == "likeliest")
        if dists is not None and kind == "half":  # the root's children drawn, others point masses
            dists.row_of_parent.pop(1, None)
        proposal = Proposal(torch.tensor(tokens), shape, dists=dists)
        found = settle(sampling, proposal, tables[0][torch.tensor(tokens)], draws)
        path = [tokens[node] for node in found.accepted.path] + [found.accepted.next_token]
        if len(path) == 1:
            follow = Lossless(sampling)(
                Verified(path, TreeShape([-1]), tables[0][torch.tensor(path)]), draws
            )
            path.append(follow.next_token)
        counts[path[0], path[1]] += 1
    first = probabilities(tables[0], sampling)
    expected = runs * first[root][:, None] * first
    assert counts[expected == 0].sum() == 0
    assert fit(counts.sum(dim=1), expected.sum(dim=1)) > 1e-3, "the first token"
    assert fit(counts.flatten(), expected.flatten()) > 1e-3, "both together"


def fit(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square p-value; cells that expect fewer than 5 count as one."""
    few = expected < 5
    pairs = [(counts[~few], expected[~few])]
    if expected[few].sum() > 0:
        pairs.append((counts[few].sum()[None], expected[few].sum()[None]))
    seen, wanted = (torch.cat(column) for column in zip(*pairs, strict=True))
    return float(chi2.sf(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1))


def test_the_same_seed_gives_the_same_step() -> None:
    shape = TreeShape([-1, 0, 0, 1])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(torch.tensor([8, 1, 2, 3]), shape)
    sampling = Sampling(temperature=1.0)
    first, second = (settle(sampling, proposal, logits, SeededDraws(5)) for _ in range(2))
    assert first == second


def test_logits_that_are_not_finite_are_refused_where_tokens_are_drawn() -> None:
    logits = torch.full((1, VOCAB), float("nan"))
    proposal = Proposal(torch.tensor([1]), TreeShape([-1]))
    with pytest.raises(TargetError, match="not finite"):
        settle(Sampling(temperature=1.0), proposal, logits, SeededDraws(0))


def test_rules_that_are_lossy_stay_on_the_host() -> None:
    assert Settler.of(Typical(0.7, 0.09, 0.3)) is None
    assert Settler.of(Lossless(Sampling())) is not None
