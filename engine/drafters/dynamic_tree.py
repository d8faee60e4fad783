"""EAGLE-2's draft tree: grown where the drafter is confident, then cut to its best nodes.

Every node has a score, the sum of the log-probabilities on its path. Each round expands the best
few nodes of the newest level; in the end the best nodes of all levels are kept.

Worked example, top_k 2, 2 levels, 3 nodes kept (scores in brackets):

    candidate   0 a(-0.1)  1 b(-2.4)   2 ac(-0.4)  3 ad(-1.3)   4 bc(-3.0)  5 bd(-3.1)
    parent         root       root         0           0            1           1
    kept by score: 0, 2, 3  →  nodes 1, 2, 3 in candidate order, parents [-1, 0, 1, 1]

Source: arXiv:2406.16858, section 4 (expansion 4.1, rerank 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import Sampling
from engine.drafters.eagle_session import HeadSession
from engine.proposal import Proposal
from engine.sampling import SeededDraws
from engine.tree import TreeShape


class Net(Protocol):
    """What growing a tree needs of a draft network."""

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> Tensor:
        """See `HeadSession.expand`."""

    def best_children(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `HeadSession.best_children`."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    """How a dynamic tree may grow.

    Attributes:
        top_k: children per expanded node.
        levels: drafted levels; the reference's `depth` + 1.
        keep: drafted nodes kept; the reference's `total_token` - 1.
        expanded: nodes expanded per level; the reference expands `top_k`.
    """

    top_k: int
    levels: int
    keep: int
    expanded: int

    @property
    def num_candidates(self) -> int:
        """Nodes that exist before the rerank: top_k + (levels - 1) · top_k² if it expands top_k."""
        total = level = self.top_k
        for _ in range(1, self.levels):
            level = min(self.expanded, level) * self.top_k
            total += level
        return total

    def within(self, max_depth: int) -> TreeSize:
        """The same tree, not deeper than `max_depth` nor than the kept nodes can reach."""
        levels = min(self.levels, max_depth, self.keep)
        return TreeSize(self.top_k, levels, self.keep, self.expanded)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes in the order produced: by level, then parent, then descending probability.

    Attributes:
        tokens: `(c,)` int64 target ids.
        log_probs: `(c,)` float32, given the parent.
        scores: `(c,)` float32, sum of `log_probs` down to here.
        parents: `(c,)` int64 candidate numbers, -1 for children of the root.
    """

    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    parents: Tensor


def grow(net: Net, output: Tensor, size: TreeSize) -> Candidates:
    """Expand level by level, each in one batch.

    Args:
        output: `(1, hidden)`, which predicts the children of the root.
    """
    k = size.top_k
    tokens, log_probs = net.best_children(output, k)
    levels = [_Level(tokens[0], log_probs[0], log_probs[0], torch.full_like(tokens[0], -1))]
    hidden, ancestors, first = output, None, 0
    frontier = torch.arange(min(size.expanded, k), device=output.device)
    for depth in range(1, size.levels):
        last = levels[-1]
        came_from = frontier // k
        ancestors = _see(ancestors, came_from) if k > 1 else None
        hidden = net.expand(hidden[came_from], last.tokens[frontier], depth, ancestors)
        tokens, log_probs = net.best_children(hidden, k)
        scores = (last.scores[frontier, None] + log_probs).flatten()
        parents = (first + frontier).repeat_interleave(k)
        first += len(last.tokens)
        levels.append(_Level(tokens.flatten(), log_probs.flatten(), scores, parents))
        if depth + 1 < size.levels:
            frontier = scores.topk(min(size.expanded, len(scores))).indices
    columns = zip(*((v.tokens, v.log_probs, v.scores, v.parents) for v in levels), strict=True)
    return Candidates(*(torch.cat(column) for column in columns))


@dataclass(frozen=True, slots=True)
class _Level:
    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    parents: Tensor


def _see(ancestors: Tensor | None, came_from: Tensor) -> Tensor:
    """Who each of the newly expanded nodes sees: what its parent saw, and itself."""
    itself = torch.eye(len(came_from), dtype=torch.bool, device=came_from.device)
    return itself if ancestors is None else torch.cat([ancestors[came_from], itself], dim=1)


def rerank(candidates: Candidates, keep: int) -> tuple[Tensor, Tensor]:
    """The best-scoring candidates of all levels.

    A child never scores above its parent and has the higher number; equal scores go to the lower
    number, so a kept node's parent is always kept.

    Returns:
        Numbers of the kept candidates `(m,)` int64, ascending: candidate `kept[i]` is node i + 1;
        and the parent nodes `(m,)` int64, 0 for the root.
    """
    best = candidates.scores.sort(descending=True, stable=True).indices[:keep]
    kept = best.sort().values
    parents = torch.searchsorted(kept, candidates.parents[kept], right=True)
    return kept, parents


@dataclass(frozen=True, slots=True)
class DynamicPlan:
    """Drafts a dynamic tree; with top_k 1 a chain. Drafts follow from the context alone."""

    size: TreeSize

    def draft(
        self, session: HeadSession, max_depth: int, sampling: Sampling, draws: SeededDraws
    ) -> Proposal:
        """A tree below the session's root, at most `max_depth` deep; sampling plays no part."""
        size = self.size.within(max_depth)
        candidates = grow(session, session.output, size)
        if size.top_k == 1:
            tokens, log_probs, ranks = candidates.tokens, candidates.log_probs, None
            shape = TreeShape.chain(size.levels)
        else:
            kept, parents = rerank(candidates, size.keep)
            tokens, log_probs = candidates.tokens[kept], candidates.log_probs[kept]
            # The one wait for the device: the tree's topology is needed on the host.
            rows = torch.stack([parents, kept % size.top_k]).tolist()
            shape, ranks = TreeShape([-1, *rows[0]]), [0, *rows[1]]
        return Proposal(
            tokens=torch.cat([session.root, tokens]),
            shape=shape,
            ranks=ranks,
            draft_probs=torch.cat([log_probs.new_zeros(1), log_probs]).exp(),
        )
