"""The page's replay of a tree equals the engine's, figure by figure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle.methods import EagleConfig
from engine.drafters.heads.medusa import MedusaConfig
from engine.tree import ChoiceTree
from engine.tuning.latency import LatencyCurve, StepLatency, TreeLatency
from engine.tuning.ranks import RankTable
from engine.tuning.replay import replay
from playground.trees.tables import pack
from tests.engine.tuning.tables import (
    made_up_table,
    position_rates,
    random_tree,
    replay_chain,
    slow_steps,
)
from tests.scripts.conftest import Scripts

MODULES = ("tree/model.js", "tree/replay.js")
REPLAY = """([packed, trees, category], { model, replay }) => {
  const table = replay.unpackTable(packed);
  return trees.map((paths) => {
    const made = replay.replayTree(table, new model.Choices(paths), category);
    return made && { ...made, counts: Array.from(made.counts) };
  });
}"""


@pytest.mark.parametrize(
    ("table", "category"),
    [
        (made_up_table(), None),
        (made_up_table(), "code"),
        (made_up_table(positions=37, texts=5, ranks=4, seed=1), None),
        (made_up_table(positions=900, texts=3, depths=8, ranks=300, seed=2), None),
    ],
)
def test_every_figure_equals_the_engines(
    scripts: Scripts, table: RankTable, category: str | None
) -> None:
    trees = [
        random_tree(n, depth=table.depths, ranks=min(6, table.num_ranks), seed=n)
        for n in range(1, 65, 7)
    ]
    got = scripts.evaluate(
        REPLAY, [pack(table), [tree.as_lists() for tree in trees], category], *MODULES
    )
    for tree, found in zip(trees, got, strict=True):
        wanted = replay(table.only(category), tree)
        taken = [path for _, path in slow_steps(table.only(category), tree)]
        counts = [sum(path[: len(node)] == node for path in taken) for node in tree.paths]
        assert found["counts"] == [wanted.num_steps, *counts]
        assert found["numSteps"] == wanted.num_steps
        assert found["numAccepted"] == wanted.num_accepted
        assert found["mat"] == wanted.mat
        assert tuple(found["rates"]) == position_rates(wanted)
        assert found["sizes"] == [[len(tree), 1]]


def test_look_up_chains_equal_the_engines(scripts: Scripts) -> None:
    table = looked_up(made_up_table(positions=200, texts=6))
    chains = {length: ChoiceTree.chain(length) for length in (1, 2, 3, 5)}
    lists = [tree.as_lists() for tree in chains.values()]
    for category in (None, "math"):
        got = scripts.evaluate(REPLAY, [pack(table), lists, category], *MODULES)
        for length, found in zip(chains, got, strict=True):
            if length not in table.chains:
                assert found is None
                continue
            wanted = replay_chain(table.only(category), length)
            assert (found["mat"], found["numSteps"]) == (wanted.mat, wanted.num_steps)
            assert tuple(found["rates"]) == position_rates(wanted)
            drafted = sum(size * share for size, share in found["sizes"])
            assert drafted == pytest.approx(table.only(category).chains[length][2].mean())


def looked_up(table: RankTable) -> RankTable:
    """The table with made-up steps of a drafter that looks up, for three draft lengths."""
    draw = np.random.default_rng(3)
    chains = {}
    for length in (1, 3, 5):
        roots = np.flatnonzero(draw.random(table.num_positions) < 0.7)
        drafted = draw.integers(0, length + 1, len(roots))
        accepted = np.minimum(drafted, draw.integers(0, length + 1, len(roots)))
        chains[length] = np.stack([roots, accepted, drafted]).astype(np.int32)
    empty = np.empty((table.num_positions, 0), dtype=np.int16)
    return RankTable(empty, 1, table.texts, table.categories, chains, table.about)


CONFIGS = (MedusaConfig(), EagleConfig(), DraftTargetConfig(max_draft_len=3))


@pytest.mark.parametrize("trees", [None, TreeLatency((4, 16), (23.0, 40.0), (5.0, 7.0))])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.decoding_type))
def test_the_prediction_equals_the_engines(
    scripts: Scripts, config: Any, trees: TreeLatency | None
) -> None:
    chain = isinstance(config, DraftTargetConfig)
    clock = StepLatency(
        LatencyCurve((1, 4, 16, 64), (20.0, 21.5, 30.0, 71.0), 256, trees), 0.7, 0.3
    )
    speed = json.loads(json.dumps(asdict(clock)))
    for n in (1, 9, 40, 100):
        tree = ChoiceTree.chain(min(n, 9)) if chain else random_tree(n, depth=6, ranks=9, seed=n)
        found = scripts.evaluate(
            """([speed, paths], { model, replay }) => {
              const made = new model.Choices(paths);
              return replay.predict(speed, 2.5, [[made.size, 1]], made.depth);
            }""",
            [speed, tree.as_lists()],
            *MODULES,
        )
        wanted = clock.predict_config(config.with_tree(tree), 2.5)
        assert found["tok_s"] == pytest.approx(wanted.tok_s, rel=1e-12)
        assert found["step_ms"] == pytest.approx(wanted.step_ms, rel=1e-12)
        assert found["speedup"] == pytest.approx(wanted.speedup, rel=1e-12)


def test_example_steps_go_through_the_node(scripts: Scripts) -> None:
    table, tree = made_up_table(positions=500, texts=4), ChoiceTree.parse("[[0],[1],[0,0]]")
    rows = scripts.evaluate(
        """([packed, paths], { model, replay }) => replay.stepsThrough(
             replay.unpackTable(packed), new model.Choices(paths), "0.0", 200, null)""",
        [pack(table), tree.as_lists()],
        *MODULES,
    )
    steps = replay(table, tree).roots.tolist()
    assert rows and set(rows) <= set(steps)
    assert all(table.ranks[row][:2].tolist() == [0, 0] for row in rows)
    missed = set(steps) - set(rows)
    assert all(table.ranks[row][:2].tolist() != [0, 0] for row in missed)
