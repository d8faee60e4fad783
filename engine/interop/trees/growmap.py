"""Sequoia's growmaps: a tree as lists of successors, without ranks.

A growmap numbers its nodes level by level, the root first, and lists the successors of each node
in order of probability; the rank of a node is its index in that list. UMbreLLa stores the same keys
in JSON, Sequoia in a .pt file.
Source: arXiv:2402.12374; github Infini-AI-Lab/Sequoia, tree_search.py.

Example: the tree [0], [1], [0, 0] has successors [[1, 2], [3], [], []].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any

import torch
from pydantic import Field

from engine.config import Settings
from engine.errors import ConfigError, SourceError, TreeError
from engine.model.files import read_pickle
from engine.tree import MAX_NODES, ChoiceTree, Path

Numbers = Annotated[list[int], Field(max_length=MAX_NODES + 1)]


class Growmap(Settings, extra="ignore"):
    """The key that defines the tree; all others are derived from it."""

    Successors: list[Numbers] = Field(min_length=2, max_length=MAX_NODES + 1)


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
