"""Drafts and choice trees from the most probable paths."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.proposal import Proposal
from engine.tree import ChoiceTree, Path, TreeShape, upload


@dataclass(slots=True)
class Continuation:
    """A drafted tree without its root: node i + 1 has `tokens[i]` and `parents[i]`.

    Attributes:
        probs: estimated probability of each token after its parent.
        score: sum of the paths' probabilities = expected number of accepted tokens.
        match_len: tokens of the context that was matched.
    """

    match_len: int = 0
    score: float = 0.0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    def proposal(self, root: int, device: torch.device) -> Proposal:
        is_chain = self.parents == list(range(len(self.tokens)))
        return Proposal(
            upload(torch.tensor([root, *self.tokens]), device),
            TreeShape.chain(len(self.tokens)) if is_chain else TreeShape([-1, *self.parents]),
            draft_probs=upload(torch.tensor([1.0, *self.probs]), device),
        )


def most_probable_paths(
    state: Any,
    successors: Callable[[Any], Iterable[tuple[int, float, Any]]],
    *,
    room: int,
    max_depth: int = 1 << 30,
    min_prob: float = 0.0,
    chain: bool = False,
    newest_first: bool = False,
) -> Continuation:
    """The most probable paths first, until `room` tokens are drafted.

    Args:
        state: of the root.
        successors: a node's state → possible next tokens: token, probability, next state.
        min_prob: least probability of a drafted path.
        chain: draft no siblings.
        newest_first: of equally probable paths prefer the newest.
    """
    draft = Continuation()
    # (-probability of the path, order, probability, token, state, parent, depth)
    heap: list[tuple[float, int, float, int, Any, int, int]] = []
    order = itertools.count(step=-1 if newest_first else 1)
    path_prob, parent, depth = 1.0, 0, 1
    while len(draft.tokens) < room:
        if depth <= max_depth:
            for token, prob, after in successors(state):
                joint = path_prob * prob
                if joint >= min_prob:
                    heapq.heappush(heap, (-joint, next(order), prob, token, after, parent, depth))
        if not heap:
            break
        negated, _, prob, token, state, above, depth = heapq.heappop(heap)
        draft.tokens.append(token)
        draft.parents.append(above)
        draft.probs.append(prob)
        draft.score -= negated
        path_prob, parent, depth = -negated, len(draft.tokens), depth + 1
        if chain:
            heap.clear()
    return draft


def most_probable_tree(num_nodes: int, rates: Sequence[Sequence[float]]) -> ChoiceTree:
    """The choice tree of at most n nodes with the most expected accepted tokens.

    Args:
        rates: per depth, how often each rank is right, whatever the path to it.

    Example: rates [[0.6, 0.2], [0.5, 0.1]] give (0,) 0.6, (0, 0) 0.3, (1,) 0.2, (1, 0) 0.1, …
    """
    tree = most_probable_paths(
        0,
        lambda depth: [(rank, rate, depth + 1) for rank, rate in enumerate(rates[depth])],
        room=num_nodes,
        max_depth=len(rates),
    )
    paths: list[Path] = [()]
    for rank, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], rank))
    return ChoiceTree.parse(paths[1:], form="candidates")
