"""The draft trees of EAGLE: a choice tree filled with ranks (EAGLE-1), or a dynamic one (EAGLE-2).

`StaticTree` drafts the nodes of a choice tree. Greedy drafts take the k-th best token; under a
temperature the k-th *drawn* token, drawn without replacement, so that verification can be lossless
with the draft's own distribution. Source: arXiv:2401.15077, section 3 and appendix.

`DynamicTree` scores every node by the sum of the log-probabilities on its path, expands the best
few nodes of the newest level, and in the end keeps the best nodes of all levels. Example, top_k 2,
2 levels, 3 nodes kept (scores in brackets):

    candidate   0 a(-0.1)  1 b(-2.4)   2 ac(-0.4)  3 ad(-1.3)   4 bc(-3.0)  5 bd(-3.1)
    parent         root       root         0           0            1           1
    kept by score: 0, 2, 3  →  nodes 1, 2, 3 in candidate order, parents [-1, 0, 1, 1]

Source: arXiv:2406.16858, section 4 (expansion 4.1, rerank 4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.config import Sampling
from engine.drafters.base import chain
from engine.drafters.eagle.head import HeadEntries
from engine.drafters.heads.vocabulary import Vocabulary
from engine.kernels.cpu.operators import topk
from engine.proposal import Budget, DraftDists, Proposal
from engine.sampling import SeededDraws, locate, probabilities, widest_float
from engine.tree import ChoiceTree, TreeShape, upload

_TINY = 1e-30
"""Added to every probability before drawing: never drawn while real mass is left."""


class _Level(NamedTuple):
    """Expanded nodes of one depth; for the root, only the children matter.

    Attributes:
        inputs: `(2, e)` the row of the level above, and its rank, that each of them is.
        ancestors: `(e, m)` bool over the expanded nodes below the root so far.
        children: `(2, c)` row (of `nodes`) and rank of every child, in node order.
        num_ranks: ranks that the widest node needs.
    """

    nodes: list[int]
    inputs: Tensor
    ancestors: Tensor
    children: Tensor
    num_ranks: int


class StaticTree:
    def __init__(self, tree: ChoiceTree, device: torch.device) -> None:
        self.tree, self._device = tree, device
        self._levels = _levels(tree, device)

    def chain(self) -> StaticTree:
        """The first choice at every depth of this tree; itself if it is one."""
        if self.tree.shape.is_chain and not self.tree.max_rank:
            return self
        first = [path for path in self.tree.paths if not any(path)]
        return StaticTree(ChoiceTree.chain(max(1, len(first))), self._device)

    def chain_len(self, sampling: Sampling) -> int:
        """Length of a greedy chain; 0 where it drafts anything else."""
        is_greedy = self.tree.shape.is_chain and not self.tree.max_rank and sampling.greedy
        return self.tree.depth if is_greedy else 0

    def draft(
        self,
        session: HeadEntries,
        root: int,
        budget: Budget,
        sampling: Sampling,
        draws: SeededDraws,
    ) -> Proposal:
        """The tree below the root, the session's last token; its levels within the budget.

        Greedy drafts end above the first depth whose parents are all too improbable; of drafts
        that are drawn, the number must not depend on what was drawn.
        """
        min_prob = budget.min_prob if sampling.greedy else 0.0
        vocabulary, hidden, logits = session.vocabulary, session.output, session.logits
        grid = torch.full((1, 1), root, device=hidden.device)
        tokens, draft_probs, dists = [grid[0]], [session.output.new_ones(1).float()], []
        probs, paths = session.output.new_ones(1, 1).float(), session.output.new_ones(1).float()
        for depth, level in enumerate(self._levels[: budget.depth]):
            rows, ranks = level.children
            if depth:
                above, rank = level.inputs
                inputs = hidden[above], grid[above, rank]
                if min_prob > 0:
                    paths = paths[above] * probs[above, rank]
                    if float(paths.max()) < min_prob:
                        break
                hidden, logits = session.expand(*inputs, depth, level.ancestors)
            if sampling.greedy:
                best = topk(logits, level.num_ranks)
                ids, probs = best.ids, best.log_probs.exp()
            else:
                dist = probabilities(logits, sampling)
                ids = draw_without_replacement(dist, level.num_ranks, draws)
                probs = dist.gather(-1, ids)
                dists.append(vocabulary.spread(dist))
            grid = vocabulary.target_ids(ids)
            tokens.append(grid[rows, ranks])
            draft_probs.append(probs[rows, ranks])
        # Levels beyond the budget have no distributions.
        expanded = [node for level in self._levels[: len(dists)] for node in level.nodes]
        row_of = {node: row for row, node in enumerate(expanded)}
        drafted = torch.cat(tokens)
        return Proposal(
            tokens=drafted,
            # Nodes are in the order of their depths: the drafted ones come first.
            shape=self.tree.shape.keep(range(len(drafted))),
            ranks=self.tree.ranks[: len(drafted)],
            draft_probs=torch.cat(draft_probs),
            dists=DraftDists(torch.cat(dists), row_of) if dists else None,
        )


def _levels(tree: ChoiceTree, device: torch.device) -> list[_Level]:
    shape, ranks = tree.shape, tree.ranks
    depths = shape.depths.tolist()
    levels: list[_Level] = []
    below_root: list[int] = []
    above = {-1: 0}
    for depth in range(tree.depth):
        nodes = [n for n, below in enumerate(shape.children) if below and depths[n] == depth]
        below_root += nodes if depth else []
        row_of = {node: row for row, node in enumerate(nodes)}
        children = [child for node in nodes for child in shape.children[node]]
        inputs = [[above[shape.parents[n]] for n in nodes], [ranks[n] for n in nodes]]
        rows = [[row_of[shape.parents[c]] for c in children], [ranks[c] for c in children]]
        levels.append(
            _Level(
                nodes,
                torch.tensor(inputs, device=device),
                shape.ancestors[nodes][:, below_root].to(device),
                torch.tensor(rows, device=device),
                1 + max(rows[1]),
            )
        )
        above = row_of
    return levels


def draw_without_replacement(probs: Tensor, count: int, draws: SeededDraws) -> Tensor:
    """Distinct indices `(n, count)` of each row of `probs (n, vocab)`, in the order drawn.

    Where a row has fewer than `count` indices with mass, the rest are distinct indices without.
    """
    # The random numbers come from the run's generator on the CPU: a seed means the same anywhere.
    uniform = torch.rand(count, len(probs), 1, generator=draws.generator, dtype=torch.float64)
    wide = widest_float(probs.device)
    uniform = upload(uniform.to(wide), probs.device)
    left = probs.to(wide) + _TINY
    columns: list[Tensor] = []
    for number in uniform:
        index = locate(left, number[:, 0] * left.sum(dim=-1))[0][:, None]
        left.scatter_(-1, index, 0.0)
        columns.append(index)
    return torch.cat(columns, dim=-1)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Drafts a tree by confidence, with top_k 1 a chain; drafts follow from the context.

    Attributes:
        top_k: children per expanded node.
        levels: drafted levels; the reference's `depth` + 1.
        keep: drafted nodes kept; the reference's `total_token` - 1.
        expanded: nodes expanded per level; the reference's `top_k`.
    """

    top_k: int
    levels: int
    keep: int
    expanded: int

    @property
    def num_candidates(self) -> int:
        """Nodes that exist before the rerank: top_k + (levels - 1) · top_k² if it expands top_k."""
        rows, total = 1, 1
        for _ in range(1, self.levels):
            rows = min(self.expanded, rows * self.top_k)
            total += rows
        return self.top_k * total

    def chain(self) -> DynamicTree:
        """As `StaticTree.chain`."""
        levels = min(self.levels, self.keep)
        return self if self.top_k == 1 else DynamicTree(1, levels, levels, 1)

    def chain_len(self, sampling: Sampling) -> int:
        """As `StaticTree.chain_len`."""
        return min(self.levels, self.keep) if self.top_k == 1 else 0

    def within(self, budget: Budget) -> DynamicTree:
        """The same tree, not deeper than the budget, nor than the kept nodes can reach."""
        return replace(self, levels=min(self.levels, budget.depth, self.keep))

    def expand(self, source: TreeSource, root: int, budget: Budget) -> Proposal:
        """A tree below the root, the source's last token.

        Nodes less probable than `min_prob` are not expanded.
        """
        size = self.within(budget)
        candidates = expand_candidates(source, size, budget.min_prob)
        if size.top_k == 1:
            return chain(root, candidates.tokens, candidates.log_probs.exp())
        return kept_tree(root, candidates, size.keep, size.top_k)


