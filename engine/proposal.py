"""The values that the decode loop, the target and a drafter exchange within a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.steps import Bypass
from engine.tree import MAX_NODES, TreeShape, upload


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one step may draft.

    Attributes:
        depth: tokens of the longest path.
        width: children per node.
        min_prob: paths less probable than this need not be drafted further.
    """

    depth: int
    width: int = MAX_NODES
    min_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class Needs:
    """The target's features that a drafter uses."""

    hidden: bool = False
    """Last hidden state, after the final norm: what the target's `lm_head` reads."""
    layers: tuple[int, ...] = ()
    """Inputs of these decoder layers (0-based), i.e. entries of transformers' `hidden_states`.

    An index equal to the number of layers is the last layer's output, before the final norm.
    """
    shared: tuple[int, ...] = ()
    """Keys and values of these decoder layers, of the whole text."""
    logits: bool = field(default=False, compare=False)
    """Logits of committed rows, also of steps that the drafter did not draft for. Every forward has
    them, so they make no difference to it."""

    @property
    def has_features(self) -> bool:
        """Whether hidden states are needed, of every row."""
        return self.hidden or bool(self.layers)


SharedRows = tuple[Tensor, Tensor]
"""A layer's keys and values `(1, kv_heads, rows, head_dim)`, to be read only.

After every commit the committed rows come first. These are the cache's own tensors, valid until the
next forward.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TargetOutput:
    """The target's output for the rows of one forward, on the target's device.

    Attributes:
        logits: `(rows, vocab)` in the target's dtype or float32; after prefill only the last
            prompt row.
        hidden: `(rows, hidden)` if `Needs.hidden`; after prefill every prompt row.
        layers: `(rows, len(Needs.layers) * hidden)`, concatenated in the order of `Needs.layers`.
        logsumexp: `(rows,)` float32, logsumexp of the logits, if the forward computed it.
        best: `(rows,)` int64, argmax of the logits, likewise.
        shared: of every layer in `Needs.shared`.
    """

    logits: Tensor
    hidden: Tensor | None = None
    layers: Tensor | None = None
    logsumexp: Tensor | None = None
    best: Tensor | None = None
    shared: tuple[SharedRows, ...] = ()

    def argmax(self) -> list[int]:
        """The most probable token after every row."""
        best = self.logits.argmax(dim=-1) if self.best is None else self.best
        tokens: list[int] = best.tolist()
        return tokens

    @property
    def features(self) -> TargetOutput:
        """Without logits, whose memory is not kept either."""
        return TargetOutput(self.logits.new_empty(0), self.hidden, self.layers)

    @property
    def num_feature_rows(self) -> int:
        features = self.hidden if self.layers is None else self.layers
        return 0 if features is None else len(features)

    @property
    def feature_bytes(self) -> int:
        return sum(0 if x is None else x.nbytes for x in (self.hidden, self.layers))

    def at(self, rows: Sequence[int] | slice) -> TargetOutput:
        """Logits and features of these rows alone; logits stay empty where they were dropped.

        Rows that are named one by one are copied, so that the others' memory is freed.
        """
        index = rows if isinstance(rows, slice) else upload(torch.tensor(rows), self.logits.device)
        hidden, layers = (x if x is None else x[index] for x in (self.hidden, self.layers))
        return TargetOutput(self.logits[index] if len(self.logits) else self.logits, hidden, layers)

    @classmethod
    def joined(cls, outputs: Sequence[TargetOutput]) -> TargetOutput:
        """Logits and features of several forwards, concatenated."""
        return cls(
            torch.cat([output.logits for output in outputs]),
            joined(output.hidden for output in outputs),
            joined(output.layers for output in outputs),
        )


def joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The concatenation of all tensors that are not None; None where none is left."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRows:
    """Rows of the verify forward that are not draft tokens, e.g. lookahead's window.

    Attributes:
        tokens: `(m,)` int64.
        depths: `(m,)` int64; position = root's position + depth.
        visible: `(m, n + m)` bool over tree nodes, then extra rows; itself included.
        max_depth: the largest of `depths`.
    """

    tokens: Tensor
    depths: Tensor
    visible: Tensor
    max_depth: int

    def for_nodes(self, nodes: Sequence[int]) -> ExtraRows:
        """The same rows for a tree of which only these nodes are left."""
        m = len(self.tokens)
        n = self.visible.shape[1] - m
        columns = upload(torch.tensor([*nodes, *range(n, n + m)]), self.visible.device)
        return replace(self, visible=self.visible[:, columns])


@dataclass(frozen=True, slots=True, eq=False)
class DraftDists:
    """The distributions that sampled draft tokens were drawn from, for lossless verification.

    `probs[row_of_parent[node]]` `(vocab,)` float32 is what the children of `node` were drawn from,
    in child order, without replacement.
    """

    probs: Tensor
    row_of_parent: dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A draft tree, with extra rows to feed along with it if there are any.

    Attributes:
        tokens: `(n,)` int64 token of every node; node 0 is the root. Siblings differ.
        shape: topology of the n nodes.
        ranks: rank of every node among its parent's candidates (root 0); None = order of siblings.
        draft_probs: `(n,)` float32 probability the drafter gave each node's token (root ignored);
            None where it has none.
        dists: the distributions of tokens that were *sampled*. None means the tokens follow from
            the context alone, and verification treats each as a point mass.
        extra: rows that are not draft tokens.
        decision: the controller's decision for this step, for readers.
        expected: the controller's estimate of tokens committed and seconds taken by this step.
        bypass: why there are no drafts; None where there are, or the drafter found none.
        num_forced: nodes that a grammar added, after all others.
    """

    tokens: Tensor
    shape: TreeShape
    ranks: Sequence[int] | None = None
    draft_probs: Tensor | None = None
    dists: DraftDists | None = None
    extra: ExtraRows | None = None
    decision: str = ""
    expected: tuple[float, float] | None = None
    bypass: Bypass | None = None
    num_forced: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.shape) + (0 if self.extra is None else len(self.extra.tokens))

    def sibling_ranks(self) -> tuple[int, ...]:
        """`ranks`, or else every node's position among its siblings."""
        if self.ranks is not None:
            return tuple(self.ranks)
        ranks = [0] * len(self.shape)
        for siblings in self.shape.children:
            for rank, node in enumerate(siblings):
                ranks[node] = rank
        return tuple(ranks)

    def token_probs(self) -> Sequence[float | None]:
        """`draft_probs` on the host; None for each node where the drafter has none."""
        if self.draft_probs is None:
            return [None] * len(self.shape)
        probs: list[float] = self.draft_probs.tolist()
        return probs

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """All rows to feed: tokens `(r,)`, depths `(r,)`, attention mask `(r, r)` bool."""
        depths, ancestors = self.shape.on(self.tokens.device)
        if self.extra is None:
            return self.tokens, depths, ancestors
        n, m = len(self.shape), len(self.extra.tokens)
        nodes = torch.cat([ancestors, ancestors.new_zeros(n, m)], dim=1)
        return (
            torch.cat([self.tokens, self.extra.tokens]),
            torch.cat([depths, self.extra.depths]),
            torch.cat([nodes, self.extra.visible]),
        )

    def parents(self) -> tuple[int, ...]:
        """The parent of every row: the deepest that it sees of the rows above its own depth."""
        if self.extra is None:
            return self.shape.parents
        _, depths, visible = self.rows()
        above = visible & (depths[None, :] < depths[:, None])
        deepest, parent = torch.where(above, depths, -1).max(dim=1)
        parents: list[int] = torch.where(deepest < 0, -1, parent).tolist()
        return tuple(parents)

    def cut(self, max_depth: int) -> Proposal:
        """Without the rows deeper than `max_depth`, where the context ends."""
        extra_depth = 0 if self.extra is None else self.extra.max_depth
        if max(self.shape.max_depth, extra_depth) <= max_depth:
            return self
        nodes = [i for i, depth in enumerate(self.shape.depths.tolist()) if depth <= max_depth]
        return replace(self, extra=None).keep(nodes)

    def keep(self, nodes: Sequence[int]) -> Proposal:
        """Only these nodes (ascending, root and every parent included), and all extra rows.

        Extra rows must not see a removed node.
        """
        dists = self.dists
        if dists is not None:
            row_of = dists.row_of_parent
            rows = {new: row_of[old] for new, old in enumerate(nodes) if old in row_of}
            dists = DraftDists(dists.probs, rows)
        if nodes[-1] == len(nodes) - 1:  # a prefix, which a slice takes without a copy
            nodes = range(len(nodes))
            index: slice | Tensor = slice(len(nodes))
        else:
            index = upload(torch.tensor(nodes), self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[index],
            shape=self.shape.keep(nodes),
            ranks=None if self.ranks is None else [self.ranks[i] for i in nodes],
            draft_probs=None if self.draft_probs is None else self.draft_probs[index],
            dists=dists,
            extra=None if self.extra is None else self.extra.for_nodes(nodes),
            num_forced=0,
        )

    def as_deterministic(self, nodes: Collection[int]) -> Proposal:
        """The same, with the children of these nodes no longer counted as sampled."""
        assert self.dists is not None
        rows = {n: row for n, row in self.dists.row_of_parent.items() if n not in nodes}
        return replace(self, dists=DraftDists(self.dists.probs, rows))

    def add_forced(self, nodes: Sequence[tuple[int, int]]) -> Proposal:
        """With nodes that a grammar adds after all others: the token and parent of each."""
        n, k = len(self.shape), len(nodes)
        tokens, parents = zip(*nodes, strict=True)
        probs, extra = self.draft_probs, self.extra
        if extra is not None:
            blind = extra.visible.new_zeros(len(extra.tokens), k)
            visible = torch.cat([extra.visible[:, :n], blind, extra.visible[:, n:]], dim=1)
            extra = replace(extra, visible=visible)
        return replace(
            self,
            tokens=torch.cat([self.tokens, upload(torch.tensor(tokens), self.tokens.device)]),
            shape=TreeShape([*self.shape.parents, *parents]),
            ranks=None if self.ranks is None else [*self.ranks, *[0] * k],
            draft_probs=None if probs is None else torch.cat([probs, probs.new_ones(k)]),
            extra=extra,
            num_forced=k,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of verifying a proposal.

    Attributes:
        output: the target's output for all rows of the verify forward, in the order fed.
        path: accepted rows, root (row 0) first.
        committed: tokens committed by this step: accepted path, then the next root, whose key/value
            is not in the cache yet.
        token_ids: of the proposal's nodes, if they are on the host already.
        best: argmax of the output's rows, likewise.
    """

    proposal: Proposal
    output: TargetOutput
    path: tuple[int, ...]
    committed: tuple[int, ...]
    token_ids: Sequence[int] | None = None
    best: Sequence[int] | None = None

    def tokens(self) -> Sequence[int]:
        """The proposal's tokens on the host."""
        ids = self.token_ids
        tokens: list[int] = self.proposal.tokens.tolist() if ids is None else list(ids)
        return tokens

    def argmax(self) -> Sequence[int]:
        """The most probable token after every row, on the host."""
        return self.output.argmax() if self.best is None else self.best
