"""The automaton knows what brute force knows, at every moment."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.lookup.automaton import ROOT, Cursor, SuffixAutomaton

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
