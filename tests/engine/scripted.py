"""Drafters that are right or wrong at will, random trees, and the law of what is written."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from scipy.stats import chisquare

from engine.accept import Rule, VerifiedTree
from engine.config import Sampling
from engine.constraint import Constraint
from engine.model.cache import TreeCache
from engine.model.target import Target
from engine.proposal import Budget, DraftDists, Needs, Proposal, TargetOutput
from engine.sampling import SeededDraws, probabilities
from engine.tree import TreeShape
from tests.one_text import OneText

ALPHA = 1e-4
"""A law of samples is refuted by a smaller p-value."""
Parents = list[int]
TREES: dict[str, Parents] = {
    "chain": [-1, 0, 1],
    "siblings": [-1, 0, 0, 0],
    "tree": [-1, 0, 0, 1, 1, 2],
    "every-token": [-1, 0, 0, 0, 0, 0, 1, 1],
}
ALL = Needs(hidden=True, layers=(0, 2, 3))
"""Every feature that a tiny model can show."""


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def random_parents(rng: random.Random, nodes: int) -> Parents:
    """A tree of `nodes` nodes, root included: bushy, deep or anything between."""
    reach = rng.choice([1, 2, 4, nodes])
    return [-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, nodes))]


def walk(
    target: Target, cache: TreeCache, sizes: Iterable[int], *, prompts: Iterable[int]
) -> Iterator[TargetOutput]:
    """What a target shows of random prompts, then of random trees, each left by a random path."""
    rng = random.Random(4)
    for count in prompts:
        yield target.prefill(tokens_of(rng, count), cache, ALL)
    for size in sizes:
        shape = TreeShape(random_parents(rng, size))
        tokens = torch.tensor(tokens_of(rng, size), device=target.device)
        yield target.verify(Proposal(tokens, shape), cache, ALL)
        cache.commit((0, *shape.path_to(rng.randrange(size))))


def assert_same_walk(
    ours: Target,
    theirs: Target,
    sizes: Sequence[int],
    *,
    prompts: Sequence[int],
    room: int = 4,
    **near: Any,
) -> None:
    """Two targets of the same weights show the same; `near` as in `assert_close`."""
    caches = [target.new_cache(room) for target in (ours, theirs)]
    walks = (
        walk(*pair, sizes, prompts=prompts) for pair in zip((ours, theirs), caches, strict=True)
    )
    near = near or {"rtol": 1e-4, "atol": 2e-4}
    for mine, other in zip(*walks, strict=True):
        for part in ("logits", "hidden", "layers"):
            pair = (getattr(output, part).cpu() for output in (mine, other))
            torch.testing.assert_close(*pair, **near)
    assert caches[0].length == caches[1].length
    for cache in caches:
        cache.free()


class ScriptedDrafter(OneText):
    """Knows the output in advance; drafts right tokens with probability `truth`.

    Where it is right, one child on the true path carries the true token; all other tokens are
    wrong, and siblings differ.
    """

    def __init__(
        self,
        output: Sequence[int],
        *,
        vocab: int,
        shape: Callable[[random.Random], Parents],
        truth: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.output = list(output)
        self.vocab = vocab
        self.shape = shape
        self.truth = truth
        self.rng = random.Random(seed)
        self.finished = False

    def begin(self) -> None:
        self.finished = False

    def propose(self, budget: Budget) -> Proposal:
        shape = TreeShape(self.shape(self.rng))
        tokens = [self.root] * len(shape)
        done = len(self.text) - self.log.num_prompt
        on_path = {0}
        for node, children in enumerate(shape.children):
            depth = int(shape.depths[node])
            truth = self._true_token(done + depth) if node in on_path else None
            right = self.rng.choice(children) if children else None
            others = [t for t in range(self.vocab) if t != truth]
            wrong = self.rng.sample(others, len(children))
            for child, token in zip(children, wrong, strict=True):
                tokens[child] = token
            if right is not None and truth is not None and self.rng.random() < self.truth:
                tokens[right] = truth
                on_path.add(right)
        return Proposal(torch.tensor(tokens), shape)

    def _true_token(self, at: int) -> int | None:
        return self.output[at] if at < len(self.output) else None

    def close(self) -> None:
        self.finished = True


def draw_tree(
    tree: TreeShape,
    law: Callable[[tuple[int, ...]], torch.Tensor],
    root: int,
    generator: torch.Generator,
    *,
    likeliest: bool = False,
) -> tuple[list[int], DraftDists | None]:
    """Tokens of a tree whose siblings are drawn without replacement, and their distributions."""
    tokens = [root] * len(tree)
    rows: list[torch.Tensor] = []
    row_of_parent: dict[int, int] = {}
    for node, children in enumerate(tree.children):
        if not children:
            continue
        probs = law(tuple(tokens[i] for i in (0, *tree.path_to(node))))
        if likeliest:
            drawn = probs.topk(len(children)).indices
        else:
            drawn = torch.multinomial(probs, len(children), generator=generator)
        for child, token in zip(children, drawn.tolist(), strict=True):
            tokens[child] = token
        row_of_parent[node] = len(rows)
        rows.append(probs)
    if likeliest or not rows:
        return tokens, None
    return tokens, DraftDists(torch.stack(rows), row_of_parent)


# ---- laws of samples

Pair = tuple[int, int]
Logits = Callable[[tuple[int, ...]], torch.Tensor]
"""A path of tokens, root first → `(vocab,)` logits of what follows it."""


@functools.cache
def random_logits(path: tuple[int, ...], count: int, *, seed: int) -> torch.Tensor:
    """`(count,)` standard normal numbers that depend on the path alone."""
    seed += sum((token + 1) * 300**i for i, token in enumerate(path))
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def first_two_tokens(
    proposal: Proposal,
    target_logits: Logits,
    rule: Rule,
    sampling: Sampling,
    draws: SeededDraws,
    constraint: Constraint | None = None,
) -> Pair:
    """The two tokens after root 0, of a text that begins with one verified step."""
    constraint = constraint or Constraint()
    proposal = constraint.prune(proposal, max_depth=2)
    tokens, shape = proposal.tokens.tolist(), proposal.shape
    paths = [tuple(tokens[i] for i in (0, *shape.path_to(n))) for n in range(len(shape))]
    output = constraint.mask(TargetOutput(torch.stack([target_logits(path) for path in paths])))
    accepted = rule(VerifiedTree(tokens, shape, output.logits, proposal.dists), draws)
    first, *more = [*(tokens[node] for node in accepted.path), accepted.next_token]
    if more:
        return first, more[0]
    constraint.commit([first])
    alone = constraint.mask(TargetOutput(target_logits((0, first))[None]))
    return first, draws.pick(probabilities(alone.logits[0], sampling))


def law_of_two(
    target_logits: Logits, sampling: Sampling, firsts: Sequence[int], seconds: Sequence[int]
) -> dict[Pair, float]:
    """The target's law of the two tokens after root 0, held to these."""

    def held_to(tokens: Sequence[int], path: tuple[int, ...]) -> dict[int, float]:
        chances = probabilities(target_logits(path)[list(tokens)], sampling).tolist()
        return dict(zip(tokens, chances, strict=True))

    law: dict[Pair, float] = {}
    for first, mass in held_to(firsts, (0,)).items():
        law |= {(first, x): mass * p for x, p in held_to(seconds, (0, first)).items()}
    return law


def chi_square(seen: Counter[Any], law: Mapping[Any, float]) -> float:
    """The p-value of outcomes against their law; the rare ones are taken together."""
    possible = {outcome: mass for outcome, mass in law.items() if mass > 0}
    assert set(seen) <= set(possible)
    scale = seen.total() / sum(possible.values())
    usual = [outcome for outcome, mass in possible.items() if scale * mass >= 5]
    groups = [[outcome] for outcome in usual]
    if rare := [outcome for outcome in possible if outcome not in usual]:
        groups.append(rare)
    observed = [sum(seen[outcome] for outcome in group) for group in groups]
    expected = [scale * sum(possible[outcome] for outcome in group) for group in groups]
    return float(chisquare(observed, expected).pvalue)
