"""Accepts and commits on the device, so that a step waits for it once.

Every node's next token is decided for itself: the argmax, or a draw. A drafted node is *chosen* if
its parent's next token is its own; the accepted path is the nodes that are chosen and whose
ancestors all are. That is one look at the ancestor matrix, whatever the depth:

    tokens    root 7   1: 5   2: 8   3: 6 (under 1)   4: 9 (under 2)
    next      8        6      9      …                4
    chosen    ✓        –      ✓      ✓                ✓          path 0 2 4, then 4's next token

Node 3 is chosen by a node that is not: it falls out with its ancestor.

Deterministic drafts are point masses. Trying the children one after another and drawing from what
is left is then the same as drawing once and looking which child was drawn. Children that were
themselves drawn go through the residual scheme of `accept.Lossless`, all parents at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.accept import Acceptance, Lossless, Rule
from engine.config import Sampling
from engine.errors import TargetError
from engine.model.cache import TreeCache
from engine.model.upload import upload
from engine.proposal import DraftDists, Proposal
from engine.sampling import SeededDraws, probabilities
from engine.tree import TreeShape


@dataclass(frozen=True, slots=True)
class Settled:
    """A step as the host learns of it.

    Attributes:
        target_probs: of nodes 1 … n-1, the target's softmax at the parent; draft_probs: of all
            nodes, None where the drafter has none.
    """

    tokens: list[int]
    accepted: Acceptance
    target_probs: list[float]
    draft_probs: list[float] | None


class _Decision(NamedTuple):
    """`chosen` `(n,)` bool, root included; `following` `(n,)` int64, every node's next token."""

    chosen: Tensor
    following: Tensor


class Settler:
    """Settles the steps of one generation, losslessly."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    @classmethod
    def of(cls, rule: Rule) -> Settler | None:
        """For a rule; None if it is one that is decided on the host."""
        return cls(rule.sampling) if isinstance(rule, Lossless) else None

    def __call__(
        self, proposal: Proposal, logits: Tensor, draws: SeededDraws, cache: TreeCache
    ) -> Settled:
        """Decide on a draft tree and put the accepted rows of the cache in their places.

        The cache's length is left for the caller to `advance`.

        Args:
            logits: `(n, vocab)` of the n nodes.

        Raises:
            TargetError: tokens are drawn, and the logits are not finite.
        """
        depths, ancestors = proposal.shape.on(logits.device)
        parents = _parents(depths, ancestors) if len(proposal.shape) > 1 else depths
        chosen, following = self._decide(proposal, logits, parents, draws)
        columns = [proposal.tokens, following]
        if not self._sampling.greedy:
            columns.append(logits.isfinite().all(dim=-1))
        if len(proposal.shape) > 1:
            on_path = ~(ancestors & ~chosen).any(dim=1)
            count = on_path.sum(dim=0, keepdim=True)
            rows = on_path.to(torch.int8).sort(descending=True, stable=True).indices
            cache.move(rows[: proposal.shape.max_depth + 1], count)
            scores = logits.float()
            mine = scores[parents, proposal.tokens] - scores.logsumexp(dim=-1)[parents]
            columns += [on_path, mine.exp()]
        if proposal.draft_probs is not None:
            columns.append(proposal.draft_probs)
        # The step's one wait. Every value is exact in float64.
        return self._read(torch.stack([c.double() for c in columns]).tolist(), proposal)

    def _read(self, rows: list[list[float]], proposal: Proposal) -> Settled:
        """What was put together on the device, taken apart."""
        found = iter(rows)
        tokens, following = next(found), next(found)
        if not self._sampling.greedy and not all(next(found)):
            raise TargetError(
                "The model's logits are not finite, so no token can be drawn. "
                "Load it with dtype float32 or bfloat16."
            )
        path: tuple[int, ...] = (0,)
        target_probs = [0.0]
        if len(proposal.shape) > 1:
            path = tuple(node for node, kept in enumerate(next(found)) if kept)
            target_probs = next(found)
        return Settled(
            tokens=[int(token) for token in tokens],
            accepted=Acceptance(path[1:], int(following[path[-1]])),
            target_probs=target_probs[1:],
            draft_probs=None if proposal.draft_probs is None else next(found),
        )

    def _decide(
        self, proposal: Proposal, logits: Tensor, parents: Tensor, draws: SeededDraws
    ) -> _Decision:
        if self._sampling.greedy and proposal.dists is None:
            following = logits.argmax(dim=-1)
            return _Decision(_drawn_by(following, proposal.tokens, parents), following)
        probs = probabilities(logits, self._sampling)
        chosen = None
        if proposal.dists is not None:
            chosen, probs = _residual(proposal, proposal.dists, probs, draws)
        following = _draw(probs, _uniform(len(probs), draws, logits.device)[:, 0])
        if chosen is None:
            chosen = _drawn_by(following, proposal.tokens, parents)
        return _Decision(chosen, following)


def _parents(depths: Tensor, ancestors: Tensor) -> Tensor:
    """Parent of every node `(n,)` int64; the root's is itself."""
    above = ancestors & (depths == depths[:, None] - 1)
    return above.to(torch.int8).argmax(dim=1)


