"""Exact replay of a choice tree over a rank table: what a greedy run with this tree would accept.

First the accepted length at every position, depth by depth for all of them: which node of the tree
the true path has reached. Then each text is walked from its first root, accepted + 1 tokens per
step, as decoding does. A text is over when its last output is committed; what the last step
accepts beyond it counts, as in the run's own figures.

    row       0 1 2 3 4 5 | end
    accepted  2 0 1 0 3 0        steps at rows 0, 3, 4; accepted 2 + 0 + 3; MAT 1 + 5/3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.redraft import GreedySteps


@dataclass(frozen=True, slots=True, eq=False)
class NodeFigures:
    """What became of every node of the tree; all arrays `(n,)` in node order, the root first.

    Attributes:
        visits: steps that could have accepted it, because they accepted its parent.
        accepts: steps that accepted it.
        positions: positions, visited or not, whose true path leads through it.
        examples: a row whose true path leads through it, one that a step visited if there is any;
            −1 where there is none.
    """

    visits: np.ndarray
    accepts: np.ndarray
    positions: np.ndarray
    examples: np.ndarray

    @property
    def conditional(self) -> np.ndarray:
        """Share of its visits that accepted it; NaN where it was never visited."""
        shares: np.ndarray = np.full(len(self.visits), np.nan)
        np.divide(self.accepts, self.visits, out=shares, where=self.visits > 0)
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class Replay(GreedySteps):
    """The steps of a replayed run, over all texts of a table; `roots` are its rows.

    Attributes:
        num_drafted: draft tokens proposed in all steps together.
        num_positions: rows of the table.
        nodes: per node of the tree; None for chains that were looked up.
    """

    num_drafted: int
    num_positions: int
    nodes: NodeFigures | None = None

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted draft tokens / drafted tokens."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def path_frequency(self) -> np.ndarray:
        """Share of the steps that accepted each node; the root's is 1."""
        assert self.nodes is not None
        return self.nodes.accepts / self.num_steps


def replay(table: RankTable, tree: ChoiceTree, *, category: str | None = None) -> Replay:
    """Every step that a greedy run with this tree makes on the table's texts, `adaptive` off.

    Args:
        category: only texts of this category; None = all.

    Raises:
        TreeError: the tree is deeper than the table or uses ranks that it does not tell apart.
        ConfigError: no text is of this category.
    """
    table = table.only(category)
    reached = reach(table, tree)
    lengths = tree.shape.depths.numpy()[reached]
    roots = walk(lengths, table)
    visited = np.zeros(len(lengths), dtype=bool)
    visited[roots] = True
    return Replay(
        roots,
        lengths[roots],
        len(roots) * len(tree),
        table.num_positions,
        _figures(tree, reached, visited),
    )


def reach(table: RankTable, tree: ChoiceTree) -> np.ndarray:
    """The deepest node that the true path reaches from every position `(positions,)`; 0 = root.

    Raises:
        TreeError: the tree is deeper than the table or uses ranks that it does not tell apart.
    """
    tree.check_fits(depth=table.depths, ranks=table.num_ranks, what="the rank table")
    children = _children(tree)
    width = children.shape[1] - 1
    reached = np.zeros(table.num_positions, dtype=np.int64)
    alive = np.arange(table.num_positions)
    for depth in range(tree.depth):
        ranks = table.ranks[alive, depth].astype(np.int64)
        # Column 0 stands for all ranks that the tree does not use: no child.
        nodes = children[reached[alive], np.where(ranks < width, ranks + 1, 0)]
        alive, nodes = alive[nodes > 0], nodes[nodes > 0]
        reached[alive] = nodes
    return reached


def _children(tree: ChoiceTree) -> np.ndarray:
    """`(n, max rank + 2)`: column rank + 1 is the child of that rank; 0 where there is none."""
    children = np.zeros((len(tree) + 1, tree.max_rank + 2), dtype=np.int64)
    parents = tree.shape.parents
    for node, path in enumerate(tree.paths, start=1):
        children[parents[node], path[-1] + 1] = node
    return children


def walk(lengths: np.ndarray, table: RankTable) -> np.ndarray:
    """Rows of all steps `(steps,)`, for accepted lengths `(positions,)`."""
    accepted: list[int] = lengths.tolist()
    roots: list[int] = []
    for text in range(table.num_texts):
        row, end = table.span(text)
        while row < end:
            roots.append(row)
            row += accepted[row] + 1
    return np.array(roots, dtype=np.int64)


def _figures(tree: ChoiceTree, reached: np.ndarray, visited: np.ndarray) -> NodeFigures:
    n = len(tree) + 1
    parents = np.array(tree.shape.parents)
    accepts, positions = _through(reached[visited], n, parents), _through(reached, n, parents)
    visits = accepts[np.maximum(parents, 0)]
    # Written last wins: visited rows after the others, then children pass theirs to parents.
    examples = np.full(n, -1)
    for rows in (np.flatnonzero(~visited), np.flatnonzero(visited)):
        ends = np.full(n, -1)
        ends[reached[rows[::-1]]] = rows[::-1]
        for node in range(n - 1, 0, -1):
            if ends[parents[node]] < 0:
                ends[parents[node]] = ends[node]
        examples = np.where(ends >= 0, ends, examples)
    return NodeFigures(visits, accepts, positions, examples)


def _through(reached: np.ndarray, n: int, parents: np.ndarray) -> np.ndarray:
    """How many true paths lead through each node, from where they end."""
    counts = np.bincount(reached, minlength=n)
    for node in range(n - 1, 0, -1):
        counts[parents[node]] += counts[node]
    return counts


def chain_lengths(table: RankTable) -> tuple[int, ...]:
    """Draft lengths that `replay_chain` can answer for."""
    return tuple(sorted(table.chains)) if table.chains else tuple(range(1, table.depths + 1))


def replay_chain(table: RankTable, length: int, *, category: str | None = None) -> Replay:
    """Every step of a greedy run that drafts chains of `length` tokens.

    For drafters that look up these are steps made while measuring; each draft may be shorter.

    Raises:
        ConfigError: the table does not know this length, or no text is of this category.
    """
    known = chain_lengths(table)
    if length not in known:
        raise ConfigError(
            f"The draft length must be one of {', '.join(map(str, known))}, got {length}. "
            "Measure the table deeper for others."
        )
    if not table.chains:
        return replay(table, ChoiceTree.chain(length), category=category)
    table = table.only(category)
    steps = table.chains[length]
    return Replay(
        steps.roots, steps.accepted.astype(np.int64), int(steps.drafted.sum()), table.num_positions
    )
