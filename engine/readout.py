"""What the host decides acceptance by, computed on the device for every node of a draft tree.

On an accelerator each value that the host reads waits for all that was launched before it. How many
random numbers were used on the way to a node follows from the tree alone, and so does what is left
of the target's distribution after a node's first children were rejected: no decision is needed to
compute either. The host reads the columns below in one copy and walks the tree with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import Sampling
from engine.proposal import DraftDists, Proposal
from engine.sampling import SeededDraws, inverse_cdf, normalised, probabilities
from engine.tree import TreeShape, upload

Columns = tuple[Tensor, Tensor, Tensor]


def tree_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws
) -> Columns:
    """For token-by-token verification, `(n,)` each.

    Returns:
        The probability of every node's token when its turn comes, that is after its earlier
        siblings were rejected, by the target and by the drafter (0 where it was not drawn; without
        `DraftDists` earlier siblings are not taken out); and the token that is drawn after every
        node if none of its children is accepted.
    """
    probs = probabilities(logits, sampling)
    target = torch.ones(len(logits), device=logits.device)
    draft = torch.zeros_like(target)
    _judge_certain(proposal, probs, target)
    if proposal.dists is not None:
        _judge_drawn(proposal, proposal.dists, probs, target, draft)
    used = _numbers_used(proposal.shape)
    numbers = draws.ahead(max(used) + 1)
    uniform = torch.tensor([numbers[i] for i in used], dtype=torch.float64)
    return target, draft, _picked(probs, upload(uniform, logits.device))


def _judge_certain(proposal: Proposal, probs: Tensor, target: Tensor) -> None:
    """Nodes that follow from the context: their probabilities, and `probs` without them."""
    drawn = {} if proposal.dists is None else proposal.dists.row_of_parent
    parents = proposal.shape.parents
    nodes = [node for node in range(1, len(parents)) if parents[node] not in drawn]
    if not nodes:
        return
    above = [parents[node] for node in nodes]
    rows, children = _index(probs.device, above, nodes)
    tokens = proposal.tokens[children]
    target[children] = probs[rows, tokens]
    (inner,) = _index(probs.device, sorted(set(above)))
    before = probs[inner]
    probs[rows, tokens] = torch.zeros_like(tokens, dtype=probs.dtype)
    probs[inner] = normalised(probs[inner], before)


def _judge_drawn(
    proposal: Proposal, dists: DraftDists, probs: Tensor, target: Tensor, draft: Tensor
) -> None:
    """Nodes that were drawn, a child of every parent at a time; `probs` become the residuals."""
    children = proposal.shape.children
    parents = [node for node in dists.row_of_parent if children[node]]
    (rows,) = _index(probs.device, [dists.row_of_parent[node] for node in parents])
    left = dists.probs[rows]
    for turn in range(max((len(children[node]) for node in parents), default=0)):
        places = [i for i, node in enumerate(parents) if len(children[node]) > turn]
        above = [parents[i] for i in places]
        place, row, node = _index(probs.device, places, above, [children[p][turn] for p in above])
        tokens = proposal.tokens[node][:, None]
        mine, theirs = probs[row], left[place]
        chance = theirs.gather(1, tokens)
        target[node], draft[node] = mine.gather(1, tokens)[:, 0], chance[:, 0]
        residual = normalised((mine - theirs).clamp_min(0.0), mine)
        probs[row] = torch.where(chance > 0, residual, mine)
        left[place] = normalised(theirs.scatter(1, tokens, 0.0), theirs)


def block_columns(
    proposal: Proposal, logits: Tensor, sampling: Sampling, draws: SeededDraws
) -> Columns:
    """For block verification of a drawn chain (`engine.accept`), `(n,)` each.

    Returns:
        p(i), h(i) and the token that is drawn after the prefix of i drafts, if it is the longest.
    """
    assert proposal.dists is not None
    count, device = len(logits) - 1, logits.device
    probs = probabilities(logits, sampling)
    (rows,) = _index(device, [proposal.dists.row_of_parent[node] for node in range(count)])
    draft_probs, tokens = proposal.dists.probs[rows], proposal.tokens[1:, None]
    target = probs[:-1].gather(1, tokens)[:, 0].double()
    draft = draft_probs.gather(1, tokens)[:, 0].double()
    chain = [torch.ones((), dtype=torch.float64, device=device)]
    for i in range(count):
        chance = (chain[-1] * target[i] / draft[i]).clamp_max(1.0)
        chain.append(torch.where(draft[i] > 0, chance, 0.0))
    chances = torch.stack(chain)
    residual = (chances[:-1, None].float() * probs[:-1] - draft_probs).clamp_min(0.0)
    mass = residual.sum(dim=-1).double()
    bar = mass + 1 - chances[:-1]
    accepts = torch.cat([torch.where(bar > 0, mass / bar, 1.0), chances[-1:]])
    rest = torch.cat([normalised(residual, probs[:-1]), probs[-1:]])
    # The first impossible draft ends the walk, and with it the use of random numbers.
    used = (chances[1:] > 0).sum()
    numbers = upload(torch.tensor(draws.ahead(count + 1), dtype=torch.float64), device)
    return chances, accepts, _picked(rest, numbers.gather(0, used[None]).expand(count + 1))


def _numbers_used(shape: TreeShape) -> list[int]:
    """How many random numbers come before the one that draws a node's next token.

    Example: a root with two children, the second of them with one: [2, 1, 3, 4]. The root's pair
    is judged by numbers 0 and 1, the child of the second by number 2.
    """
    before = [0] * len(shape)
    for node, children in enumerate(shape.children):
        for turn, child in enumerate(children):
            before[child] = before[node] + turn + 1
    return [at + len(children) for at, children in zip(before, shape.children, strict=True)]


def _picked(probs: Tensor, uniform: Tensor) -> Tensor:
    """A token `(n,)` drawn from every row of `probs (n, vocab)`; -1 where they are not finite."""
    return torch.where(probs.sum(dim=-1).isfinite(), inverse_cdf(probs, uniform), -1)


def _index(device: torch.device, *rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Equally many numbers each, on a device."""
    return upload(torch.tensor(rows, dtype=torch.int64), device).unbind(0)
