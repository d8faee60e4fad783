"""The best tree: most frequent paths for all positions, and then whatever replay finds best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.tree import ChoiceTree, Path
from engine.tuning.ranks import RankTable
from engine.tuning.replay import deepest_nodes, replay
from engine.tuning.search import BestTree, best_trees, fastest_trees, most_frequent_paths
from tests.engine.tuning.tables import made_up


def best_tree(table: RankTable, n: int, **bounds: Any) -> ChoiceTree:
    return best_trees(table.limited_to(**bounds), (n,))[0].tree


def tree_of(paths: Iterable[Path]) -> ChoiceTree:
    return ChoiceTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def table_of(ranks: list[list[int]]) -> RankTable:
    """Every position its own text, so that every position is visited."""
    array = np.array(ranks, dtype=np.int16)
    rows = tuple(range(len(ranks)))
    return RankTable(array, 8, rows, ("",) * len(rows))


def all_trees(paths: list[Path], n: int) -> list[ChoiceTree]:
    """Every prefix-closed set of n of these paths."""
    return [
        tree_of(chosen)
        for chosen in itertools.combinations(paths, n)
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen)
    ]


def test_where_levels_cost_time_the_fastest_tree_is_flatter_and_where_siblings_do_a_chain() -> None:
    table = made_up(np.random.default_rng(0), [400], depths=4, num_ranks=6)
    best = best_trees(table, (6, 12))

    def levels(point: BestTree) -> float:
        return point.mat / (1 + point.tree.depth)

    def siblings(point: BestTree) -> float:
        return point.mat / (1 + len(point.tree) - point.tree.depth)

    flat, chains = fastest_trees(table, (6, 12), levels), fastest_trees(table, (6, 12), siblings)
    for whole, one, chain in zip(best, flat, chains, strict=True):
        assert one.tree.depth < whole.tree.depth and levels(one) > levels(whole)
        assert chain.tree.depth == len(chain.tree) < len(whole.tree)
    as_good = fastest_trees(table, (6, 12), lambda point: point.mat)
    assert all(one.mat >= whole.mat for one, whole in zip(as_good, best, strict=True))


def test_worked_example() -> None:
    ranks = [[0, 0], [0, 1], [1, 0], [0, 0]]
    grown = most_frequent_paths(table_of(ranks), np.arange(4), 9)
    assert grown == ((0,), (0, 0), (1,), (0, 1), (1, 0))
    assert most_frequent_paths(table_of(ranks), np.arange(4), 3) == grown[:3]


def test_no_tree_of_the_same_size_accepts_more_at_all_positions() -> None:
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(2), repeat=d)]
    for seed in range(8):
        table = made_up(np.random.default_rng(seed), [40], depths=3, num_ranks=2)
        for n in (2, 4, 5):
            grown = most_frequent_paths(table, np.arange(40), n)
            tree = tree_of(grown)
            ours = accepted_everywhere(table, tree)
            assert ours == max(accepted_everywhere(table, t) for t in all_trees(paths, len(tree)))


def accepted_everywhere(table: RankTable, tree: ChoiceTree) -> int:
    return int(tree.shape.depths.numpy()[deepest_nodes(table, tree)].sum())


def test_replay_decides_between_all_positions_and_visited_ones() -> None:
    """The tree found is never worse than the one for all positions, and sometimes better."""
    better = 0
    for seed in range(12):
        table = made_up(np.random.default_rng(seed), [150, 90], depths=4)
        for n in (3, 8):
            grown = most_frequent_paths(table, np.arange(table.num_positions), n)
            theirs = replay(table, tree_of(grown)).mat
            ours = replay(table, best_tree(table, n)).mat
            assert ours >= theirs
            better += ours > theirs
    assert better


def test_curve_keeps_the_order_asked_for_and_never_falls_as_trees_grow() -> None:
    """A larger tree shifts steps, perhaps to worse places: then the smaller one stands."""
    sizes = tuple(range(1, 25))
    fell = 0
    for seed in range(6):
        table = made_up(np.random.default_rng(seed), [40, 25], depths=4)
        points = best_trees(table, sizes[::-1])[::-1]
        for point, size in zip(points, sizes, strict=True):
            assert len(point.tree) <= size and replay(table, point.tree).mat == point.mat
        assert all(a.mat <= b.mat for a, b in itertools.pairwise(points))
        alone = [best_trees(table, (n,))[0].mat for n in sizes]
        fell += sum(a > b for a, b in itertools.pairwise(alone))
    assert fell, "no search of a single size ever did worse with more nodes"


def test_constraints_and_categories_are_kept() -> None:
    table = made_up(np.random.default_rng(6), [200, 200], depths=4)
    tree = best_tree(table, 12, max_depth=2, max_width=3)
    assert len(tree) == 12 and tree.depth == 2 and tree.max_rank == 2
    mats = {c: replay(table.only(c), best_tree(table.only(c), 6)).mat for c in "ab"}
    whole = best_tree(table, 6)
    assert all(mat >= replay(table.only(c), whole).mat for c, mat in mats.items())
    with pytest.raises(ConfigError, match="category must be one of"):
        table.only("z")


def test_a_size_out_of_range_is_named() -> None:
    table = made_up(np.random.default_rng(0), [20])
    with pytest.raises(ConfigError, match=r"Nodes must be in \[1, 1024\], got 0"):
        best_tree(table, 0)


def test_a_drafter_that_is_never_right_has_no_tree() -> None:
    with pytest.raises(ConfigError, match="No tree helps"):
        best_tree(table_of([[-1, 0], [-1, -1]]), 4)