class Candidates(NamedTuple):
    """Nodes `(c,)` in the order produced: by level, then parent, then descending probability.

    Number i of its level is child i % top_k of its parent; `scores` are sums of `log_probs` along
    the path; parents are numbers of candidates, -1 for the root.
    """

    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    parents: Tensor


class TreeSource(Protocol):
    """A draft network at the root of a tree, as `HeadEntries` has it."""

    output: Tensor
    logits: Tensor
    vocabulary: Vocabulary

    def expand(
        self, hidden: Tensor, tokens: Tensor, depth: int, ancestors: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def expand_candidates(source: TreeSource, size: DynamicTree, min_prob: float = 0.0) -> Candidates:
    """Expand level by level, each in one batch; less probable nodes are not expanded."""
    k, output = size.top_k, source.output
    tokens, log_probs = _best(source, source.logits, k)
    root = torch.full_like(tokens[0], -1)
    levels = [Candidates(tokens[0], log_probs[0], log_probs[0], root)]
    hidden, ancestors, first = output, None, 0
    frontier = torch.arange(min(size.expanded, k), device=output.device)
    for depth in range(1, size.levels):
        last = levels[-1]
        if min_prob > 0:
            frontier = frontier[last.scores[frontier] >= math.log(min_prob)]
            if not len(frontier):
                break
        rows = frontier // k
        if k > 1:
            # Every newly expanded node sees what its parent saw, and itself.
            itself = torch.eye(len(frontier), dtype=torch.bool, device=output.device)
            ancestors = itself if ancestors is None else torch.cat([ancestors[rows], itself], 1)
        hidden, logits = source.expand(hidden[rows], last.tokens[frontier], depth, ancestors)
        tokens, log_probs = _best(source, logits, k)
        scores = (last.scores[frontier, None] + log_probs).flatten()
        parents = (first + frontier).repeat_interleave(k)
        first += len(last.tokens)
        levels.append(Candidates(tokens.flatten(), log_probs.flatten(), scores, parents))
        if depth + 1 < size.levels:
            frontier = scores.topk(min(size.expanded, len(scores))).indices
    return Candidates(*(torch.cat(column) for column in zip(*levels, strict=True)))


def _best(source: TreeSource, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, best first: ids and log-probs, `(n, count)`."""
    ranked = topk(logits, count)
    return source.vocabulary.target_ids(ranked.ids), ranked.log_probs


def kept_tree(root: int, candidates: Candidates, keep: int, top_k: int) -> Proposal:
    """The draft of the best candidates below the root; `top_k` of them are siblings."""
    numbers, parents = rerank(candidates, keep)
    tokens, log_probs = candidates.tokens[numbers], candidates.log_probs[numbers]
    # The one wait for the device: the tree's topology is needed on the host.
    rows = torch.stack([parents, numbers % top_k]).tolist()
    return Proposal(
        tokens=torch.cat([tokens.new_full((1,), root), tokens]),
        shape=TreeShape([-1, *rows[0]]),
        ranks=[0, *rows[1]],
        draft_probs=torch.cat([log_probs.new_zeros(1), log_probs]).exp(),
    )


def rerank(candidates: Candidates, keep: int) -> tuple[Tensor, Tensor]:
    """The best-scoring candidates of all levels.

    A child never scores above its parent and has the higher number; equal scores go to the lower
    number, so a kept node's parent is always kept.

    Returns:
        Ascending numbers of the candidates that are kept `(m,)` (`numbers[i]` is node i + 1), and
        the nodes of their parents `(m,)`, 0 for the root.
    """
    best = candidates.scores.sort(descending=True, stable=True).indices[:keep]
    numbers = best.sort().values
    parents = torch.searchsorted(numbers, candidates.parents[numbers], right=True)
    return numbers, parents
