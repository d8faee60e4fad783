"""Finds the best choice tree of every size for a rank table.

A node's path frequency is the share of positions whose true path leads through it, counted jointly
over all depths (never multiplied from independent ones). A tree's mean accepted length over a set
of positions is the sum of its nodes' frequencies there, so the n most frequent paths are the best
tree of n nodes *for these positions*; a child is never more frequent than its parent, so they are
a tree.

A run's steps begin only at some positions, though, and which ones depends on the tree: after a long
step the next root is a harder place than average. So the best tree for all positions competes with
the best one for those that its steps visited, by *replayed* MAT. Both figures are exact; they do
not prove that no other tree of n nodes is better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.tree import MAX_NODES, ChoiceTree, Path
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 63, 80, 96, 112, 127)
"""Numbers of draft nodes that are tried; the root is one more row."""


@dataclass(frozen=True, slots=True)
class BestTree:
    """The best tree found of at most so many nodes, and its replayed MAT."""

    tree: ChoiceTree
    mat: float


def best_trees(table: RankTable, ns: Sequence[int]) -> tuple[BestTree, ...]:
    """The best tree of each size in draft nodes, in the order given; a larger one is never worse.

    A tree has fewer nodes where no further path was ever right. `RankTable.limited_to` bounds depth
    and ranks.

    Raises ConfigError: a size is out of range, or the drafter was never right.
    """
    if not table.depths:
        raise ConfigError("This drafter looks up chains; there is no tree to choose.")
    for n in ns:
        if not 1 <= n <= MAX_NODES:
            raise ConfigError(f"Nodes must be in [1, {MAX_NODES}], got {n}.")
    paths = most_frequent_paths(table, np.arange(table.num_positions), max(ns))
    if not paths:
        raise ConfigError(
            "No tree helps: within these bounds the drafter never ranked the true token. "
            "Allow more ranks, or choose another drafter."
        )
    best_of_size: dict[int, BestTree] = {}
    best: BestTree | None = None
    for n in sorted(set(ns)):
        tree = ChoiceTree.of(paths[:n])
        steps = replay(table, tree)
        visited = ChoiceTree.of(most_frequent_paths(table, steps.roots, n) or tree.paths)
        candidate = BestTree(tree, steps.mat)
        if (mat := replay(table, visited).mat) > candidate.mat:
            candidate = BestTree(visited, mat)
        # Adding nodes never hurts a step, but it can shift the steps after it.
        best = candidate if best is None or candidate.mat >= best.mat else best
        best_of_size[n] = best
    return tuple(best_of_size[n] for n in ns)


def fastest_trees(
    table: RankTable, ns: Sequence[int], tok_s: Callable[[BestTree], float]
) -> tuple[BestTree, ...]:
    """The tree of each size with the highest predicted speed; otherwise as `best_trees`.

    For targets where each level costs time beside its rows: the best trees of every depth and the
    best chains compete.

    Args:
        tok_s: the predicted speed.
    """
    candidates = [best_trees(table, ns)]
    deepest = max(best.tree.depth for best in candidates[0])
    shallower = [table.limited_to(max_depth=depth) for depth in range(1, deepest)]
    candidates += [best_trees(each, ns) for each in (*shallower, table.limited_to(max_width=1))]
    return tuple(max(same_size, key=tok_s) for same_size in zip(*candidates, strict=True))


def most_frequent_paths(table: RankTable, rows: np.ndarray, n: int) -> tuple[Path, ...]:
    """The n most frequent paths from these rows, most frequent first; ties: shorter, lower rank.

    The first k of them are the k most frequent, so one call serves all sizes. Paths that no row
    takes are left out.

    Example: ranks (0, 0), (0, 1), (1, 0), (0, 0): paths [0] 3, [0, 0] 2, [1] 1, [0, 1] 1, [1, 0] 1.
    """
    ranks = table.ranks
    paths: list[Path] = []
    candidates: list[tuple[int, int, Path, np.ndarray]] = []

    def add_children(path: Path, rows: np.ndarray) -> None:
        """Put the children of a path that these rows take on the heap."""
        column = ranks[rows, len(path)]
        for rank in np.unique(column[column >= 0]).tolist():
            child, through = (*path, rank), rows[column == rank]
            heapq.heappush(candidates, (-len(through), len(child), child, through))

    if table.depths and len(rows):
        add_children((), rows)
    while candidates and len(paths) < n:
        _, depth, path, rows = heapq.heappop(candidates)
        paths.append(path)
        if depth < table.depths:
            add_children(path, rows)
    return tuple(paths)
