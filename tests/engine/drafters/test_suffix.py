"""Suffix decoding drafts what followed before, as likely as it followed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Sampling
from engine.drafters.base import Start
from engine.drafters.lookup.automaton import ROOT, Cursor, SuffixAutomaton
from engine.drafters.lookup.mixing import COUNTS, TargetPredictions
from engine.drafters.lookup.suffix import GlobalPool, SuffixConfig, SuffixDrafter
from engine.proposal import Budget, TargetOutput
from engine.sampling import SeededDraws
from tests.engine.drafters.judges import (
    target_of,
    write,
)
from tests.models import build_context


def started(config: SuffixConfig, prompt: list[int]) -> SuffixDrafter:
    """A drafter that has read the prompt; its last token is the root."""
    drafter = config.build(build_context(target_of("llama")))
    shown = TargetOutput(torch.zeros(1, 1))
    drafter.start(Start(prompt[:-1], prompt[-1], shown, Sampling(), SeededDraws(0)))
    return drafter


def test_draft_is_as_long_as_the_match():
    proposal = started(SuffixConfig(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]).propose(Budget(99))
    assert proposal.tokens.tolist() == [3, 4, 5, 6]
    longer = SuffixConfig(max_spec_factor=2.0)
    proposal = started(longer, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]).propose(Budget(99))
    assert proposal.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.booleans(), st.integers(2, 7))
def test_drafts_and_probabilities_equal_brute_force(text: list[int], tree: bool, depth: int):
    config = SuffixConfig(
        max_tree_depth=depth, use_tree_spec=tree, max_spec_factor=3.0, max_draft_len=5
    )
    drafter = started(config, text)
    best = drafter.best_continuation(Budget(99))
    assert len(best.tokens) <= 3 * best.match_len
    paths: dict[int, tuple[int, ...]] = {0: ()}
    path_probs = {0: 1.0}
    for node, (token, parent, prob) in enumerate(
        zip(best.tokens, best.parents, best.probs, strict=True), start=1
    ):
        # Any context as long as counts allow continues alike: take the one of the match.
        context = tuple(text[len(text) - best.match_len :]) + paths[parent]
        followed = Counter(
            text[i + len(context)]
            for i in range(len(text) - len(context))
            if tuple(text[i : i + len(context)]) == context
        )
        assert prob == pytest.approx(followed[token] / followed.total())
        paths[node] = (*paths[parent], token)
        path_probs[node] = path_probs[parent] * prob
        assert path_probs[node] >= config.min_token_prob
    assert best.score == pytest.approx(sum(path_probs.values()) - 1)
    assert len(set(paths.values())) == len(paths)


def test_earlier_runs_are_matched_only_with_the_global_pool():
    for use, drafted in ((True, [3, 4, 5]), (False, [3])):
        drafter = started(SuffixConfig(use_global_pool=use), [1, 2, 3, 4, 5, 6])
        drafter.finish()
        assert (drafter._pool.automata[-1].num_tokens == 6) == use
        shown = TargetOutput(torch.zeros(1, 1))
        drafter.start(Start([8, 2], 3, shown, Sampling(), SeededDraws(0)))
        assert drafter.propose(Budget(99)).tokens.tolist() == drafted


def test_global_pool_stays_below_its_size_and_keeps_the_newest():
    pool = GlobalPool(1000, 8)
    for i in range(40):
        pool.add([i, 100 + i] * 50)
        assert sum(a.num_tokens for a in pool.automata) <= 1000 + 100
    assert 139 in pool.automata[-1].next[0] and len(pool.automata) == 2
    assert all(100 not in a.next[0] for a in pool.automata)


def test_mixed_contexts_draft_where_the_longest_match_alone_is_wrong():
    # 1 2 was followed by 3 three times; 9 1 2 only once, by 4.
    text = [1, 2, 3, 0, 1, 2, 3, 5, 1, 2, 3, 6, 9, 1, 2, 4, 7, 9, 1, 2]
    longest = SuffixConfig(max_draft_len=1, use_tree_spec=True)
    assert started(longest, text).propose(Budget(99)).tokens.tolist() == [2, 4]
    proposal = started(longest.replace(mix_contexts=True), text).propose(Budget(99))
    assert sorted(proposal.tokens.tolist()[1:]) == [3, 4]
    assert proposal.shape.parents == (-1, 0, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.floats(0.1, 8.0))
def test_mixed_probabilities_are_those_of_the_formula(text: list[int], escape: float):
    config = SuffixConfig(
        use_tree_spec=True,
        mix_contexts=True,
        max_tree_depth=60,
        max_total_draft_tokens=12,
        min_token_prob=0.0,
        escape=escape,
        text_weight=2.0,
    )
    drafter = started(config, text)
    best = drafter.mixed_continuation(Budget(5))
    lengths = [match.length for match in drafter._distinct_contexts()]
    children: dict[int, list[int]] = {0: []}
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, (token, parent) in enumerate(zip(best.tokens, best.parents, strict=True), start=1):
        paths[node] = (*paths[parent], token)
        children.setdefault(parent, []).append(node)
    for parent, nodes in children.items():
        probs: dict[int, float] = {}
        for length in lengths:
            context = tuple(text[len(text) - length :]) + paths[parent]
            followed = Counter(
                text[i + len(context)]
                for i in range(len(text) - len(context))
                if tuple(text[i : i + len(context)]) == context
            )
            if not followed:
                continue
            total = 2.0 * followed.total()
            share = total / (total + escape * len(followed))
            probs = {token: prob * (1 - share) for token, prob in probs.items()}
            for token, count in followed.items():
                probs[token] = probs.get(token, 0.0) + share * 2.0 * count / total
        assert sum(probs.values()) <= 1 + 1e-9
        for node in nodes:
            assert best.probs[node - 1] == pytest.approx(probs[best.tokens[node - 1]])


def test_what_the_target_said_after_rejected_tokens_is_drafted_later():
    predicted = TargetPredictions()
    predicted.observe(4, [5, 7, 8], [-1, 0, 0], [8, 9, 6])
    assert list(predicted.matches([1, 5, 7])) == [(5, 7), (7,)]
    assert predicted.followers((5, 7)) == [(9, (7, 9), COUNTS[2])]
    assert predicted.followers((7,)) == [(9, (7, 9), COUNTS[1])]
    assert predicted.followers((4, 5)) == [(8, (5, 8), COUNTS[2])]
    assert list(predicted.matches([3])) == [] and predicted.followers((7, 9)) == []
    predicted.observe(5, [7], [-1], [3])
    assert predicted.followers((5, 7)) == [(3, (7, 3), COUNTS[2])]


def test_mixed_contexts_use_predictions_after_rejected_tokens():
    target = target_of("llama")
    config = SuffixConfig(use_tree_spec=True, mix_contexts=True)
    drafter = config.build(build_context(target))
    write(target, drafter, [3, 200, 17, 99, 3, 200], tokens=30)
    predictions = drafter._predictions._next._values
    text = [3, 200, 17, 99, 3, 200]
    kept = set(zip(text, text[1:], strict=False))
    assert any(len(key) == 2 and key not in kept for key in predictions)


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
        following = automaton.next[state].get(token)
        if following is None:
            return None
        state = following
    return state


def build(texts: list[list[int]], max_depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_depth)
    for i, text in enumerate(texts):
        if i:
            automaton.end_sequence()
        for token in text:
            automaton.append(token)
    return automaton


@settings(deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_counts_equal_brute_force_at_every_moment(texts: list[list[int]], max_depth: int):
    automaton = SuffixAutomaton(max_depth)
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
@given(TEXTS)
def test_it_accepts_exactly_the_substrings(texts: list[list[int]]):
    automaton = build(texts, 3)
    known = substrings(texts, 99)
    for part in known:
        for token in range(3):
            longer = (*part, token)
            assert (state_of(automaton, longer) is not None) == (longer in known)


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
    worst = SuffixAutomaton(24)
    for token in [0] * 4000 + [1] + [0] * 4000:
        worst.append(token)
    assert len(worst.next) <= 2 * worst.num_tokens
    assert sum(map(len, worst.next)) <= 3 * worst.num_tokens
    # Every occurrence was counted once by one: so many steps of work.
    assert sum(worst.count) <= (worst.max_depth + 1) * worst.num_tokens
