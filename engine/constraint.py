"""What a text may be: masks over the target's logits, one per node of a draft tree.

The target under a grammar is a target of its own: the tokens that the grammar forbids have
probability 0, and all acceptance rules apply to what is left. So decoding stays lossless: greedy
output and the law of samples are those of plain decoding under the same grammar.

Drafters know nothing of the grammar. What they draft against it is cut before it is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config import Sampling
from engine.grammar import Matcher, compiled
from engine.model.target import Target
from engine.proposal import Proposal, TargetOutput
from engine.tree import TreeShape


class Constraint(Protocol):
    """What the decode loop asks of a constraint, in this order at every step."""

    def prune(self, proposal: Proposal) -> Proposal:
        """The proposal without the drafts that can never be accepted."""

    def mask(self, output: TargetOutput) -> TargetOutput:
        """What the target says at every node of that proposal, held to the constraint.

        Without `prune` since the last commit: of the root alone.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""


def constraint_of(target: Target, sampling: Sampling) -> Constraint:
    """The constraint of a text that begins.

    Raises:
        ConfigError: the grammar cannot be followed, or llguidance is missing.
        TargetError: the target's tokenizer cannot be read for it.
    """
    if not sampling.constrained:
        return Free()
    grammar = compiled(sampling.structured_output, sampling.grammar)
    return Structured(Matcher(target.token_texts, grammar), target.eos_ids)


def allowed_after(target: Target, sampling: Sampling, output: Sequence[int]) -> Tensor | None:
    """`(vocab,)` bool: tokens that may come after some output; None where all may."""
    if not sampling.constrained:
        return None
    constraint = constraint_of(target, sampling)
    constraint.commit(output)
    one = torch.zeros(1, target.vocab_size)
    return constraint.mask(TargetOutput(one)).logits[0].isfinite()


class Free:
    """No constraint."""

    def prune(self, proposal: Proposal) -> Proposal:
        return proposal

    def mask(self, output: TargetOutput) -> TargetOutput:
        return output

    def commit(self, tokens: Sequence[int]) -> None:
        pass


class Structured:
    """A grammar. Its matcher walks down the tree and back, so siblings never see each other."""

    def __init__(self, matcher: Matcher, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self._allowed = matcher.allowed()[None]
        self._ended = False

    def prune(self, proposal: Proposal) -> Proposal:
        """Without what the grammar forbids, and what lies below that or below the text's end.

        A forbidden token that was *drawn* stays, as a leaf: rejecting it takes its distribution
        out of the residual, as lossless acceptance must.
        """
        tokens, shape, dists = proposal.tokens.tolist(), proposal.shape, proposal.dists
        drawn = () if dists is None else dists.row_of_parent
        allowed = {0: self._allowed[0]}
        kept, path = [0], [0]
        for node in _depth_first(shape):
            parent = shape.parents[node]
            if parent not in allowed:
                continue
            forbidden = not allowed[parent][tokens[node]]
            if parent in drawn or not forbidden:
                kept.append(node)
            if forbidden or tokens[node] in self._eos_ids:
                continue
            above = path.index(parent) + 1
            self._matcher.back(len(path) - above)
            self._matcher.go(tokens[node])
            path[above:] = [node]
            allowed[node] = self._matcher.allowed()
        self._matcher.back(len(path) - 1)
        kept.sort()
        anything = np.ones_like(allowed[0])  # after the end nothing counts
        self._allowed = np.stack([allowed.get(node, anything) for node in kept])
        return proposal if len(kept) == len(shape) else proposal.keep(kept, with_extra=True)

    def mask(self, output: TargetOutput) -> TargetOutput:
        allowed = torch.from_numpy(self._allowed).to(output.logits.device)
        logits = output.logits[: len(allowed)].masked_fill(~allowed, -torch.inf)
        return replace(output, logits=logits, best=None, log_totals=None)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ended = self._ended or token in self._eos_ids
            if not self._ended:
                self._matcher.go(token)
        if not self._ended:
            self._allowed = self._matcher.allowed()[None]


def _depth_first(shape: TreeShape) -> list[int]:
    """All nodes but the root, every one right before what lies below it.

    Example: parents (-1, 0, 0, 1) → 1, 3, 2.
    """
    order: list[int] = []
    waiting = [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(shape.children[node])
    return order[1:]
