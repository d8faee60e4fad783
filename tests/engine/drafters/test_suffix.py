"""Suffix decoding drafts what followed before, as likely as it followed; its two indices."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.drafters.lookup import array as array_module
from engine.drafters.lookup import suffix
from engine.drafters.lookup.array import MOST_FOLLOWERS, SuffixArray
from engine.drafters.lookup.automaton import ROOT, Cursor, SuffixAutomaton
from engine.drafters.lookup.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.model.corpus import Corpus
from engine.proposal import Budget
from engine.training.corpus.dialogues import CorpusSettings
from tests.engine.drafters.judges import begin, started, write
from tests.engine.training.conftest import grow, learnable_target
from tests.models import build_context, plain_greedy, tiny_target

MAX_BYTES = 1 << 30
REPEATS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


@pytest.mark.parametrize(("factor", "drafted"), [(1.0, [4, 5, 6]), (2.0, [4, 5, 6, 7, 8, 9])])
def test_draft_is_as_long_as_the_match(factor: float, drafted: list[int]):
    drafter = started(SuffixConfig(max_spec_factor=factor), REPEATS)
    assert drafter.propose(Budget(99)).tokens.tolist() == [3, *drafted]


def followers(text: list[int], context: tuple[int, ...]) -> Counter[int]:
    """How often each token came after a context."""
    n = len(context)
    return Counter(text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == context)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.booleans(), st.integers(2, 7))
def test_drafts_and_probabilities_equal_brute_force(text: list[int], tree: bool, depth: int):
    config = SuffixConfig(
        max_tree_depth=depth, use_tree_spec=tree, max_spec_factor=3.0, max_draft_len=5
    )
    session = started(config, text)
    session.read()
    best = session.best_continuation(Budget(99))
    assert len(best.tokens) <= 3 * best.match_len
    paths: dict[int, tuple[int, ...]] = {0: ()}
    path_probs = {0: 1.0}
    for node, (token, parent, prob) in enumerate(
        zip(best.tokens, best.parents, best.probs, strict=True), start=1
    ):
        # Any context as long as counts allow continues alike: take the one of the match.
        context = tuple(text[len(text) - best.match_len :]) + paths[parent]
        followed = followers(text, context)
        assert prob == pytest.approx(followed[token] / followed.total())
        paths[node] = (*paths[parent], token)
        path_probs[node] = path_probs[parent] * prob
        assert path_probs[node] >= config.min_token_prob
    assert best.score == pytest.approx(sum(path_probs.values()) - 1)
    assert len(set(paths.values())) == len(paths)


def test_earlier_runs_are_matched_only_with_the_global_pool():
    for use, drafted in ((True, [3, 4, 5]), (False, [3])):
        drafter = started(SuffixConfig(use_global_pool=use), [1, 2, 3, 4, 5, 6])
        drafter.close()
        assert begin(drafter.drafter, [8, 2, 3]).propose(Budget(99)).tokens.tolist() == drafted


def test_a_full_global_pool_begins_anew_and_keeps_the_newest_run():
    config = SuffixConfig(use_global_pool=True, global_pool_size=1000)
    drafter = started(config, [1, 2]).drafter
    for i in range(40):
        begin(drafter, [i, 100 + i] * 50).close()
        assert drafter.pool.num_tokens <= 1000 + 101
    assert 139 in drafter.pool.next[ROOT] and 100 not in drafter.pool.next[ROOT]


# ---- the automaton knows what brute force knows, at every moment

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=3)


def occurrences(texts: list[list[int]], part: tuple[int, ...]) -> int:
    n = len(part)
    return sum(tuple(t[i : i + n]) == part for t in texts for i in range(len(t) - n + 1))


def substrings(texts: list[list[int]], max_len: int) -> set[tuple[int, ...]]:
    return {
        tuple(t[i:j])
        for t in texts
        for i in range(len(t))
        for j in range(i + 1, min(len(t), i + max_len) + 1)
    }


def state_of(automaton: SuffixAutomaton, part: tuple[int, ...]) -> int | None:
    state = ROOT
    for token in part:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


def build(texts: list[list[int]], max_depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_depth, MAX_BYTES)
    for i, text in enumerate(texts):
        if i:
            automaton.end_sequence()
        for token in text:
            automaton.append(token)
    return automaton


@settings(deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_counts_equal_brute_force_at_every_moment(texts: list[list[int]], max_depth: int):
    automaton = SuffixAutomaton(max_depth, MAX_BYTES)
    for i, text in enumerate(texts):
        automaton.end_sequence()
        for j, token in enumerate(text):
            automaton.append(token)
            seen = [*texts[:i], text[: j + 1]]
            for part in substrings(seen, max_depth):
                state = state_of(automaton, part)
                assert state is not None
                assert automaton.count[state] == occurrences(seen, part)


@settings(deadline=None)
@given(TEXTS, st.integers(2, 5))
def test_links_visit_all_suffixes_longest_first(texts: list[list[int]], max_depth: int):
    automaton = build(texts, max_depth)
    text = texts[-1]
    state, shortest = automaton.suffix, min(len(text), max_depth)
    while state != ROOT:
        for length in range(shortest, automaton.shortest(state) - 1, -1):
            assert state_of(automaton, tuple(text[len(text) - length :])) == state
        shortest = automaton.shortest(state) - 1
        state = automaton.link[state]
    assert shortest == 0


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=20), st.integers(2, 5))
def test_cursor_holds_the_longest_known_suffix(
    texts: list[list[int]], query: list[int], max_depth: int
):
    automaton = build(texts, max_depth)
    known = substrings(texts, max_depth)
    cursor = Cursor(automaton)
    for end in range(1, len(query) + 1):
        cursor.advance(query[end - 1])
        fits = [
            n for n in range(1, min(end, max_depth) + 1) if tuple(query[end - n : end]) in known
        ]
        assert cursor.length == max(fits, default=0)
        assert cursor.state == state_of(automaton, tuple(query[end - cursor.length : end]))


def test_size_and_work_grow_linearly():
    worst = SuffixAutomaton(24, MAX_BYTES)
    for token in [0] * 4000 + [1] + [0] * 4000:
        worst.append(token)
    assert len(worst.next) <= 2 * worst.num_tokens
    assert sum(map(len, worst.next)) <= 3 * worst.num_tokens
    # Every occurrence was counted once by one: so many steps of work.
    assert sum(worst.count) <= (worst.max_depth + 1) * worst.num_tokens


# ---- the suffix array of a corpus


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=20), max_size=6),
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
            counts = {token: count for token, _, count in array.followers(rows)}
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
    num_steps = []
    for datastore in (str(corpus), None):
        config = SuffixConfig(datastore=datastore, use_tree_spec=tree, max_spec_factor=2.0)
        text = write(target, config.build(build_context(target)), prompt, tokens=len(expected))
        assert text.output == expected
        num_steps.append(len(text.steps))
    assert num_steps[0] < num_steps[1]


def test_what_is_no_corpus_of_the_target_or_takes_too_much_memory_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix, "STORE_BYTES", 1 << 15)
    for folder, target, words in (
        (tmp_path, learnable_target(), "is not a corpus"),
        (corpus, tiny_target(), "was written by"),
        (corpus, learnable_target(), "at max_tree_depth 48. Lower max_tree_depth"),
    ):
        with pytest.raises(ConfigError, match=words):
            config = SuffixConfig(datastore=str(folder), max_tree_depth=48)
            config.build(build_context(target))


def test_a_corpus_that_has_grown_is_read_again(corpus: Path) -> None:
    target = learnable_target()
    config = SuffixConfig(datastore=str(corpus))
    first = config.build(build_context(target)).store
    assert config.build(build_context(target)).store is first
    dialogues = corpus / "dialogues.jsonl"
    os.utime(dialogues, ns=(0, dialogues.stat().st_mtime_ns + 1))
    assert config.build(build_context(target)).store is not first
