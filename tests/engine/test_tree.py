"""Choice trees: any valid tree survives its text forms, any invalid one is refused by its path."""

from __future__ import annotations

import tracemalloc
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TreeError
from engine.proposal import DraftDists, Proposal
from engine.tree import MAX_NODES, ChoiceTree, Path, TreeShape, merge_prefixes

LEAVES = [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]
"""TensorRT-LLM's documented example: nine candidates."""
NODES = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]


@st.composite
def paths(draw: st.DrawFn) -> set[Path]:
    """The nodes of a valid tree: every prefix is there, ranks may have holes."""
    ends = draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=12)
    )
    return {tuple(end[:depth]) for end in ends for depth in range(1, len(end) + 1)}


def test_leaves_and_candidates_of_the_documented_tree_are_the_same_tree() -> None:
    tree = ChoiceTree.parse(LEAVES)
    assert tree.as_lists() == NODES
    assert tree == ChoiceTree.parse(NODES) == ChoiceTree.parse(str(LEAVES))
    assert tree.shape.parents == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 7)
    assert tree.shape.depths.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    assert (tree.depth, tree.max_rank, len(tree)) == (4, 1, 9)


@pytest.mark.parametrize(
    "paths",
    [
        [(rank, other) for rank in range(175) for other in range(175)],
        [(0,) * 1200],
        [(rank, *[0] * 1000) for rank in range(1000)],
        [(0,) * depth for depth in range(1, 1600)],
    ],
    ids=["30,000 paths", "one of 1,200", "1,000 of 1,000", "a chain of 1,600"],
)
@pytest.mark.parametrize("form", ["auto", "candidates"])
def test_too_large_a_tree_is_refused_before_its_prefixes_are_made(
    paths: list[Path], form: Literal["auto", "candidates"]
) -> None:
    tracemalloc.start()
    with pytest.raises(TreeError, match="at most 1024 nodes"):
        ChoiceTree.parse(paths, form=form)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


@given(paths(), st.randoms())
def test_every_form_of_a_tree_reads_back_as_the_same_tree(nodes: set[Path], rng: object) -> None:
    shuffled = sorted(nodes)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    tree = ChoiceTree.parse([list(p) for p in shuffled], form="candidates")
    assert list(tree.paths) == sorted(nodes, key=lambda p: (len(p), p))
    for value in (tree.as_lists(), tree.paths, str(tree.as_lists()), str(tree.paths)):
        assert ChoiceTree.parse(value, form="candidates") == tree
    assert set(tree.leaves) == nodes - {path[:-1] for path in nodes}
    assert ChoiceTree.parse([list(p) for p in tree.leaves]) == tree
    assert ChoiceTree.parse(tree.as_lists()) == tree


@given(paths())
def test_a_trees_shape_has_its_paths(nodes: set[Path]) -> None:
    tree = ChoiceTree.of(nodes)
    assert len(tree.shape) == len(nodes) + 1
    for node, path in enumerate(tree.paths, start=1):
        assert tree.shape.depths[node] == len(path)
        assert tuple(tree.ranks[i] for i in tree.shape.path_to(node)) == path


def test_a_tree_deeper_or_wider_than_its_drafter_is_refused() -> None:
    tree = ChoiceTree.parse(NODES)
    tree.check_fits(depth=4, ranks=2, what="the drafter")
    with pytest.raises(TreeError, match=r"\[0, 0, 0, 0\] has depth 4, but the drafter drafts 3"):
        tree.check_fits(depth=3, ranks=2, what="the drafter")
    with pytest.raises(TreeError, match="uses rank 1, but the drafter offers ranks 0 to 0"):
        tree.check_fits(depth=4, ranks=1, what="the drafter")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([[0], [True]], "True"),
        ([[0], ["1"]], "'1'"),
        ({}, "{}"),
        (None, "None"),
        (7, "7"),
        ("[[0], [0, 0]", "list of paths"),
        ("__import__('os')", "list of paths"),
        ("[[0]" * 60_000, "240000"),
        ("(" * 5_000, "list of paths"),
        ([[0, 0], [0], [1, 0], [2]], "[1, 0]"),
        ([[i] for i in range(MAX_NODES + 1)], f"{MAX_NODES + 1}"),
    ],
    ids=str,
)
def test_every_kind_of_invalid_tree_is_refused_naming_what_is_wrong(
    value: object, says: str
) -> None:
    with pytest.raises(TreeError) as caught:
        ChoiceTree.parse(value)
    assert says in str(caught.value)


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 3], [-1, 0, -1]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(TreeError, match="parents"):
        TreeShape(parents)


@given(paths(), st.integers(0, 6))
def test_a_cut_proposal_keeps_the_nodes_up_to_the_depth(nodes: set[Path], max_depth: int) -> None:
    tree = ChoiceTree.parse([list(p) for p in nodes], form="candidates")
    n = len(tree.shape)
    inner = sorted(set(tree.shape.parents[1:]))
    dists = DraftDists(
        torch.arange(len(inner) * 3.0).view(-1, 3), {p: i for i, p in enumerate(inner)}
    )
    whole = Proposal(torch.arange(n), tree.shape, tree.ranks, torch.arange(n) / n, dists)
    cut = whole.cut(max_depth)
    kept = [0, *(i for i, p in enumerate(tree.paths, start=1) if len(p) <= max_depth)]
    assert cut.tokens.tolist() == kept
    assert cut.draft_probs is not None
    assert cut.draft_probs.tolist() == (torch.tensor(kept) / n).tolist()
    assert list(cut.ranks or ()) == [tree.ranks[i] for i in kept]
    parents = [kept[p] if p >= 0 else -1 for p in cut.shape.parents]
    assert parents == [tree.shape.parents[i] for i in kept]
    for node, children in enumerate(cut.shape.children):
        if children:
            assert cut.dists is not None
            row = cut.dists.row_of_parent[node]
            assert cut.dists.probs[row].tolist() == dists.probs[inner.index(kept[node])].tolist()


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8))
def test_merged_beams_are_one_tree_without_equal_siblings(beams: list[list[int]]) -> None:
    tokens, shape, nodes = merge_prefixes(beams)
    assert len(shape) == len(tokens) + 1
    assert len(tokens) == len({tuple(b[:d]) for b in beams for d in range(1, len(b) + 1)})
    for beam, walked in zip(beams, nodes, strict=True):
        assert [tokens[node - 1] for node in walked] == beam
        assert list(shape.path_to(walked[-1])) == walked if walked else beam == []
    for children in shape.children:
        siblings = [tokens[c - 1] for c in children]
        assert len(siblings) == len(set(siblings))