def _drawn_by(following: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Which nodes carry their parent's next token; the root counts as one."""
    chosen = following[parents] == tokens
    chosen[:1] = True
    return chosen


def _uniform(count: int, draws: SeededDraws, device: torch.device, each: int = 1) -> Tensor:
    """`(count, each)` float64 from the run's generator."""
    return upload(torch.rand(count, each, generator=draws.generator, dtype=torch.float64), device)


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """A token per row `(n, vocab)`, by inverse distribution function."""
    mass = probs.double().cumsum(dim=-1)
    index = torch.searchsorted(mass, (uniform * mass[:, -1])[:, None], right=True)
    return index[:, 0].clamp_max(probs.shape[-1] - 1)


def _residual(
    proposal: Proposal, dists: DraftDists, probs: Tensor, draws: SeededDraws
) -> tuple[Tensor, Tensor]:
    """The chosen nodes, and what every node's next token is drawn from if no child is.

    Source: arXiv:2305.09781, Alg. 2; the same sums as `accept.Lossless`, a parent per row.
    """
    n, device = len(proposal.shape), probs.device
    family = _families(proposal.shape, _Rows(dists.row_of_parent), device)
    nodes, rows, children = family[:, 0], family[:, 1], family[:, 2:]
    target, draft = probs[nodes], dists.probs[rows.clamp_min(0)]
    given = rows[:, None] >= 0
    uniform = _uniform(len(nodes), draws, device, each=children.shape[1])
    choice = torch.full_like(nodes, n)
    for child, drawn in zip(children.unbind(1), uniform.unbind(1), strict=True):
        there = (child >= 0) & (choice == n)
        token = proposal.tokens[child.clamp_min(0)][:, None]
        # A point mass, where the children of this parent were not drawn.
        mass = torch.zeros_like(target).scatter_(1, token, 1.0)
        against = torch.where(given, draft, mass)
        chance, kept = against.gather(1, token)[:, 0], target.gather(1, token)[:, 0]
        accepted = there & (chance > 0) & (drawn * chance < kept)
        choice = torch.where(accepted, child, choice)
        rest = there & ~accepted & (chance > 0)
        point = target.scatter(1, token, 0.0)
        left = torch.where(given, (target - against).clamp_min(0.0), point)
        target = torch.where(rest[:, None], _normed(left, target), target)
        draft = torch.where(there[:, None], _normed(draft.scatter(1, token, 0.0), draft), draft)
    chosen = torch.zeros(n + 1, dtype=torch.bool, device=device)
    chosen[:1] = True
    chosen.index_fill_(0, choice, True)
    return chosen[:n], probs.index_copy(0, nodes, target)


def _normed(left: Tensor, otherwise: Tensor) -> Tensor:
    """Rows summing to 1; `otherwise` where nothing is left."""
    total = left.sum(dim=1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)


class _Rows(dict[int, int]):
    """`DraftDists.row_of_parent` as a key of a cache."""

    def __init__(self, rows: Mapping[int, int]) -> None:
        super().__init__(rows)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@functools.lru_cache(maxsize=64)
def _families(shape: TreeShape, rows: _Rows, device: torch.device) -> Tensor:
    """Per node with children: the node, its row of the drafts' distributions, its children.

    `(m, 2 + most children)` int64; -1 where there is no row or no further child.

    Example: the tree [-1, 0, 0, 1] with rows {0: 0} → [[0, 0, 1, 2], [1, -1, 3, -1]].
    """
    inner = [node for node, children in enumerate(shape.children) if children]
    most = max((len(shape.children[node]) for node in inner), default=0)
    table = torch.full((len(inner), 2 + most), -1)
    for i, node in enumerate(inner):
        children = shape.children[node]
        table[i, : 2 + len(children)] = torch.tensor([node, rows.get(node, -1), *children])
    return upload(table, device)
