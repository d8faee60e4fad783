"""Two drafts in one tree: common prefixes once, likeliest paths first, credit where it is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.combined import UNSAID, Merger
from engine.proposal import Proposal
from engine.tree import TreeShape, merge_prefixes

Paths = dict[tuple[int, ...], float]
"""Per path of tokens below the root: the probability of its last token."""


def proposal(paths: Paths, *, said: bool = True) -> Proposal:
    tokens, shape, _ = merge_prefixes(list(paths))
    probs = [1.0, *(paths[path] for path in _paths(tokens, shape))]
    return Proposal(
        torch.tensor([99, *tokens]), shape, draft_probs=torch.tensor(probs) if said else None
    )


def _paths(tokens: Sequence[int], shape: TreeShape) -> Iterator[tuple[int, ...]]:
    for node in range(1, len(shape)):
        yield tuple(tokens[i - 1] for i in shape.path_to(node))


def paths_of(merged: Proposal) -> Paths:
    assert merged.draft_probs is not None
    paths = _paths(merged.tokens.tolist()[1:], merged.shape)
    return dict(zip(paths, merged.draft_probs.tolist()[1:], strict=True))


def test_common_prefixes_are_one_node_with_the_mean_of_both() -> None:
    first = proposal({(1,): 0.5, (1, 2): 0.8, (3,): 0.25})
    second = proposal({(1,): 0.25, (4,): 0.5, (1, 5): 0.5})
    found = paths_of(Merger().merge(first, second, 99))
    expected = {
        (1,): 0.375,
        (1, 2): 0.4,
        (1, 5): 0.25,
        (3,): 0.125,
        (4,): 0.25,
    }
    assert found == pytest.approx(expected)
    # Where only one says how it goes on, it is believed.
    alone = proposal({(1,): 0.5, (1, 2): 0.8, (1, 2, 3): 0.9})
    found = paths_of(Merger().merge(alone, second, 99))
    assert found[1, 2] == pytest.approx(0.4) and found[1, 2, 3] == pytest.approx(0.9)


def test_one_empty_draft_leaves_the_other() -> None:
    nothing = Proposal(torch.tensor([99]), TreeShape.chain(0))
    paths = {(1,): 0.5, (1, 2): 0.75, (3,): 0.25}
    for pair in ((nothing, proposal(paths)), (proposal(paths), nothing)):
        merged = Merger().merge(*pair, 99)
        assert paths_of(merged) == pytest.approx(paths) and int(merged.tokens[0]) == 99
    assert len(Merger().merge(nothing, nothing, 9).shape) == 1


def test_a_draft_that_does_not_say_is_taken_at_even_odds() -> None:
    silent = proposal({(7,): 1.0, (7, 8): 1.0}, said=False)
    found = paths_of(Merger().merge(silent, proposal({(9,): 0.5}), 99))
    assert found == pytest.approx({(7,): UNSAID / 2, (7, 8): UNSAID, (9,): 0.25})


@st.composite
def drafts(draw: st.DrawFn) -> Paths:
    paths: Paths = {}
    for _ in range(draw(st.integers(0, 7))):
        parent = draw(st.sampled_from([(), *paths]))
        paths.setdefault((*parent, draw(st.integers(0, 3))), draw(st.floats(0.05, 0.6)))
    return paths


@given(drafts(), drafts(), st.integers(1, 12))
def test_a_merged_tree_holds_the_likeliest_paths_of_both(a: Paths, b: Paths, room: int) -> None:
    everything = paths_of(Merger().merge(proposal(a), proposal(b), 99))
    assert everything.keys() == a.keys() | b.keys()
    merged = Merger().merge(proposal(a), proposal(b), room)
    kept = paths_of(merged)
    assert len(kept) == min(room, len(everything))

    def path_prob(path: tuple[int, ...]) -> float:
        return float(torch.tensor([everything[path[:i]] for i in range(1, len(path) + 1)]).prod())

    left_out = [path_prob(path) for path in everything if path not in kept]
    assert all(everything[path] == prob for path, prob in kept.items())
    assert min(map(path_prob, kept), default=1.0) >= max(left_out, default=0.0) - 1e-6
    for siblings in merged.shape.children:
        tokens = merged.tokens[list(siblings)].tolist()
        assert len(set(tokens)) == len(tokens)


def test_who_was_right_is_believed_more() -> None:
    right, wrong = {(1,): 0.9, (1, 2): 0.9}, {(3,): 0.9, (1,): 0.05}
    for second_is_right in (False, True):
        merger = Merger()
        assert merger.weight == 0.5
        for _ in range(60):
            pair = (wrong, right) if second_is_right else (right, wrong)
            merger.merge(proposal(pair[0]), proposal(pair[1]), 9)
            merger.learn([1, 2, 5])
        assert (merger.weight if second_is_right else 1 - merger.weight) > 0.8
        # Nothing is learnt from a step without a draft.
        weight = merger.weight
        merger.learn([3, 2, 1])
        assert merger.weight == weight
    # Nor where only one had spoken.
    merger = Merger()
    merger.merge(proposal(right), Proposal(torch.tensor([99]), TreeShape.chain(0)), 9)
    merger.learn([1, 2])
    assert merger.weight == 0.5
