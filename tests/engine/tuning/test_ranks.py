"""Rank tables: what they hold, how they are stored, and what is refused."""

from __future__ import annotations

import io
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from engine.config import Limits
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.eagle.methods import Eagle3Config, EagleConfig
from engine.drafters.lookup.lookahead import LookaheadConfig
from engine.drafters.lookup.suffix import SuffixConfig
from engine.drafters.texts import Text, rank_of
from engine.errors import ConfigError, PromptError
from engine.proposal import Needs
from engine.tuning import StoppedError
from engine.tuning.ranks import ChainSteps, RankTable, measure_ranks, trace_text
from tests.engine.drafters.golden import ROOT, golden_case
from tests.engine.tuning.runs import golden, stopped
from tests.engine.tuning.tables import made_up
from tests.models import build_context, plain_greedy, tiny_target


def parts(table: RankTable) -> str:
    """Everything that a table holds, each number of it."""
    values = {field.name: getattr(table, field.name) for field in fields(RankTable)}
    arrays = [table.ranks, *(a for steps in table.chains.values() for a in steps)]
    return repr(values) + repr([(array.dtype, array.tolist()) for array in arrays])


def test_bytes_hold_everything() -> None:
    steps = ChainSteps(
        np.array([1, 4], np.int32), np.array([0, 2], np.int16), np.array([3, 2], np.int16)
    )
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


def test_rows_know_their_text() -> None:
    table = made_up(np.random.default_rng(0), [3, 4], depths=2)
    assert [table.locate(row) for row in (0, 2, 3, 6)] == [(0, 0), (0, 2), (1, 0), (1, 3)]
    assert table.span(1) == (3, 7)
    picked = table.select([1])
    assert picked.ranks.tolist() == table.ranks[3:].tolist()
    assert picked.texts == (0,) and picked.about["sources"] == ["run 1"]


def test_ranks_count_tokens_before_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert [int(rank_of(logits, torch.tensor(i))) for i in range(4)] == [3, 0, 2, 1]
    rows = torch.randn(5, 7, 40).mul(2).round()
    ids = torch.randint(0, 40, (5, 7))
    order = rows.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(rank_of(rows, ids), (order == ids[..., None]).int().argmax(dim=-1))


def test_a_text_is_read_as_the_target_wrote_it_and_further_on() -> None:
    target = tiny_target(eos_token_id=None)
    prompt = [5, 9, 200, 31]
    longer = plain_greedy(target, prompt, 16)
    text = Text(tuple(prompt), tuple(longer[:10]))
    reading = trace_text(target, text, Needs(hidden=True), tail=6)
    assert reading.tokens.tolist() == prompt + longer
    true = reading.true_tokens(3)
    assert true.shape == (9, 3)
    assert true[0].tolist() == longer[1:4] and true[8].tolist() == longer[9:12]


def test_the_tail_ends_with_the_context() -> None:
    target = tiny_target(eos_token_id=None, max_position_embeddings=64)
    prompt = list(range(40))
    written = plain_greedy(target, prompt, 24)
    reading = trace_text(target, Text(tuple(prompt), tuple(written)), Needs(), tail=6)
    assert len(reading.tokens) == 65, "one token is predicted at the last place of the context"
    true = reading.true_tokens(4)
    # The last root sits at position 62: one token fits behind it.
    assert (true[-1] >= 0).tolist() == [True, False, False, False]
    assert (true[-4] >= 0).tolist() == [True] * 4


def test_tokens_that_a_draft_vocabulary_lacks_have_no_rank() -> None:
    folder = "eagle/eagle3"
    case = golden_case(folder)
    config = Eagle3Config(speculative_model=str(ROOT / folder / "head"))
    bench = build_context(case.target)
    prompt = case.expected["prompts"][0]
    text = Text(tuple(prompt["input_ids"]), tuple(prompt["greedy_new_ids"]))
    table = measure_ranks(config, bench, [text], depths=2)
    head = config.build(bench).head
    draftable = set(head.vocabulary.target_ids(torch.arange(head.vocabulary.size)).tolist())
    unknown = [row for row, token in enumerate(text.output_ids[1:]) if token not in draftable]
    assert unknown and (table.ranks[unknown, 0] == -1).all()


def test_progress_is_told_and_stopping_keeps_nothing() -> None:
    case = golden("medusa")
    fractions: list[float] = []
    measure_ranks(case.config, case.bench, case.texts, on_progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    with pytest.raises(StoppedError):
        measure_ranks(case.config, case.bench, case.texts, on_progress=stopped)


def test_methods_without_ranks_are_refused() -> None:
    case = golden("medusa")
    mixed = SuffixConfig(use_tree_spec=True, mix_contexts=True)
    unranked = (AutoregressiveConfig(), LookaheadConfig(), mixed)
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
