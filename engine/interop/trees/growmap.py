"""Sequoia's growmaps: a tree as lists of successors, without ranks.

A growmap numbers its nodes level by level, the root first, and lists the successors of each node
from the most probable on; the rank of a node is its place in that list. UMbreLLa keeps the same
keys in JSON, Sequoia in a .pt file.
Source: arXiv:2402.12374; github Infini-AI-Lab/Sequoia, tree_search.py.

Example: the tree [0], [1], [0, 0] has successors [[1, 2], [3], [], []].
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path as FilePath
from typing import Annotated, Any
from zipfile import BadZipFile, ZipFile

from pydantic import ConfigDict, Field

from engine.config import Settings
from engine.errors import ConfigError, TreeError
from engine.tree import MAX_NODES, ChoiceTree, Path

MAX_PICKLE_BYTES = 1_000_000
FAULTS: tuple[type[Exception], ...] = (
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(EOFError, OverflowError, MemoryError, BadZipFile, zlib.error, struct.error),
)
"""What a damaged archive or pickle raises, in `zipfile` and in `pickle`."""
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
        with ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                pickled = stream.read(MAX_PICKLE_BYTES + 1)
        if len(pickled) > MAX_PICKLE_BYTES:
            raise TreeError(f"{file} has more than {MAX_PICKLE_BYTES} bytes; it is not a growmap.")
        values = _Lists(BytesIO(pickled)).load()
    except pickle.UnpicklingError as error:
        raise TreeError(f"{file} has more than tensors and lists; it is not read.") from error
    except FAULTS as error:
        raise TreeError(f"{file} could not be read as a growmap: {error!s:.200}.") from error
    if not isinstance(values, Mapping):
        raise TreeError(f"{file} must hold a growmap's keys, got {type(values).__name__}.")
    return read_growmap({str(key): value for key, value in values.items() if value is not None})


class _Lists(pickle._Unpickler):
    """Lists and numbers of a pickle, None for its tensors; nothing that it names is called.

    It is the one in Python, as torch's is: the one in C allocates what a pickle claims to need.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module != "collections" and module.partition(".")[0] != "torch":
            raise pickle.UnpicklingError(f"{module}.{name}")
        return dict if name == "OrderedDict" else _tensor

    def persistent_load(self, pid: Any) -> None:
        """A tensor's numbers, which lie in another file of the archive."""


def _tensor(*parts: Any) -> None:
    """In place of a tensor: mask and depth follow from the lists."""
