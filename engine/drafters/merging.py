"""Two drafts of the same step in one tree, each token as likely as both together make it.

A token that both drafts have after the same words is one node. Where both say how the text goes on,
its probability is their weighted mean, where only one does, that one's:

    P(token) = w · P_second(token) + (1 - w) · P_first(token)

The weight follows who was right of late: of each draft, the probability that it gave to the tokens
that came true where both had spoken, in a running sum.

Source: merging retrieved and drafted trees by their common prefixes, arXiv:2503.03434;
weights by past probability as in mixtures of experts with forgetting (fixed-share forecasters).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.proposal import Proposal
from engine.tree import TreeShape

UNSAID = 0.5
"""Probability of a token after its parent, by a draft that does not say."""
MEMORY = 0.97
"""Weight of the past in the running sums, per token."""
PRIOR = 1.0
"""Of either sum, before anything was seen."""

Children = dict[int, tuple[float, int]]
"""Per token: its probability after its parent, and its node."""
Place = tuple[int | None, int | None]
"""The node of each draft that stands for the same words."""


@dataclass(slots=True)
class _Draft:
    """A proposal as a trie: per node that has any, its children."""

    children: dict[int, Children] = field(default_factory=dict)

    @classmethod
    def of(cls, proposal: Proposal) -> _Draft:
        tokens = proposal.tokens.tolist()
        said = proposal.draft_probs
        probs = [UNSAID] * len(tokens) if said is None else said.tolist()
        draft = cls()
        for node, parent in enumerate(proposal.shape.parents[1:], start=1):
            draft.children.setdefault(parent, {})[tokens[node]] = (probs[node], node)
        return draft

    def after(self, node: int | None) -> Children:
        return {} if node is None else self.children.get(node, {})


class Merger:
    """Merges a step's two drafts, and learns from the outcome whom to believe."""

    def __init__(self) -> None:
        self._drafts = (_Draft(), _Draft())
        self._credit = [PRIOR, PRIOR]

    @property
    def weight(self) -> float:
        """Of the second draft."""
        return self._credit[1] / sum(self._credit)

    def merge(self, first: Proposal, second: Proposal, room: int) -> Proposal:
        """One tree of the likeliest paths of both, at most `room` nodes below the root.

        Both must follow from the context alone (`dists` None) and have no extra rows.
        """
        self._drafts = drafts = _Draft.of(first), _Draft.of(second)
        tokens, parents, probs = [int(first.tokens[0])], [-1], [1.0]
        # (-probability of the path, order, probability, token, parent, place)
        heap: list[tuple[float, int, float, int, int, Place]] = []
        place: Place = (0, 0)
        path_prob, parent, order = 1.0, 0, 0
        while len(tokens) <= room:
            one, two = (draft.after(node) for draft, node in zip(drafts, place, strict=True))
            for token, prob in self._mixed(one, two).items():
                order += 1
                onward = (_node(one, token), _node(two, token))
                heapq.heappush(heap, (-path_prob * prob, order, prob, token, parent, onward))
            if not heap:
                break
            negated, _, prob, token, parent, place = heapq.heappop(heap)
            path_prob = -negated
            tokens.append(token)
            parents.append(parent)
            probs.append(prob)
            parent = len(tokens) - 1
        return Proposal(
            torch.tensor(tokens, device=first.tokens.device),
            TreeShape(parents),
            draft_probs=torch.tensor(probs, device=first.tokens.device),
        )

    def _mixed(self, one: Children, two: Children) -> dict[int, float]:
        if not one or not two:
            return {token: prob for token, (prob, _) in (one or two).items()}
        weight = self.weight
        probs = {token: (1 - weight) * prob for token, (prob, _) in one.items()}
        for token, (prob, _) in two.items():
            probs[token] = probs.get(token, 0.0) + weight * prob
        return probs

    def learn(self, committed: Sequence[int]) -> None:
        """What came after the root of the drafts merged in this step; nothing if none were."""
        drafts = self._drafts
        place: Place = (0, 0)
        self._drafts = (_Draft(), _Draft())
        for token in committed:
            said = [draft.after(node) for draft, node in zip(drafts, place, strict=True)]
            if not any(said):
                return
            if all(said):
                for i, children in enumerate(said):
                    prob = children[token][0] if token in children else 0.0
                    self._credit[i] = MEMORY * self._credit[i] + (1 - MEMORY) * prob
            place = (_node(said[0], token), _node(said[1], token))


def _node(children: Children, token: int) -> int | None:
    return children[token][1] if token in children else None
