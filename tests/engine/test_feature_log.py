"""A text's log: every reader gets every committed row once, and nothing else stays in memory."""

from __future__ import annotations

import random

import pytest
import torch

from engine import feature_log
from engine.feature_log import FeatureLog, features_of
from engine.proposal import Needs, Outcome, Proposal, TargetOutput
from engine.tree import ChoiceTree

CPU = torch.device("cpu")
WIDTH, VOCAB = 3, 5
LAYERS = Needs(layers=(1,))


def output_of(values: list[float]) -> TargetOutput:
    """Rows whose features are these numbers, and logits of as many rows."""
    rows = torch.tensor(values)[:, None]
    return TargetOutput(rows.expand(-1, VOCAB).clone(), layers=rows.expand(-1, WIDTH).clone())


def step(log: FeatureLog, values: list[float], path: tuple[int, ...]) -> None:
    """A verified chain of which these rows are accepted; its tokens are numbered on."""
    proposal = Proposal(torch.arange(len(values)), ChoiceTree.chain(len(values) - 1).shape)
    committed = tuple(len(log.tokens) + i for i in range(len(path)))
    log.commit(Outcome(proposal, output_of(values), path, committed))


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_gets_every_committed_row_once(seed: int) -> None:
    """However seldom it reads, and whatever others have read."""
    rng = random.Random(seed)
    log = FeatureLog([0, 1, 2, 3], LAYERS, CPU)
    cursors = [log.open_cursor() for _ in range(3)]
    read: list[list[float]] = [[] for _ in cursors]
    committed = [0.0, 1.0, 2.0, 3.0]
    log.read_prompt(output_of(committed[:2]))
    log.read_prompt(output_of(committed[2:]))
    log.begin(4)
    for _ in range(30):
        values = [rng.random() for _ in range(rng.randint(1, 5))]
        path = (0, *sorted(rng.sample(range(1, len(values)), rng.randint(0, len(values) - 1))))
        step(log, values, path)
        committed += [values[row] for row in path]
        for cursor, seen in zip(cursors, read, strict=True):
            if rng.random() < 0.3:
                features, tokens = log.unread(cursor)
                assert tokens.tolist() == log.tokens[cursor.row + 1 :]
                seen += features[:, 0].tolist()
                cursor.row += len(features)
        assert float(log.last_row()[0, 0]) == pytest.approx(committed[-1])
    for cursor, seen in zip(cursors, read, strict=True):
        seen += log.unread(cursor)[0][:, 0].tolist() if cursor.row < len(log.tokens) - 1 else []
        assert seen == pytest.approx(committed)


def num_bytes(log: FeatureLog) -> int:
    """What the log keeps alive, rows that nobody reads included."""
    return sum(features_of(part).untyped_storage().nbytes() for part in log._parts)


def test_it_keeps_no_features_of_rejected_rows_and_none_that_all_have_read() -> None:
    row_bytes = 4 * WIDTH
    log = FeatureLog([0, 1], LAYERS, CPU)
    sleeping, awake = log.open_cursor(), log.open_cursor()
    log.read_prompt(output_of([0.0, 1.0]))
    log.begin(2)
    for path in ((0, 1), (0,), (0, 2)):
        step(log, [5.0, 6.0, 7.0, 8.0], path)
        awake.row = len(log.tokens) - 1
    assert num_bytes(log) == 7 * row_bytes, "the sleeping one has read nothing"
    sleeping.row = awake.row
    step(log, [5.0, 6.0, 7.0], (0,))
    assert num_bytes(log) == row_bytes
    assert num_bytes(FeatureLog([0], Needs(), CPU)) == 0


def test_for_a_prefix_cache_all_rows_stay() -> None:
    log = FeatureLog([0, 1], LAYERS, CPU, num_cached=0, keeps_all=True)
    log.read_prompt(output_of([0.0, 1.0]))
    log.begin(2)
    step(log, [5.0, 6.0, 7.0], (0, 2))
    assert features_of(log.rows())[:, 0].tolist() == [0.0, 1.0, 5.0, 7.0]
    assert features_of(log.rows(2))[:, 0].tolist() == [5.0, 7.0]


def test_logits_of_a_long_pause_are_those_of_the_last_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature_log, "MAX_LOGITS", 3 * VOCAB)
    log = FeatureLog([0, 1], Needs(logits=True), CPU)
    log.read_prompt(output_of([0.0, 1.0]))
    log.begin(2)
    assert log.take_logits()[:, 0].tolist() == [1.0]
    for value in range(10):
        step(log, [float(value), -1.0], (0,))
    assert log.take_logits()[:, 0].tolist() == [6.0, 7.0, 8.0, 9.0]
