"""The columns that the host needs to decide acceptance, computed on the device for all nodes.

On an accelerator, every value that the host reads waits for all work queued before it. But how many
random numbers are used on the way to a node follows from the tree alone, and so does the residual
distribution after a node's first children were rejected: both can be computed before any decision.
The host reads the columns below in one copy and walks the tree with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import Sampling
from engine.proposal import DraftDists, Proposal
from engine.sampling import SeededDraws, inverse_cdf, normalize, probabilities, upload_numbers
from engine.tree import TreeShape, upload

Columns = tuple[Tensor, Tensor, Tensor]


def tree_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws
) -> Columns:
    """For token-by-token verification, `(n,)` each.

    Returns:
        The target's and the drafter's probability of each node's token after its earlier siblings
        were rejected (the drafter's is 0 for tokens that were not sampled; without `DraftDists`
        earlier siblings are not taken out); and the token that is drawn after each node if none of
        its children is accepted.
    """
    probs = probabilities(logits, sampling)
    target = torch.ones(len(logits), device=logits.device)
    draft = torch.zeros_like(target)
    _take_deterministic(proposal, probs, target)
    if proposal.dists is not None:
        _take_sampled(proposal, proposal.dists, probs, target, draft)
    num_used = _num_draws(proposal.shape)
    numbers = draws.peek(max(num_used) + 1)
    uniform = upload_numbers([numbers[i] for i in num_used], logits.device)
    return target, draft, _sample_rows(probs, uniform)


def _take_deterministic(proposal: Proposal, probs: Tensor, target: Tensor) -> None:
    """Fill in `target` for deterministic drafts, and take their mass out of `probs`."""
    sampled = {} if proposal.dists is None else proposal.dists.row_of_parent
    parents = proposal.shape.parents
    nodes = [node for node in range(1, len(parents)) if parents[node] not in sampled]
    if not nodes:
        return
    parents_of_nodes = [parents[node] for node in nodes]
    rows, children = _index(probs.device, parents_of_nodes, nodes)
    tokens = proposal.tokens[children]
    target[children] = probs[rows, tokens]
    (inner,) = _index(probs.device, sorted(set(parents_of_nodes)))
    before = probs[inner]
    probs[rows, tokens] = torch.zeros_like(tokens, dtype=probs.dtype)
    probs[inner] = normalize(probs[inner], before)


def _take_sampled(
    proposal: Proposal, dists: DraftDists, probs: Tensor, target: Tensor, draft: Tensor
) -> None:
    """The same for sampled drafts, one child of every parent at a time."""
    children = proposal.shape.children
    parents = [node for node in dists.row_of_parent if children[node]]
    (rows,) = _index(probs.device, [dists.row_of_parent[node] for node in parents])
    draft_dists = dists.probs[rows]
    for rank in range(max((len(children[node]) for node in parents), default=0)):
        indices = [i for i, node in enumerate(parents) if len(children[node]) > rank]
        trying = [parents[i] for i in indices]
        nodes = [children[parent][rank] for parent in trying]
        index, row, node = _index(probs.device, indices, trying, nodes)
        tokens = proposal.tokens[node][:, None]
        target_probs, draft_probs = probs[row], draft_dists[index]
        draft_prob = draft_probs.gather(1, tokens)
        target[node], draft[node] = target_probs.gather(1, tokens)[:, 0], draft_prob[:, 0]
        residual = normalize((target_probs - draft_probs).clamp_min(0.0), target_probs)
        probs[row] = torch.where(draft_prob > 0, residual, target_probs)
        draft_dists[index] = normalize(draft_probs.scatter(1, tokens, 0.0), draft_probs)


def block_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws
) -> Columns:
    """For block verification of a sampled chain (`engine.accept`), `(n,)` each.

    Returns:
        p(i), h(i) and the token that is drawn after the prefix of i tokens, if it is the longest.
    """
    assert proposal.dists is not None
    num_drafted, device = len(logits) - 1, logits.device
    probs = probabilities(logits, sampling)
    (rows,) = _index(device, [proposal.dists.row_of_parent[node] for node in range(num_drafted)])
    draft_probs, tokens = proposal.dists.probs[rows], proposal.tokens[1:, None]
    numbers = upload_numbers(draws.peek(num_drafted + 1), device)
    wide = numbers.dtype
    target = probs[:-1].gather(1, tokens)[:, 0].to(wide)
    draft = draft_probs.gather(1, tokens)[:, 0].to(wide)
    chain = [torch.ones((), dtype=wide, device=device)]
    for i in range(num_drafted):
        chance = (chain[-1] * target[i] / draft[i]).clamp_max(1.0)
        chain.append(torch.where(draft[i] > 0, chance, 0.0))
    chances = torch.stack(chain)
    residual = (chances[:-1, None].float() * probs[:-1] - draft_probs).clamp_min(0.0)
    mass = residual.sum(dim=-1).to(wide)
    total = mass + 1 - chances[:-1]
    accept_probs = torch.cat([torch.where(total > 0, mass / total, 1.0), chances[-1:]])
    next_probs = torch.cat([normalize(residual, probs[:-1]), probs[-1:]])
    # The first impossible draft ends the walk, and with it the use of random numbers.
    num_used = (chances[1:] > 0).sum()
    uniform = numbers.gather(0, num_used[None]).expand(num_drafted + 1)
    return chances, accept_probs, _sample_rows(next_probs, uniform)


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


def _index(device: torch.device, *rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Index tensors of equal length, on a device."""
    return upload(torch.tensor(rows, dtype=torch.int64), device).unbind(0)
