"""Exact replay of a choice tree over a rank table: what a greedy run with this tree would accept.

First the accepted length at every position, depth by depth for all of them: which node of the tree
the true path has reached. Then each text is walked from its first root, accepted + 1 tokens per
step, as decoding does. A text is over when its last output is committed; what the last step
accepts beyond it counts, as in the run's own figures.

    row       0 1 2 3 4 5 | end
    accepted  2 0 1 0 3 0        steps at rows 0, 3, 4; accepted 2 + 0 + 3; MAT 1 + 5/3
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from engine import metrics
from engine.errors import ConfigError
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The steps `(steps,)` of a replayed run, over all texts of a table.

    Attributes:
        roots: rows of the table where they begin.
        num_drafted: draft tokens proposed in all steps together.
    """

    roots: np.ndarray
    accepted_lengths: np.ndarray
    num_drafted: int

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

    @property
    def position_rates(self) -> tuple[float, ...]:
        counts = metrics.at_least(Counter(self.accepted_lengths.tolist()))
        return metrics.position_rates(counts, self.num_steps)


def replay(table: RankTable, tree: ChoiceTree) -> Replay:
    """Every step that a greedy run with this tree makes on the table's texts, `adaptive` off.

    Raises TreeError: the tree is deeper than the table or uses ranks that it does not tell apart.
    """
    lengths = tree.shape.depths.numpy()[reach(table, tree)]
    roots = walk(lengths, table)
    return Replay(roots, lengths[roots], len(roots) * len(tree))


def reach(table: RankTable, tree: ChoiceTree) -> np.ndarray:
    """The deepest node that the true path reaches from every position `(positions,)`; 0 = root.

    Raises TreeError: the tree is deeper than the table or uses ranks that it does not tell apart.
    """
    tree.check_fits(depth=table.depths, ranks=table.num_ranks, what="the rank table")
    # Column rank + 1 is the child of that rank; column 0 is no child, for ranks that no path uses.
    children = np.zeros((len(tree) + 1, tree.max_rank + 2), dtype=np.int64)
    for node, path in enumerate(tree.paths, start=1):
        children[tree.shape.parents[node], path[-1] + 1] = node
    reached = np.zeros(table.num_positions, dtype=np.int64)
    alive = np.arange(table.num_positions)
    for depth in range(tree.depth):
        ranks = table.ranks[alive, depth].astype(np.int64)
        nodes = children[reached[alive], np.where(ranks <= tree.max_rank, ranks + 1, 0)]
        alive, nodes = alive[nodes > 0], nodes[nodes > 0]
        reached[alive] = nodes
    return reached


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


def chain_lengths(table: RankTable) -> tuple[int, ...]:
    """Draft lengths that `replay_chain` can answer for."""
    return tuple(sorted(table.chains)) if table.chains else tuple(range(1, table.depths + 1))


def replay_chain(table: RankTable, length: int) -> Replay:
    """Every step of a greedy run that drafts chains of `length` tokens.

    For drafters that look up these are steps made while measuring; each draft may be shorter.

    Raises ConfigError: the table does not know this length.
    """
    lengths = chain_lengths(table)
    if length not in lengths:
        raise ConfigError(
            f"The draft length must be one of {', '.join(map(str, lengths))}, got {length}. "
            "Measure the table deeper for others."
        )
    if not table.chains:
        return replay(table, ChoiceTree.chain(length))
    steps = table.chains[length]
    return Replay(steps.roots, steps.accepted.astype(np.int64), int(steps.drafted.sum()))
