"""What the lossless rule decides by: two numbers for every node, and the token drawn after it.

On the host they are computed for the nodes that the walk down the tree reaches, when it reaches
them: a softmax of the whole vocabulary takes too long to be wasted on others. On an accelerator,
every value that the host reads waits for all work queued before it. But how many random numbers are
used on the way to a node follows from the tree alone, and so does the residual distribution after a
node's first children were rejected: there, all nodes are computed before any decision, as columns
that the host reads in one copy. Both compute them by `rejections` and `block_probs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from engine.config import Sampling
from engine.errors import TargetError
from engine.proposal import DraftDists, Proposal
from engine.sampling import (
    NOT_FINITE,
    SeededDraws,
    inverse_cdf,
    normalize,
    probabilities,
    upload_numbers,
    widest_float,
)
from engine.tree import TreeShape, upload

Child = tuple[int, float, float | None]
"""A node, the target's probability of its token and the drafter's, given that its earlier siblings
were rejected; the drafter's is None for a deterministic draft, whose earlier siblings still have
their probability."""


@dataclass(slots=True)
class Readout:
    """What the lossless rule reads of a verified tree.

    Attributes:
        logits: `(n, vocab)` of the target after each node.
        columns: of `device_columns`; empty where each node is computed when it is read.
    """

    shape: TreeShape
    tokens: Sequence[int]
    logits: Tensor
    dists: DraftDists | None
    sampling: Sampling
    columns: Sequence[Sequence[float]] = ()
    _next_probs: Mapping[int, Tensor] = field(default_factory=dict)

    def children(self, node: int) -> Iterator[Child]:
        """The children of a node in their order, each read if the earlier ones were rejected."""
        row = None if self.dists is None else self.dists.row_of_parent.get(node)
        children = self.shape.children[node]
        if self.columns:
            target, draft, _ = self.columns
            for child in children:
                yield child, target[child], None if row is None else draft[child]
            return
        probs = probabilities(self.logits[node : node + 1], self.sampling)
        self._next_probs = {node: probs[0]}
        if not children:  # though it may have had some, which the controller left out
            return
        tokens = _index(probs.device, [self.tokens[child] for child in children])
        if self.dists is None or row is None:
            for child, own in zip(children, probs[0, tokens].tolist(), strict=True):
                yield child, own, None
            take_out(probs, torch.zeros_like(tokens), tokens)
            return
        tried = rejections(probs, self.dists.probs[[row]], tokens.split(1))
        for child, (target_prob, draft_prob) in zip(children, tried, strict=True):
            yield child, float(target_prob), float(draft_prob)

    def block(self) -> tuple[Sequence[float], Sequence[float]]:
        """p(i) and h(i) of `block_probs`."""
        if self.columns:
            return self.columns[0], self.columns[1]
        assert self.dists is not None
        tokens = torch.tensor(self.tokens, device=self.logits.device)
        chances, accept_probs, probs = block_probs(tokens, self.dists, self.logits, self.sampling)
        self._next_probs = dict(enumerate(probs))
        return chances.tolist(), accept_probs.tolist()

    def next_token(self, node: int, draws: SeededDraws) -> int:
        """The token drawn after a node whose children, if it has any, were rejected.

        Raises TargetError: the logits are not finite.
        """
        if not self.columns:
            return draws.pick(self._next_probs[node])
        draws.uniform()  # the number that the token was drawn with
        token = int(self.columns[2][node])
        if token < 0:
            raise TargetError(NOT_FINITE)
        return token


def device_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws, *, as_block: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`(n,)` each: the probabilities of `Child`, 0 for the drafter's of deterministic drafts, or
    with `as_block` those of `block_probs`; and the token drawn after each node, -1 where the logits
    are not finite."""
    if not as_block:
        return _tree_columns(proposal, logits, sampling, draws)
    assert proposal.dists is not None
    chances, accept_probs, probs = block_probs(proposal.tokens, proposal.dists, logits, sampling)
    numbers = upload_numbers(draws.peek(len(logits)), logits.device)
    # The first impossible draft ends the walk, and with it the use of random numbers.
    num_used = (chances[1:] > 0).sum()
    uniform = numbers.gather(0, num_used[None]).expand(len(logits))
    return chances, accept_probs, _sample_rows(probs, uniform)


