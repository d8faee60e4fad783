"""EAGLE-1's draft tree: a choice tree whose nodes are filled by the draft network's ranks.

Greedy drafts take the k-th likeliest token; under a temperature the k-th *drawn* token, drawn
without replacement, so that verification can be lossless with the draft's own distribution.
Source: arXiv:2401.15077, section 3 and appendix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import Sampling
from engine.drafters.eagle_session import HeadSession
from engine.kernels.cpu.ranking import likeliest
from engine.proposal import DraftDists, Proposal
from engine.sampling import SeededDraws, probabilities
from engine.tree import ChoiceTree, upload

_TINY = 1e-30
"""Added to every probability before drawing: never drawn while real mass is left."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Expanded nodes of one depth, and where their children come from.

    Attributes:
        nodes: the expanded nodes (the root at depth 0).
        from_rows, from_ranks: `(e,)` which row and rank of the level above each of them is.
        ancestors: `(e, m)` bool over the expanded nodes below the root so far; None at the root.
        child_rows, child_ranks: `(c,)` row (of `nodes`) and rank of every child, in node order.
        num_ranks: how many children the most demanding node needs.
    """

    nodes: tuple[int, ...]
    from_rows: Tensor
    from_ranks: Tensor
    ancestors: Tensor | None
    child_rows: Tensor
    child_ranks: Tensor
    num_ranks: int


class StaticPlan:
    """Drafts the nodes of a choice tree, one batch per depth."""

    def __init__(self, tree: ChoiceTree, device: torch.device) -> None:
        self.tree = tree
        self.device = device
        self._levels = _plan(tree, device)
        self._cut: dict[int, StaticPlan] = {}

    def draft(
        self, session: HeadSession, max_depth: int, sampling: Sampling, draws: SeededDraws
    ) -> Proposal:
        """A tree below the session's root, at most `max_depth` deep."""
        if max_depth < self.tree.depth:
            if max_depth not in self._cut:
                paths = tuple(path for path in self.tree.paths if len(path) <= max_depth)
                self._cut[max_depth] = StaticPlan(ChoiceTree(paths), self.device)
            return self._cut[max_depth].draft(session, max_depth, sampling, draws)
        tokens, draft_probs, dists = [session.root], [session.output.new_ones(1).float()], []
        hidden, grid = session.output, session.root[None]
        for depth, level in enumerate(self._levels):
            if depth:
                fed = grid[level.from_rows, level.from_ranks]
                hidden = session.expand(hidden[level.from_rows], fed, depth, level.ancestors)
            logits = session.head.logits(hidden)
            if sampling.greedy:
                ranked = likeliest(logits, level.num_ranks)
                children = ranked.ids[level.child_rows, level.child_ranks]
                probs, grid = ranked.log_probs.exp(), ranked.ids
                draft_probs.append(probs[level.child_rows, level.child_ranks])
            else:
                probs = probabilities(logits, sampling)
                grid = draw_without_replacement(probs, level.num_ranks, draws)
                dists.append(probs)
                children = grid[level.child_rows, level.child_ranks]
                draft_probs.append(probs[level.child_rows, children])
            tokens.append(children)
        return Proposal(
            tokens=torch.cat(tokens),
            shape=self.tree.shape,
            ranks=self.tree.ranks,
            draft_probs=torch.cat(draft_probs),
            dists=DraftDists(torch.cat(dists), self._rows()) if dists else None,
        )

    def _rows(self) -> dict[int, int]:
        """Row of every expanded node among all, in the order expanded."""
        expanded = [node for level in self._levels for node in level.nodes]
        return {node: row for row, node in enumerate(expanded)}


def draw_without_replacement(probs: Tensor, count: int, draws: SeededDraws) -> Tensor:
    """Draw distinct indices from each row, one after another, each from what is left of the row.

    Where a row has fewer than `count` indices with mass, the rest are distinct indices without.

    Args:
        probs: `(n, vocab)`.

    Returns:
        `(n, count)` int64 in the order drawn.
    """
    # The random numbers come from the run's generator on the CPU: a seed means the same anywhere.
    uniform = torch.rand(count, len(probs), 1, generator=draws.generator, dtype=torch.float64)
    uniform = upload(uniform, probs.device)
    left = probs.double() + _TINY
    picked: list[Tensor] = []
    for drawn in uniform:
        mass = left.cumsum(dim=-1)
        index = torch.searchsorted(mass, drawn * mass[:, -1:], right=True)
        index = index.clamp_max(probs.shape[-1] - 1)
        left.scatter_(-1, index, 0.0)
        picked.append(index)
    return torch.cat(picked, dim=-1)


def _plan(tree: ChoiceTree, device: torch.device) -> list[_Level]:
    shape, ranks = tree.shape, tree.ranks
    depths = shape.depths.tolist()
    by_depth: list[list[int]] = [[] for _ in range(tree.depth)]
    for node, children in enumerate(shape.children):
        if children:
            by_depth[depths[node]].append(node)
    levels: list[_Level] = []
    fed: list[int] = []
    above = {0: 0}
    for depth, nodes in enumerate(by_depth):
        fed += nodes if depth else []
        row_of = {node: row for row, node in enumerate(nodes)}
        below = [child for node in nodes for child in shape.children[node]]
        levels.append(
            _Level(
                nodes=tuple(nodes),
                from_rows=_index([above[max(0, shape.parents[n])] for n in nodes], device),
                from_ranks=_index([ranks[n] for n in nodes], device),
                ancestors=shape.ancestors[nodes][:, fed].to(device) if depth else None,
                child_rows=_index([row_of[shape.parents[c]] for c in below], device),
                child_ranks=_index([ranks[c] for c in below], device),
                num_ranks=1 + max(ranks[c] for c in below),
            )
        )
        above = row_of
    return levels


def _index(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)
