"""Grows a draft from its likeliest paths."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.proposal import Proposal
from engine.tree import TreeShape


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
            torch.tensor([root, *self.tokens], device=device),
            TreeShape.chain(len(self.tokens)) if is_chain else TreeShape([-1, *self.parents]),
            draft_probs=torch.tensor([1.0, *self.probs], device=device),
        )


def likeliest_paths(
    state: Any,
    onward: Callable[[Any], Iterable[tuple[int, float, Any]]],
    *,
    room: int,
    max_depth: int = 1 << 30,
    min_prob: float = 0.0,
    chain: bool = False,
    newest_first: bool = False,
) -> Continuation:
    """The likeliest paths first, until `room` tokens are drafted.

    Args:
        state: of the root.
        onward: a node's state → what may come next: token, probability, state with it.
        min_prob: least probability of a drafted path.
        chain: draft no siblings.
        newest_first: of equally likely paths the one that was found last.
    """
    found = Continuation()
    # (-probability of the path, order, probability, token, state, parent, depth)
    heap: list[tuple[float, int, float, int, Any, int, int]] = []
    order = itertools.count(step=-1 if newest_first else 1)
    path_prob, parent, depth = 1.0, 0, 1
    while len(found.tokens) < room:
        if depth <= max_depth:
            for token, prob, after in onward(state):
                whole = path_prob * prob
                if whole >= min_prob:
                    heapq.heappush(heap, (-whole, next(order), prob, token, after, parent, depth))
        if not heap:
            break
        negated, _, prob, token, state, above, depth = heapq.heappop(heap)
        found.tokens.append(token)
        found.parents.append(above)
        found.probs.append(prob)
        found.score -= negated
        path_prob, parent, depth = -negated, len(found.tokens), depth + 1
        if chain:
            heap.clear()
    return found