def rejections(
    probs: Tensor, draft_probs: Tensor, tokens: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of m nodes, the target's and the drafter's probability of their first sampled children, then
    of their second ones if the first were rejected, and so on: `(m,)` each, less for later ones.

    At the end, `probs` holds the distributions after all of them were rejected: a rejection leaves
    max(target - draft, 0), and the siblings were drawn without the rejected one.

    Args:
        probs: `(m, vocab)` of the target, which are changed; nodes with most children come first.
        draft_probs: `(m, vocab)` that children were sampled from, which are changed.
        tokens: of the first child of each node, of the second one of those that have any, ….
    """
    for of_rank in tokens:
        child, target, draft = of_rank[:, None], probs[: len(of_rank)], draft_probs[: len(of_rank)]
        draft_prob = draft.gather(1, child)
        yield target.gather(1, child)[:, 0], draft_prob[:, 0]
        residual = normalize((target - draft).clamp_min(0.0), target)
        probs[: len(of_rank)] = torch.where(draft_prob > 0, residual, target)
        draft_probs[: len(of_rank)] = normalize(draft.scatter(1, child, 0.0), draft)


def take_out(probs: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Change `probs (m, vocab)` to what they are once deterministic drafts were rejected.

    Args:
        rows, tokens: `(n,)`, of each draft.
    """
    rest = probs.index_put((rows, tokens), torch.zeros_like(tokens, dtype=probs.dtype))
    probs.copy_(normalize(rest, probs))


def block_probs(
    tokens: Tensor, dists: DraftDists, logits: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """For block verification of a sampled chain of n - 1 draft tokens, for prefixes of 0 … n - 1.

    With p(0) = 1 and p(i) = min(1, p(i-1) · target(i) / draft(i)) for the i-th draft token, the
    prefix of i tokens is accepted with probability h(i) = r(i) / (r(i) + 1 - p(i)), the whole chain
    with p(i); r(i) is the sum of the residual max(p(i) · target - draft, 0) at the next position,
    from which the next token is drawn if that prefix is the longest. Later tokens can make up for
    an earlier one, so on average at least as many are accepted as token by token.
    Source: arXiv:2403.10444, Alg. 2.

    Example: one drafted token, target .6, draft .8: accepted with .75, as token by token.

    Returns:
        p(i) and h(i), `(n,)` in the widest float; `(n, vocab)` distributions of the next token.
    """
    num_drafted, device = len(logits) - 1, logits.device
    probs = probabilities(logits, sampling)
    rows = _index(device, [dists.row_of_parent[node] for node in range(num_drafted)])
    draft_probs, drafted = dists.probs[rows], tokens[1:, None]
    wide = widest_float(device)
    target = probs[:-1].gather(1, drafted)[:, 0].to(wide)
    draft = draft_probs.gather(1, drafted)[:, 0].to(wide)
    chain = [torch.ones((), dtype=wide, device=device)]
    for i in range(num_drafted):
        chance = (chain[-1] * target[i] / draft[i]).clamp_max(1.0)
        chain.append(torch.where(draft[i] > 0, chance, 0.0))
    chances = torch.stack(chain)
    residual = (chances[:-1, None].float() * probs[:-1] - draft_probs).clamp_min(0.0)
    mass = residual.sum(dim=-1).to(wide)
    total = mass + 1 - chances[:-1]
    accept_probs = torch.cat([torch.where(total > 0, mass / total, 1.0), chances[-1:]])
    return chances, accept_probs, torch.cat([normalize(residual, probs[:-1]), probs[-1:]])


def _tree_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws
) -> tuple[Tensor, Tensor, Tensor]:
    children, dists, device = proposal.shape.children, proposal.dists, logits.device
    probs = probabilities(logits, sampling)
    target, draft = torch.ones(len(logits), device=device), torch.zeros(len(logits), device=device)
    row_of = {} if dists is None else dists.row_of_parent
    inner = sorted(
        filter(children.__getitem__, range(len(children))), key=lambda i: -len(children[i])
    )
    for is_sampled in (False, True):
        parents = [node for node in inner if (node in row_of) == is_sampled]
        if not parents:
            continue
        rows = _index(device, parents)
        left = probs[rows]
        if dists is None or not is_sampled:
            pairs = [(i, child) for i, node in enumerate(parents) for child in children[node]]
            parent, child = upload(torch.tensor(pairs).T, device)
            tokens = proposal.tokens[child]
            target[child] = left[parent, tokens]
            take_out(left, parent, tokens)
        else:
            ranked = (
                [one for one in each if one is not None]
                for each in zip_longest(*map(children.__getitem__, parents))
            )
            nodes = [_index(device, of_rank) for of_rank in ranked]
            draft_probs = dists.probs[_index(device, [row_of[node] for node in parents])]
            tried = rejections(left, draft_probs, [proposal.tokens[of_rank] for of_rank in nodes])
            for of_rank, (target_prob, draft_prob) in zip(nodes, tried, strict=True):
                target[of_rank], draft[of_rank] = target_prob, draft_prob
        probs[rows] = left
    num_used = _num_draws(proposal.shape)
    numbers = draws.peek(max(num_used) + 1)
    uniform = upload_numbers([numbers[i] for i in num_used], device)
    return target, draft, _sample_rows(probs, uniform)


def _num_draws(shape: TreeShape) -> list[int]:
    """Random numbers used before the one that draws the token after each node.

    Example: a root with two children, the second of them with one: [2, 1, 3, 4]. The root's
    children are decided by numbers 0 and 1, the child of the second by number 2.
    """
    before = [0] * len(shape)
    for node, children in enumerate(shape.children):
        for rank, child in enumerate(children):
            before[child] = before[node] + rank + 1
    return [count + len(children) for count, children in zip(before, shape.children, strict=True)]


def _sample_rows(probs: Tensor, uniform: Tensor) -> Tensor:
    """`(n,)` tokens, one drawn from each row of `probs (n, vocab)`; -1 where it is not finite."""
    return torch.where(probs.sum(dim=-1).isfinite(), inverse_cdf(probs, uniform), -1)


def _index(device: torch.device, nodes: Sequence[int]) -> Tensor:
    """`(len(nodes),)` int64."""
    return upload(torch.tensor(nodes, dtype=torch.int64), device)
