"""The suffix array finds every context and counts its continuations exactly."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.lookup import array as array_module
from engine.drafters.lookup import suffix
from engine.drafters.lookup.array import MOST_FOLLOWERS, SuffixArray
from engine.drafters.lookup.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.model.corpus import Corpus
from engine.steps import End, Step
from engine.training.corpus.dialogues import CorpusSettings
from tests.engine.training.conftest import grow, learnable_target
from tests.models import build_context, plain_greedy, tiny_target

TEXTS = st.lists(st.lists(st.integers(0, 5), max_size=20), max_size=6)


@given(
    TEXTS,
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    # Tokens of one byte, of two, and more than 2 bytes hold.
    st.sampled_from([(1, 300), (259, 60_000), (20_001, 120_000)]),
    st.sampled_from([4, 9]),
    st.sampled_from([0, array_module.FEW_ROWS]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_matches_and_counts_equal_a_search_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    texts: list[list[int]],
    context: list[int],
    size: tuple[int, int],
    depth: int,
    few_rows: int,
) -> None:
    monkeypatch.setattr(array_module, "FEW_ROWS", few_rows)
    factor, vocab = size
    texts = [[factor * token for token in text] for text in texts]
    context = [factor * token for token in context]
    array = SuffixArray(texts, depth=depth, vocab=vocab)
    assert len(array._rows) == sum(map(len, texts))
    found = {rows.length: rows for rows in array.matches(context)}
    assert list(found) == sorted(found, reverse=True)
    for length in range(1, min(len(context), array.depth - 1) + 1):
        wanted = context[-length:]
        followed: Counter[int | None] = Counter()
        for text in texts:
            for at in range(len(text) - length + 1):
                if text[at : at + length] == wanted:
                    followed[text[at + length] if at + length < len(text) else None] += 1
        assert (length in found) == bool(followed)
        if length in found:
            rows = found[length]
            assert rows.end - rows.begin == sum(followed.values())
            following = array.followers(rows)
            counts = {token: count for token, _, count in following}
            assert all(array.after(rows, token) == onward for token, onward, _ in following)
            assert array.after(rows, 7 * factor) is None
            del followed[None]
            assert counts == dict(followed)


def test_the_commonest_continuations_come_first_and_rare_ones_are_left_out() -> None:
    texts = [[9, token] for token in range(40) for _ in range(token + 1)]
    array = SuffixArray(texts, depth=4, vocab=100)
    (rows,) = array.matches([9])
    found = array.followers(rows)
    assert [token for token, _, _ in found] == list(range(39, 39 - MOST_FOLLOWERS, -1))
    assert found[0][2] == 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for _ in grow(learnable_target(), folder, CorpusSettings(max_len=64), num_tokens=1500, rows=4):
        pass
    return folder


def answered_greedily(folder: Path) -> tuple[list[int], list[int]]:
    """A prompt of the corpus, and the answer in it that the target gives again."""
    corpus, target = Corpus.open(folder), learnable_target()
    for entry in corpus.entries:
        start, end = entry.spans[0]
        tokens = entry.token_ids.tolist()
        if end - start >= 12 and plain_greedy(target, tokens[:start], 12) == tokens[start:][:12]:
            return tokens[:start], tokens[start : start + 12]
    raise AssertionError("no answer was greedy")


@pytest.mark.parametrize("tree", [False, True])
def test_a_corpus_of_the_targets_own_text_drafts_losslessly(corpus: Path, tree: bool) -> None:
    target = learnable_target()
    prompt, expected = answered_greedily(corpus)
    limits = Limits(max_new_tokens=len(expected), ignore_eos=True)
    steps = {}
    for datastore in (None, str(corpus)):
        config = SuffixConfig(datastore=datastore, use_tree_spec=tree, max_spec_factor=2.0)
        drafter = config.build(build_context(target))
        records = list(decode(target, drafter, prompt, sampling=Sampling(), limits=limits))
        assert isinstance(records[-1], End) and list(records[-1].output_ids) == expected
        steps[datastore] = sum(isinstance(record, Step) for record in records)
    assert steps[str(corpus)] < steps[None]


def test_a_folder_that_is_no_corpus_and_one_of_another_target_are_refused(
    corpus: Path, tmp_path: Path
) -> None:
    target = learnable_target()
    with pytest.raises(ConfigError, match="is not a corpus"):
        SuffixConfig(datastore=str(tmp_path)).build(build_context(target))
    with pytest.raises(ConfigError, match="was written by"):
        SuffixConfig(datastore=str(corpus)).build(build_context(tiny_target()))


def test_a_corpus_that_takes_too_much_memory_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix, "STORE_BYTES", 1 << 15)
    with pytest.raises(ConfigError, match="at max_tree_depth 48. Lower max_tree_depth"):
        config = SuffixConfig(datastore=str(corpus), max_tree_depth=48)
        config.build(build_context(learnable_target()))


def test_a_corpus_that_has_grown_is_read_again(corpus: Path) -> None:
    target = learnable_target()
    config = SuffixConfig(datastore=str(corpus))
    first = config.build(build_context(target))._store
    assert config.build(build_context(target))._store is first
    dialogues = corpus / "dialogues.jsonl"
    os.utime(dialogues, ns=(0, dialogues.stat().st_mtime_ns + 1))
    assert config.build(build_context(target))._store is not first
