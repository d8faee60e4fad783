"""Replay equals a plain walk, token by token, for every figure; and it is fast."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.tree import ChoiceTree
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay
from tests.engine.tuning.tables import made_up, position_rates, random_tree, slow_steps


def test_worked_example() -> None:
    """The texts of the module's docstring: accepted 2 0 1 0 3 0, steps at rows 0, 3, 4."""
    ranks = [[0, 0, -1], [-1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [5, 0, 0]]
    table = RankTable(np.array(ranks, dtype=np.int16), 6, (0,), ("",))
    result = replay(table, ChoiceTree.chain(3))
    assert result.roots.tolist() == [0, 3, 4]
    assert result.accepted_lengths.tolist() == [2, 0, 3]
    assert result.mat == 1 + 5 / 3
    assert position_rates(result) == (2 / 3, 2 / 3, 1 / 3)


def test_steps_equal_a_plain_walk_for_random_tables_and_trees() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        table = made_up(rng, rng.integers(1, 30, size=int(rng.integers(1, 5))).tolist())
        size, ranks = int(rng.integers(1, 40)), int(rng.integers(1, table.num_ranks + 1))
        tree = random_tree(size, depth=table.depths, ranks=ranks, seed=seed)
        result = replay(table, tree)
        slow = slow_steps(table, tree)
        assert result.roots.tolist() == [row for row, _ in slow]
        assert result.accepted_lengths.tolist() == [len(path) for _, path in slow]
        assert result.mat == 1 + sum(len(path) for _, path in slow) / len(slow)


def test_categories_are_replayed_apart_and_together() -> None:
    table = made_up(np.random.default_rng(1), [12, 20, 9])
    tree = ChoiceTree.parse([[0, 0, 0], [1, 0]])
    parts = [replay(table.only(name), tree) for name in "ab"]
    whole = replay(table, tree)
    assert sum(part.num_steps for part in parts) == whole.num_steps
    assert sum(part.num_accepted for part in parts) == whole.num_accepted
    assert table.only("a").about["sources"] == ["run 0", "run 2"]
    with pytest.raises(ConfigError, match="category must be one of a, b, got 'c'"):
        table.only("c")
