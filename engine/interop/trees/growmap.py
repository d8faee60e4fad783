"""Sequoia's growmaps: a tree as lists of successors, without ranks.

A growmap numbers its nodes level by level, the root first, and lists the successors of each node
from the most probable on; the rank of a node is its place in that list. UMbreLLa keeps the same
keys in JSON, Sequoia in a .pt file.
Source: arXiv:2402.12374; github Infini-AI-Lab/Sequoia, tree_search.py.

Example: the tree [0], [1], [0, 0] has successors [[1, 2], [3], [], []].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field

from engine.config import Settings
from engine.errors import ConfigError, SourceError, TreeError
from engine.model.files import read_pickle
from engine.tree import MAX_NODES, ChoiceTree, Path

Numbers = Annotated[list[int], Field(max_length=MAX_NODES + 1)]


class Growmap(Settings):
    """The keys that make the tree; roots, branches and mask follow from them."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    Successors: Annotated[list[Numbers], Field(max_length=MAX_NODES + 1)]
    depth: Numbers | None = None
    size: int | None = Field(None, ge=2, le=MAX_NODES + 1)


def write_growmap(tree: ChoiceTree) -> dict[str, Any]:
    """The growmap of a tree, every key that Sequoia writes.

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
    """The tree that a growmap's successors make; size and depth are checked where they are there.

    Raises:
        TreeError: naming the node that is wrong.
    """
    try:
        growmap = Growmap.parse(values)
    except ConfigError as error:
        raise TreeError(f"The growmap is malformed: {error}") from error
    successors = growmap.Successors
    size = len(successors)
    if not 2 <= size <= MAX_NODES + 1:
        raise TreeError(
            f"A growmap must have 2 to {MAX_NODES + 1} nodes, the root among them, got {size}."
        )
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
    nodes = [path for path in paths if path]
    if growmap.size not in (None, size):
        raise TreeError(
            f"The growmap has size {growmap.size}, but its successors make {size} nodes."
        )
    if growmap.depth not in (None, [0, *map(len, nodes)]):
        raise TreeError("The growmap's depth does not agree with its successors.")
    return ChoiceTree.parse(nodes, form="candidates")


def read_growmap_file(file: FilePath) -> ChoiceTree:
    """The tree of Sequoia's .pt file, read without executing anything in the file.

    Raises:
        TreeError: not such a file, or too large.
    """
    try:
        values = read_pickle(file, torch.device("meta"))
    except SourceError as error:
        raise TreeError(f"No growmap could be read: {error}") from error
    if not isinstance(values, Mapping):
        raise TreeError(f"{file} must hold a growmap's keys, got {type(values).__name__}.")
    lists = {str(key): value for key, value in values.items() if not torch.is_tensor(value)}
    return read_growmap({key: value for key, value in lists.items() if value is not None})
