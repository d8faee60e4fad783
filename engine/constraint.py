"""What a text may be: masks over the target's logits, one per node of a draft tree.

The target under a grammar is a target of its own: the tokens that the grammar forbids have
probability 0, and all acceptance rules apply to what is left. So decoding stays lossless: greedy
output and the law of samples are those of plain decoding under the same grammar.

Drafters know nothing of the grammar. What they draft against it is cut before it is verified, and
where it leaves one token only, that token is drafted for them: the target cannot but accept it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import Sampling
from engine.grammar import Matcher, compiled
from engine.model.target import Target
from engine.proposal import Proposal, TargetOutput
from engine.tree import upload

MOST_FORCED = 32
"""Tokens that a grammar adds to one draft tree."""


class Constraint:
    """What the decode loop asks of a constraint, in this order at every step; this one is none."""

    def prune(self, proposal: Proposal, max_depth: int) -> Proposal:
        """The proposal without the drafts that can never be accepted, and with those that must be.

        Nothing is added below `max_depth`.
        """
        return proposal

    def mask(self, output: TargetOutput) -> TargetOutput:
        """What the target says at every node of that proposal, held to the constraint.

        Without `prune` since the last commit: of the root alone.
        """
        return output

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""


def constraint_of(target: Target, sampling: Sampling) -> Constraint:
    """The constraint of a text that begins.

    Raises:
        ConfigError: the grammar cannot be followed, or llguidance is missing.
        TargetError: the target's tokenizer cannot be read for it.
    """
    if not sampling.constrained:
        return Constraint()
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


class Structured(Constraint):
    """A grammar. Its matcher walks down the tree and back, so siblings never see each other."""

    def __init__(self, matcher: Matcher, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self._allowed = matcher.allowed()[None]
        self._ended = False

    def prune(self, proposal: Proposal, max_depth: int) -> Proposal:
        """Without what the grammar forbids, and what lies below that or below the text's end.

        A forbidden token that was *drawn* stays, as a leaf: rejecting it takes its distribution
        out of the residual, as lossless acceptance must. Where one token only may follow, nothing
        is left to chance: it is a node of its own, drawn or not, and its siblings go.
        """
        tokens, parents = proposal.tokens.tolist(), list(proposal.shape.parents)
        depths, num_drafted = proposal.shape.depths.tolist(), len(parents)
        drawn = () if proposal.dists is None else proposal.dists.row_of_parent
        allowed: dict[int, NDArray[np.bool_]] = {}
        nodes, path, stack, certain = list[int](), list[int](), [0], set[int]()
        while stack:  # every node right before what lies below it
            node = stack.pop()
            if node:
                above = path.index(parents[node]) + 1
                self._matcher.back(len(path) - above)
                self._matcher.go(tokens[node])
                path[above:] = []
            path.append(node)
            allowed[node] = self._matcher.allowed() if node else self._allowed[0]
            children = list(proposal.shape.children[node]) if node < num_drafted else []
            if np.count_nonzero(allowed[node]) == 1:
                certain.add(node)
                only = int(allowed[node].argmax())
                children = [child for child in children if tokens[child] == only]
                room = depths[node] < max_depth and len(tokens) < num_drafted + MOST_FORCED
                if not children and room:
                    children = [len(tokens)]
                    tokens.append(only)
                    parents.append(node)
                    depths.append(depths[node] + 1)
            for child in reversed(children):
                forbidden = not allowed[node][tokens[child]]
                if node in drawn or not forbidden:
                    nodes.append(child)
                if not (forbidden or tokens[child] in self._eos_ids):
                    stack.append(child)
        self._matcher.back(len(path) - 1)
        nodes = [0, *sorted(nodes)]
        anything = np.ones_like(allowed[0])  # after the end nothing counts
        self._allowed = np.stack([allowed.get(node, anything) for node in nodes])
        old = [node for node in nodes if node < num_drafted]
        place = {node: i for i, node in enumerate(nodes)}
        new = [(tokens[node], place[parents[node]]) for node in nodes[len(old) :]]
        if certain & {*drawn}:
            proposal = proposal.not_drawn(certain)
        pruned = proposal if len(old) == num_drafted else proposal.keep(old, with_extra=True)
        return pruned.grow(new) if new else pruned

    def mask(self, output: TargetOutput) -> TargetOutput:
        allowed = upload(torch.from_numpy(self._allowed), output.logits.device)
        logits = output.logits[: len(allowed)].masked_fill(~allowed, -torch.inf)
        return replace(output, logits=logits, best=None, logsumexp=None)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ended = self._ended or token in self._eos_ids
            if not self._ended:
                self._matcher.go(token)
        if not self._ended:
            self._allowed = self._matcher.allowed()[None]
