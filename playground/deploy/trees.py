"""Choice trees as text: reads and writes the formats of other tools, with detection.

`parse_tree` detects the format:

    [[0], [0, 0], [1]]                        Medusa, EAGLE, TensorRT-LLM; also `name = [...]`
    [(0,), (0, 0), (1,)]                      vLLM until 0.20
    {0}, {0, 0}, {1}                          Triton
    [1, 7, 6]                                 Cartesian: 1 root, 7 choices below it, 6 below each
    {"Successors": [[1, 2], [3], [], []]}     Sequoia's growmap as JSON
    medusa_choices: [[0], [0, 0], [1]]        YAML, in flow or block style
    {"choices": …, "retrieve_indices": …}     what engines compute (`tree_buffers`), as JSON

Lists contain every candidate, or only the ends of paths (`ChoiceTree.parse` tells them apart).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any

import torch
from pydantic import Field

from engine.config import Settings
from engine.errors import ConfigError, SourceError, TreeError, validate_choice
from engine.model.files import read_pickle
from engine.safe_text import read_json, short
from engine.tree import MAX_NODES, ChoiceTree, Path, read_literal, tree_buffers
from playground.deploy.files import ReadYaml

_CHILDREN = {"": 10, "0": 10, "1": 7, "2": 3, "3": 2, "00": 10, "01": 3, "02": 2, "10": 2, "000": 2}
_CHILDREN |= dict.fromkeys("4 5 6 7 8 9 03 04 05 06 07 20".split(), 1)
MC_SIM_7B_63 = ChoiceTree.parse(
    [[*map(int, path), rank] for path, count in _CHILDREN.items() for rank in range(count)]
)
"""Medusa's tree of 63 nodes, from the children per node; EAGLE's of that name is another tree.

TensorRT-LLM's default for Medusa and EAGLE-1.
"""
_METHOD_KEYS = ("medusa_choices", "eagle_choices", "recycling_choices", "speculative_token_tree")
TREE_KEYS = (*_METHOD_KEYS, "candidates", "choices", "tree")
"""Keys of trees in YAML and JSON files; the last three are this playground's own."""
_ASSIGNED = re.compile(r"\A(?:\s|#[^\n]*\n)*[A-Za-z_]\w*\s*(?::[^=\n]*)?=\s*(?=[\[(])")


# ---- writing


def _braces(tree: ChoiceTree) -> str:
    return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths)


def _yaml_list(tree: ChoiceTree, kind: str) -> str:
    key = "eagle_choices" if kind == "Eagle" else "medusa_choices"
    return f"{key}:\n" + "".join(f"- {json.dumps(path)}\n" for path in tree.as_lists())


def _buffers(tree: ChoiceTree, kind: str) -> str:
    values = {"choices": tree.as_lists(), **tree_buffers(tree.shape)}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "{" + ",\n ".join(lines) + "}"


