"""Exact replay of a choice tree over a rank table: what a greedy run with this tree would accept.

First, for all positions at once and depth by depth, the node of the tree that the true path
reaches; its depth is the accepted length. Then each text is walked from its first root, accepted +
1 tokens per step, as in decoding. A text ends when its last output is committed; what the last step
accepts beyond it counts, as in a run's own figures.

    row       0 1 2 3 4 5 | end
    accepted  2 0 1 0 3 0        steps at rows 0, 3, 4; accepted 2 + 0 + 3; MAT 1 + 5/3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine import metrics
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The steps of a replayed run, over all texts of a table.

    Attributes:
        roots: `(steps,)` rows of the table where they begin.
        accepted_lengths: `(steps,)` draft tokens accepted.
    """

    roots: np.ndarray
    accepted_lengths: np.ndarray

    @property
    def num_steps(self) -> int:
        return len(self.roots)

    @property
    def num_accepted(self) -> int:
        return int(self.accepted_lengths.sum())

    @property
    def mat(self) -> float:
        mat = metrics.mat(self.num_accepted, self.num_steps)
        assert mat is not None
        return mat


def replay(table: RankTable, tree: ChoiceTree) -> Replay:
    """Every step that a greedy run with this tree makes on the table's texts, drafting as set.

    The tree is no deeper than the table.
    """
    lengths = tree.shape.depths.numpy()[deepest_nodes(table, tree)]
    roots = step_roots(lengths, table)
    return Replay(roots, lengths[roots])


def deepest_nodes(table: RankTable, tree: ChoiceTree) -> np.ndarray:
    """`(positions,)` the deepest node that the true path reaches from each position; 0 = root."""
    # Column rank + 1 is the child of that rank; column 0 is no child, for ranks that no path uses.
    children = np.zeros((len(tree) + 1, tree.max_rank + 2), dtype=np.int64)
    for node, path in enumerate(tree.paths, start=1):
        children[tree.shape.parents[node], path[-1] + 1] = node
    deepest = np.zeros(table.num_positions, dtype=np.int64)
    alive = np.arange(table.num_positions)
    for depth in range(tree.depth):
        ranks = table.ranks[alive, depth].astype(np.int64)
        nodes = children[deepest[alive], np.where(ranks <= tree.max_rank, ranks + 1, 0)]
        alive, nodes = alive[nodes > 0], nodes[nodes > 0]
        deepest[alive] = nodes
    return deepest


def step_roots(lengths: np.ndarray, table: RankTable) -> np.ndarray:
    """`(steps,)` rows where steps begin, for accepted lengths `(positions,)`."""
    accepted: list[int] = lengths.tolist()
    roots: list[int] = []
    for text in range(table.num_texts):
        row, end = table.span(text)
        while row < end:
            roots.append(row)
            row += accepted[row] + 1
    return np.array(roots, dtype=np.int64)
