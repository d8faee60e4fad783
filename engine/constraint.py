"""Structured output: masks over the target's logits, one per node of a draft tree.

A target under a grammar is another target, which gives forbidden tokens probability 0; all
acceptance rules apply to it. So decoding stays lossless: greedy output and the distribution of
samples are those of plain decoding under the same grammar.

Drafters know nothing of the grammar. What they draft against it is cut before verification, and
where it leaves a single token, that token is drafted for them: the target must accept it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import Sampling
from engine.grammar import Matcher, compile_grammar
from engine.model.target import Target
from engine.proposal import Proposal, TargetOutput
from engine.tree import upload

MAX_FORCED = 32
"""The most tokens that a grammar adds to one draft tree."""


class Constraint:
    """The methods that the decode loop calls at every step, in this order; here, no constraint."""

    def prune(self, proposal: Proposal, max_depth: int) -> Proposal:
        """The proposal without drafts that cannot be accepted, and with those that must be.

        Nothing is added below `max_depth`.
        """
        return proposal

    def mask(self, output: TargetOutput) -> TargetOutput:
        """The target's output for the pruned proposal, with forbidden tokens masked.

        Without `prune` since the last commit, for the root alone.
        """
        return output

    def commit(self, tokens: Sequence[int]) -> None:
        """Extend the text by these tokens."""


def build_constraint(target: Target, sampling: Sampling) -> Constraint:
    """The constraint at the beginning of a text.

    Raises:
        ConfigError: the grammar is not supported, or llguidance is missing.
        TargetError: llguidance cannot read the target's tokenizer.
    """
    if not sampling.constrained:
        return Constraint()
    grammar = compile_grammar(sampling.structured_output, sampling.grammar)
    return GrammarConstraint(Matcher(target.token_texts, grammar), target.eos_ids)


def allowed_after(target: Target, sampling: Sampling, output: Sequence[int]) -> Tensor | None:
    """`(vocab,)` bool, the tokens allowed after some output; None where all are."""
    if not sampling.constrained:
        return None
    constraint = build_constraint(target, sampling)
    constraint.commit(output)
    logits = torch.zeros(1, target.vocab_size)
    return constraint.mask(TargetOutput(logits)).logits[0].isfinite()


class GrammarConstraint(Constraint):
    """A grammar, whose matcher walks down the tree and back from branch to branch."""

    def __init__(self, matcher: Matcher, eos_ids: frozenset[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self._allowed = matcher.allowed()[None]
        self._ended = False

    def prune(self, proposal: Proposal, max_depth: int) -> Proposal:
        """Without forbidden tokens, what lies below them, and what lies below an end of text.

        A forbidden token that was *sampled* stays, as a leaf: its rejection takes its distribution
        out of the residual, as lossless acceptance requires. Where only one token may follow, it
        becomes a deterministic node, sampled or not, and its siblings are removed.
        """
        tokens, parents = proposal.tokens.tolist(), list(proposal.shape.parents)
        depths, num_drafted = proposal.shape.depths.tolist(), len(parents)
        sampled = () if proposal.dists is None else proposal.dists.row_of_parent
        allowed: dict[int, NDArray[np.bool_]] = {}
        nodes, path, stack, decided = list[int](), list[int](), [0], set[int]()
        while stack:  # depth first: every node right before its descendants
            node = stack.pop()
            if node:
                num_above = path.index(parents[node]) + 1
                self._matcher.rollback(len(path) - num_above)
                self._matcher.advance(tokens[node])
                path[num_above:] = []
            path.append(node)
            allowed[node] = self._matcher.allowed() if node else self._allowed[0]
            children = list(proposal.shape.children[node]) if node < num_drafted else []
            if np.count_nonzero(allowed[node]) == 1:
                decided.add(node)
                only = int(allowed[node].argmax())
                children = [child for child in children if tokens[child] == only]
                room = depths[node] < max_depth and len(tokens) < num_drafted + MAX_FORCED
                if not children and room:
                    children = [len(tokens)]
                    tokens.append(only)
                    parents.append(node)
                    depths.append(depths[node] + 1)
            for child in reversed(children):
                forbidden = not allowed[node][tokens[child]]
                if node in sampled or not forbidden:
                    nodes.append(child)
                if not (forbidden or tokens[child] in self._eos_ids):
                    stack.append(child)
        self._matcher.rollback(len(path) - 1)
        nodes = [0, *sorted(nodes)]
        anything = np.ones_like(allowed[0])  # after an end of text, no token counts
        self._allowed = np.stack([allowed.get(node, anything) for node in nodes])
        kept = [node for node in nodes if node < num_drafted]
        index = {node: i for i, node in enumerate(nodes)}
        forced = [(tokens[node], index[parents[node]]) for node in nodes[len(kept) :]]
        if decided & {*sampled}:
            proposal = proposal.as_deterministic(decided)
        pruned = proposal if len(kept) == num_drafted else proposal.keep(kept)
        return pruned.add_forced(forced) if forced else pruned

    def mask(self, output: TargetOutput) -> TargetOutput:
        allowed = upload(torch.from_numpy(self._allowed), output.logits.device)
        logits = output.logits[: len(allowed)].masked_fill(~allowed, -torch.inf)
        return replace(output, logits=logits, best=None, logsumexp=None)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._ended = self._ended or token in self._eos_ids
            if not self._ended:
                self._matcher.advance(token)
        if not self._ended:
            self._allowed = self._matcher.allowed()[None]