def _cartesian(tree: ChoiceTree, kind: str) -> str:
    levels = range(1, tree.depth + 1)
    sizes = [sum(len(path) == depth for path in tree.paths) for depth in levels]
    counts = [size // above for above, size in itertools.pairwise([1, *sizes])]
    if set(_product_paths(counts)) != set(tree.paths):
        raise TreeError(
            "Cartesian shorthand expresses only trees in which all nodes of a depth have the "
            "same number of children, ranks from 0 up; this tree is not one. Choose another format."
        )
    return json.dumps([1, *counts])


def tensorrt_sizes(tree: ChoiceTree) -> dict[str, Any]:
    """Sizes of a static tree for the TensorRT backend, whose draft length counts nodes."""
    shape = tree.shape
    inner = [int(shape.depths[node]) for node, kids in enumerate(shape.children) if kids]
    return {
        "max_draft_len": len(tree),
        "num_eagle_layers": tree.depth,
        "max_non_leaves_per_layer": max(inner.count(depth) for depth in set(inner)),
    }


Write = Callable[[ChoiceTree, str], str]
"""Writes a tree for a decoding type; raises TreeError where the format cannot express it."""
FORMATS: dict[str, tuple[str, Write]] = {
    "lists": (
        "Python lists, all nodes (Medusa, EAGLE, TensorRT-LLM)",
        lambda tree, kind: json.dumps(tree.paths),
    ),
    "tuples": ("Python tuples (vLLM until 0.20)", lambda tree, kind: str(list(tree.paths))),
    "yaml": ("TensorRT-LLM YAML", _yaml_list),
    "triton": ("Triton braces", lambda tree, kind: _braces(tree)),
    "cartesian": ("Cartesian shorthand", _cartesian),
    "sequoia": ("Sequoia growmap (JSON)", lambda tree, kind: json.dumps(write_growmap(tree))),
    "buffers": ("Mask, positions and indices of a step (JSON)", _buffers),
}
"""Title and writer of each text format."""


def format_tree(tree: ChoiceTree, format: str, kind: str = "Medusa") -> str:
    """Write a tree; `parse_tree` reads it back equal.

    Args:
        kind: the decoding type that the text is for.

    Raises:
        ConfigError: there is no such format.
        TreeError: the format cannot express this tree (Cartesian, Sequoia).
    """
    return FORMATS[validate_choice("format", format, FORMATS)][1](tree, kind)


# ---- reading


def parse_tree(text: str, *, read_yaml: ReadYaml = str) -> ChoiceTree:
    """Read a tree.

    Args:
        read_yaml: plain data of a YAML text; by default no YAML is read but JSON.

    Raises:
        TreeError: it is not a tree; names the path at fault.
    """
    bare = _bare(text)
    if not bare:
        raise TreeError("Choice tree text is empty. Paste a tree such as [[0], [0, 0], [1]].")
    if bare[0] in "[({" and '"' not in bare:
        return _read_brackets(bare)
    try:
        is_json = bare.startswith("{")
        values = read_json(bare, what="The text") if is_json else read_yaml(text)
    except ConfigError as error:
        raise TreeError(str(error)) from error
    if isinstance(values, Mapping) and "Successors" in values:
        return read_growmap(values)
    return _in_data(values)


def _read_brackets(text: str) -> ChoiceTree:
    """The tree of lists, tuples, Triton's braces or Cartesian counts.

    Words are read as text, so that the error message shows the path that has one.
    """
    if text.startswith("{") and not re.match(r"\{\s*\{", text):
        text = f"[{text}]"
    text = text.translate({ord("{"): "[", ord("}"): "]"})
    value = read_literal(re.sub(r"\b[^\W\d]\w*", r"'\g<0>'", text))
    if isinstance(value, list | tuple) and value and all(isinstance(n, int) for n in value):
        return _read_cartesian(value)
    return ChoiceTree.parse(value)


def _bare(text: str) -> str:
    """A text without `name =` and surrounding quotes."""
    return _ASSIGNED.sub("", text, count=1).strip().strip("\"'").strip()


def _read_cartesian(counts: Sequence[int]) -> ChoiceTree:
    """The tree of `[1, 7, 6]`: the root, 7 choices below it, 6 below each of them."""
    if counts[0] != 1 or len(counts) == 1 or min(counts) < 1:
        raise TreeError(
            "A plain list of numbers is Cartesian shorthand, 1 for the target's own token and "
            "then counts from 1: [1, 7, 6] is 7 choices with 6 below each; got "
            f"{short(counts)}. One path alone is written [[0, 0]]."
        )
    size = sum(itertools.accumulate(counts[1:], lambda a, b: min(a * b, 10**9)))
    if size > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {size}.")
    return ChoiceTree.parse(_product_paths(counts[1:]), form="candidates")


def _product_paths(widths: Sequence[int]) -> list[Path]:
    """Every path of a tree whose nodes at depth d all have `widths[d]` children."""
    ranges = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return [path for depth in depths for path in itertools.product(*ranges[:depth])]


def _in_data(values: object) -> ChoiceTree:
    """The tree under the only tree key, at any depth."""
    trees = list(_trees(values))
    keys = ", ".join(key for key, _ in trees)
    if not trees:
        raise TreeError(
            "The text is no choice tree: neither lists such as [[0], [0, 0]], nor Triton's {0}, "
            f"{{0, 0}}, nor a growmap or file with one of the keys {', '.join(TREE_KEYS)}."
        )
    if len(trees) > 1:
        raise TreeError(f"The file has {len(trees)} trees ({keys}). Paste one.")
    value = trees[0][1]
    if isinstance(value, str):
        return _read_brackets(_bare(value))
    if not isinstance(value, list):
        raise TreeError(f"{keys} must have a list below it such as - [0, 0], got {value!s:.40}.")
    return ChoiceTree.parse(value)


def _trees(values: object) -> Iterator[tuple[str, object]]:
    """Key and value of each tree in plain data."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from [(key, value)] if key in TREE_KEYS else _trees(value)
    elif isinstance(values, list):
        for value in values:
            yield from _trees(value)


# ---- Sequoia's growmaps


_Numbers = Annotated[list[int], Field(max_length=MAX_NODES + 1)]


class Growmap(Settings, extra="ignore"):
    """The key that defines the tree; all others are derived from it.

    A growmap numbers its nodes level by level, the root first, and lists the successors of each
    node in order of probability; the rank of a node is its index in that list. UMbreLLa stores the
    same keys in JSON, Sequoia in a .pt file.
    Source: arXiv:2402.12374; github Infini-AI-Lab/Sequoia, tree_search.py.

    Example: the tree [0], [1], [0, 0] has successors [[1, 2], [3], [], []].
    """

    Successors: list[_Numbers] = Field(min_length=2, max_length=MAX_NODES + 1)


def write_growmap(tree: ChoiceTree) -> dict[str, Any]:
    """The growmap of a tree, with every key that Sequoia writes.

    Raises:
        TreeError: the tree skips a rank, which a growmap cannot express.
    """
    shape, paths = tree.shape, set(tree.paths)
    for *parent, rank in tree.paths:
        if rank and (*parent, rank - 1) not in paths:
            raise TreeError(
                "A Sequoia growmap has no ranks: children are ranks 0, 1, … in a row, but this "
                f"tree has {[*parent, rank]} without {[*parent, rank - 1]}."
            )
    depths = shape.depths.tolist()
    levels = [[n for n, d in enumerate(depths) if d == level] for level in range(tree.depth + 1)]
    return {
        "roots": levels,
        "branches": [[len(shape.children[node]) for node in level] for level in levels],
        "Successors": [list(children) for children in shape.children],
        "mask": [[int(seen) for seen in row] for row in shape.ancestors.tolist()],
        "depth": depths,
        "size": len(shape),
    }


def read_growmap(values: Mapping[str, Any]) -> ChoiceTree:
    """The tree of a growmap's successors.

    Raises:
        TreeError: naming the invalid node.
    """
    try:
        successors = Growmap.parse(values).Successors
    except ConfigError as error:
        raise TreeError(f"The growmap is malformed: {error}") from error
    size = len(successors)
    paths: list[Path | None] = [(), *[None] * (size - 1)]
    for node, children in enumerate(successors):
        above = paths[node]
        if above is None:
            raise TreeError(f"Growmap node {node} has no parent: nothing names it as successor.")
        for rank, child in enumerate(children):
            if not node < child < size:
                raise TreeError(
                    f"Growmap node {node} names {child} as successor; successors come after their "
                    f"parent and before {size}."
                )
            if paths[child] is not None:
                raise TreeError(f"Growmap node {child} is the successor of two nodes.")
            paths[child] = (*above, rank)
    return ChoiceTree.parse([path for path in paths if path], form="candidates")


def read_growmap_file(file: FilePath) -> ChoiceTree:
    """The tree in Sequoia's .pt file, whose code is never run.

    Raises:
        TreeError: it is not such a file, or too large.
    """
    try:
        values = read_pickle(file, torch.device("meta"))
    except SourceError as error:
        raise TreeError(f"No growmap could be read: {error}") from error
    if not isinstance(values, Mapping):
        raise TreeError(f"{file} must hold a growmap's keys, got {type(values).__name__}.")
    return read_growmap({"Successors": values.get("Successors")})
