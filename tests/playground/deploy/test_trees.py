"""Choice trees survive every text format, and every fault is named."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.drafters.eagle.methods import MC_SIM_7B_63
from engine.errors import TreeError
from engine.tree import ChoiceTree
from playground.deploy.trees import FORMATS, format_tree, read_growmap, write_growmap
from playground.deploy.trees import parse_tree as parse_any_tree
from presets.reading import parse_yaml

NARROW = ["cartesian", "sequoia"]
ANY = [name for name in FORMATS if name not in NARROW]
DOCUMENTED = ChoiceTree.parse("[[0,0,0,0],[0,1,0],[1,0],[1,1]]")
"""The nine candidates of TensorRT-LLM's documentation, by their leaves."""

parse_tree = partial(parse_any_tree, read_yaml=partial(parse_yaml, where="The text"))
paths = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def trees(draw: st.DrawFn) -> ChoiceTree:
    """Any connected tree, ranks skipped or not."""
    ends = draw(st.sets(paths, min_size=1, max_size=12))
    nodes = {end[:depth] for end in ends for depth in range(1, len(end) + 1)}
    return ChoiceTree.parse(sorted(nodes), form="candidates")


@st.composite
def full_trees(draw: st.DrawFn) -> tuple[list[int], ChoiceTree]:
    """A Cartesian tree and its counts."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return counts, parse_tree(json.dumps([1, *counts]))


@given(tree=trees(), name=st.sampled_from(ANY), kind=st.sampled_from(["Medusa", "Eagle"]))
@example(tree=MC_SIM_7B_63, name="triton", kind="Medusa")
@settings(deadline=None, max_examples=40)
def test_every_tree_survives_every_format(tree: ChoiceTree, name: str, kind: str) -> None:
    text = format_tree(tree, name, kind)
    assert parse_tree(text) == tree
    assert (name == "yaml") == (f"{kind.lower()}_choices" in text)


@given(tree=trees(), name=st.sampled_from(NARROW))
@settings(deadline=None, max_examples=40)
def test_what_a_narrow_format_cannot_say_is_refused_and_nothing_else(
    tree: ChoiceTree, name: str
) -> None:
    try:
        text = format_tree(tree, name)
    except TreeError:
        in_a_row = all(
            path[:-1] + (rank,) in tree.paths for path in tree.paths for rank in range(path[-1])
        )
        nodes = zip(tree.shape.depths.tolist(), tree.shape.children, strict=True)
        alike = len({(depth, len(below)) for depth, below in nodes}) == tree.depth + 1
        assert not in_a_row or (name == "cartesian" and not alike)
    else:
        assert parse_tree(text) == tree


@given(made=full_trees())
@settings(deadline=None, max_examples=40)
def test_cartesian_counts_are_the_product(made: tuple[list[int], ChoiceTree]) -> None:
    counts, tree = made
    sizes = [1]
    for depth, count in enumerate(counts, 1):
        sizes.append(sizes[-1] * count)
        assert sum(len(path) == depth for path in tree.paths) == sizes[-1]
    assert json.loads(format_tree(tree, "cartesian")) == [1, *counts]


@given(tree=trees(), key=st.sampled_from(["medusa_choices", "eagle_choices"]), flow=st.booleans())
@settings(deadline=None, max_examples=40)
def test_yaml_as_a_library_writes_it_is_read(tree: ChoiceTree, key: str, flow: bool) -> None:
    block = {"decoding_type": "Medusa", key: tree.as_lists(), "num_medusa_heads": 4}
    text = yaml.safe_dump({"speculative_config": block, "x": [1, 2]}, default_flow_style=flow)
    if not flow:
        assert parse_tree(text) == tree
    assert parse_tree(yaml.safe_dump(block, default_flow_style=None)) == tree
    assert parse_tree(json.dumps(block)) == tree


@given(text=st.text(alphabet="[](){},0123- \n=#\"'ab:.", max_size=40))
@example(text="'{\"0")
@settings(deadline=None, max_examples=40)
def test_any_text_is_a_tree_or_a_sentence(text: str) -> None:
    try:
        tree = parse_tree(text)
    except TreeError as error:
        assert str(error).endswith(".")
    else:
        assert tree.paths and tree == ChoiceTree.parse(list(tree.paths), form="candidates")


@pytest.mark.parametrize(
    "text",
    [
        "mc_sim_7b_63 = [[0], [0, 0], [1]]",
        "# Medusa\nchoices: list = [\n  [0], [0, 0],\n  [1],\n]",
        "'[[0], [0, 0], [1]]'",
        "[[0, 0], [1]]",
        "[(0,), (0, 0), (1,)]",
        "((0,), (0, 0), (1,))",
        "{0}, {0, 0}, {1}",
        "{{0}, {0, 0}, {1}}",
        "speculative_config:\n  medusa_choices: [[0],\n    [0, 0], [1]]\n  a: [9]",
        "medusa_choices:\n  # two\n  - [0]\n  - [0, 0]\n  - [1]\nother: 1",
        "medusa_choices:\n- - 0\n- - 0\n  - 0\n- - 1\nother: 1",
        'speculative_token_tree: "[(0,), (0, 0), (1,)]"',
        '{"choices": [[0], [0, 0], [1]]}',
        "name: x\nmethods:\n- Medusa\ncandidates:\n  - [0]\n  - [0, 0]\n  - [1]\n",
        '{"Successors": [[1, 2], [3], [], []]}',
    ],
)
def test_each_format_is_read(text: str) -> None:
    assert parse_tree(text).as_lists() == [[0], [1], [0, 0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("[]", "at least one path, got an empty list"),
        ("[[0], []]", "must list paths of ranks from 0, as [[0], [0, 0]], got []"),
        ("[[0], [0, 1, 0]]", "[0, 1, 0] needs its parent [0, 1]"),
        ("[[0],\n [1],\n [0]]", "lists [0] twice"),
        ("[[0], [0, -1]]", "got [0, -1]"),
        ("[[0], [0, x]]", "got [0, 'x']"),
        ("[[0], [0, 1e3]]", "got [0, 1000.0]"),
        ("[[0], [10000000000]]", "got [10000000000]"),
        ("[[0], 1]", "got 1"),
        ("[[[0]]]", "got [[0]]"),
        ("[[0], [0, 0]", "list of paths such as [[0], [0, 0], [1]]; check the brackets"),
        ("[[0] [1, 0]]", "a comma is missing before [1, 0]"),
        ("[1]", "then counts from 1: [1, 7, 6] is 7 choices with 6 below each; got [1]"),
        ("[0, 0]", "One path alone is written [[0, 0]]"),
        ("[1, 0, 2]", "got [1, 0, 2]"),
        ("[1, 40, 40]", "at most 1024 nodes, got 1640"),
        ("{0}, {0, 0", "check the brackets"),
        ("a tree", "is no choice tree"),
        ("- [0]\n- [0, 0]", "is no choice tree"),
        ('{"Successors": [[1], [1]]}', "node 1 names 1 as successor; successors come after"),
        ('{"Successors": [[1, 2], [2], []]}', "Growmap node 2 is the successor of two nodes"),
        ('{"Successors": [[1], [], []]}', "Growmap node 2 has no parent"),
        ('{"Successors": [[1], [}', "not valid JSON: Expecting value (line 1, column 23)"),
        ("choices: [[0]]\neagle_choices: [[0]]", "has 2 trees (choices, eagle_choices)"),
        ("choices:\nname: x", "must have a list below it"),
        ("choices:\n- [0]\n- [0, x]", "got [0, 'x']"),
        ("[" * 300_000, "characters"),
    ],
)  # fmt: skip
def test_every_fault_is_named(text: str, words: str) -> None:
    with pytest.raises(TreeError, match=re.escape(words)):
        parse_tree(text)


def test_growmap_has_every_key_that_sequoia_writes() -> None:
    assert write_growmap(ChoiceTree.parse("[[0], [1], [0, 0]]")) == {
        "roots": [[0], [1, 2], [3]],
        "branches": [[2], [1, 0], [0]],
        "Successors": [[1, 2], [3], [], []],
        "mask": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        "depth": [0, 1, 1, 2],
        "size": 4,
    }
    assert read_growmap(write_growmap(DOCUMENTED)) == DOCUMENTED
