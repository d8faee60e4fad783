"""Rank tables: how they are stored, what is refused, and that replay equals a plain walk."""

from __future__ import annotations

import io
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from engine.config import Limits
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.eagle.methods import EagleConfig
from engine.drafters.lookup.lookahead import LookaheadConfig
from engine.drafters.texts import Text, rank_of
from engine.errors import ConfigError, PromptError
from engine.proposal import Needs
from engine.tree import ChoiceTree
from engine.tuning import StoppedError
from engine.tuning.ranks import RankTable, measure_ranks, trace_text
from engine.tuning.replay import replay
from tests.engine.tuning.runs import golden, stopped
from tests.engine.tuning.tables import made_up, random_tree, slow_steps
from tests.models import tiny_target


def parts(table: RankTable) -> str:
    """Everything that a table holds, each number of it."""
    values = {field.name: getattr(table, field.name) for field in fields(RankTable)}
    arrays = [table.ranks, *table.chains.values()]
    return repr(values) + repr([(array.dtype, array.tolist()) for array in arrays])


def test_bytes_hold_everything() -> None:
    steps = np.array([[1, 4], [0, 2], [3, 2]], np.int32)
    ranked = made_up(np.random.default_rng(0), [5, 7])
    for table in (ranked, replace(ranked, chains={2: steps, 7: steps})):
        assert parts(RankTable.from_bytes(table.to_bytes())) == parts(table)


def test_damaged_bytes_are_refused_in_one_sentence() -> None:
    whole = made_up(np.random.default_rng(0), [300]).to_bytes()
    middle = len(whole) // 2
    holed = whole[: middle - 30] + bytes(60) + whole[middle + 30 :]
    array = io.BytesIO()
    np.save(array, np.arange(3))
    for payload in (b"", b"no table", whole[:-40], holed, array.getvalue()):
        with pytest.raises(ConfigError, match="not a rank table"):
            RankTable.from_bytes(payload)


def test_ranks_count_tokens_before_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert [int(rank_of(logits, torch.tensor(i))) for i in range(4)] == [3, 0, 2, 1]
    rows = torch.randn(5, 7, 40).mul(2).round()
    ids = torch.randint(0, 40, (5, 7))
    order = rows.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(rank_of(rows, ids), (order == ids[..., None]).int().argmax(dim=-1))


def test_progress_is_told_and_stopping_keeps_nothing() -> None:
    case = golden("medusa")
    fractions: list[float] = []
    measure_ranks(case.config, case.bench, case.texts, on_progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    with pytest.raises(StoppedError):
        measure_ranks(case.config, case.bench, case.texts, on_progress=stopped)


def test_methods_without_ranks_are_refused() -> None:
    case = golden("medusa")
    unranked = (AutoregressiveConfig(), LookaheadConfig())
    for config, message in (
        *((config, "has no rank table") for config in unranked),
        (EagleConfig(), "must name an EAGLE head"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure_ranks(config, case.bench, case.texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (Text((1,), (2, 9999), source="run 7"), "run 7 has 3 tokens between 1 and 9999"),
        (Text((1,) * 300, (2, 3), limits=Limits()), "has 302 tokens .*, but .* context holds 256"),
    ],
)
def test_texts_of_other_targets_are_refused(text: Text, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        trace_text(tiny_target(), text, Needs(), tail=2)


# ---- replay


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
    whole, parts = replay(table, tree), [replay(table.only(name), tree) for name in "ab"]
    assert sum(part.num_steps for part in parts) == whole.num_steps
    assert sum(part.num_accepted for part in parts) == whole.num_accepted
    assert table.only("a").about["sources"] == ["run 0", "run 2"]
