"""Choice trees (static, of ranks) and tree shapes (the topology of a draft tree).

Worked example, the tree of TensorRT-LLM's documentation given by its leaves:

    [[0,0,0,0],[0,1,0],[1,0],[1,1]]

    node   0     1    2    3      4      5      6      7        8        9
    path  root  [0]  [1]  [0,0]  [0,1]  [1,0]  [1,1]  [0,0,0]  [0,1,0]  [0,0,0,0]
    parent -1    0    0    1      1      2      2      3        4        7
    depth   0    1    1    2      2      2      2      3        3        4

Nodes are numbered by (depth, then lexicographically), as in Medusa, EAGLE and TensorRT-LLM.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from engine.errors import TreeError
from engine.safe_text import short

Path = tuple[int, ...]
MAX_NODES = 1024
"""Largest choice tree accepted, root excluded."""
MAX_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """A static tree of top-k ranks: which ranks to draft where. It holds no tokens.

    `paths` is prefix-closed and sorted by (length, lexicographic); `paths[i]` is node i + 1 of the
    draft tree and `paths[i][-1]` the rank it takes among its parent's children.
    Source: arXiv:2401.10774, section 2.2.
    """

    paths: tuple[Path, ...]

    @classmethod
    def parse(cls, value: object, *, form: Literal["auto", "candidates"] = "auto") -> ChoiceTree:
        """Read a tree from lists of ranks, or from their text.

        Args:
            value: `[[0], [0, 0], [1]]` as lists, tuples or text of either.
            form: `candidates` lists every node. `auto` takes a list in which no path is a prefix of
                another as the ends of paths, whose prefixes are added; anything else as candidates.

        Raises TreeError: not lists, an empty or repeated path, a negative rank, a gap (a node whose
        parent is missing) or too many nodes.
        """
        paths = _parse_paths(value)
        nodes: set[Path] = set()
        for path in paths:
            if path in nodes:
                raise TreeError(f"Choice tree lists {list(path)} twice. Remove one of them.")
            nodes.add(path)
        _check_size(paths)
        prefixes = {path[:depth] for path in paths for depth in range(1, len(path))}
        if form == "auto" and not prefixes & nodes:
            nodes |= prefixes
        for path in sorted(nodes, key=_sort_key):
            if len(path) > 1 and path[:-1] not in nodes:
                raise TreeError(
                    f"Choice tree has a gap: {list(path)} needs its parent {list(path[:-1])}. "
                    "Add it, or list only the ends of paths."
                )
        return cls.of(nodes)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> ChoiceTree:
        """From all candidates, in any order, unchecked."""
        return cls(tuple(sorted(paths, key=_sort_key)))

    @classmethod
    def chain(cls, length: int) -> ChoiceTree:
        """The first choice at every depth: `[0], [0, 0], …`."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Longest path, in drafted tokens."""
        return max((len(path) for path in self.paths), default=0)

    @property
    def max_rank(self) -> int:
        """Highest rank used anywhere; the drafter must offer max_rank + 1 choices."""
        return max((rank for path in self.paths for rank in path), default=0)

    @property
    def leaves(self) -> tuple[Path, ...]:
        """The ends of paths."""
        inner = {path[:-1] for path in self.paths}
        return tuple(path for path in self.paths if path not in inner)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every node of the draft tree; the root's is 0 by convention."""
        return (0, *(path[-1] for path in self.paths))

    @property
    def shape(self) -> TreeShape:
        """Topology of the draft trees with this choice tree."""
        return _shape_of(self.paths)

    def check_fits(self, *, depth: int, ranks: int, what: str) -> None:
        """Raises TreeError: the tree is deeper than `depth` or uses a rank ≥ `ranks`."""
        for path in self.paths:
            if len(path) > depth:
                raise TreeError(
                    f"Choice tree path {list(path)} has depth {len(path)}, but {what} drafts "
                    f"{depth} tokens deep. Shorten the tree or use a drafter with more heads."
                )
            if max(path) >= ranks:
                raise TreeError(
                    f"Choice tree path {list(path)} uses rank {max(path)}, but {what} offers "
                    f"ranks 0 to {ranks - 1}. Use lower ranks."
                )

    def as_lists(self) -> list[list[int]]:
        """All candidates as plain lists, in node order."""
        return [list(path) for path in self.paths]


def _choice_paths(value: object) -> tuple[Path, ...]:
    try:
        return ChoiceTree.parse(value).paths
    except TreeError as error:
        # Only for a ValueError does the config class add the file of the setting.
        raise ValueError(str(error).removesuffix(".")) from error


ChoicePaths = Annotated[tuple[Path, ...], BeforeValidator(_choice_paths)]
"""A setting that holds a choice tree, in any form that `ChoiceTree.parse` reads."""


def _sort_key(path: Path) -> tuple[int, Path]:
    return len(path), path


def read_literal(text: str) -> object:
    """Lists, tuples and numbers in Python's syntax.

    Raises TreeError: malformed, or too long to be parsed.
    """
    if len(text) > MAX_CHARS:
        raise TreeError(f"Choice tree text has {len(text)} characters; {MAX_CHARS} are allowed.")
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        gap = re.search(r"[\])]\s*([\[(].*?[\])])", text)
        fault = f"a comma is missing before {gap[1]:.40}" if gap else "check the brackets"
        raise TreeError(
            f"Choice tree text must be a list of paths such as [[0], [0, 0], [1]]; {fault}."
        ) from error


def _check_size(paths: Iterable[Path]) -> None:
    """Raises TreeError: too many nodes, prefixes of paths included; stops at the limit."""
    node_of: dict[tuple[int, int], int] = {}
    for path in paths:
        at = 0
        for rank in path:
            at = node_of.setdefault((at, rank), len(node_of) + 1)
            if len(node_of) > MAX_NODES:
                raise TreeError(
                    f"Choice tree must have at most {MAX_NODES} nodes, got {len(node_of)} or more."
                )


_RANK = Annotated[int, Field(strict=True, ge=0, lt=10**9)]
_PATHS = TypeAdapter(list[Annotated[tuple[_RANK, ...], Field(min_length=1)]])


def _parse_paths(value: object) -> list[Path]:
    """Paths of ranks, from any form that a user may write."""
    if isinstance(value, ChoiceTree):
        return list(value.paths)
    if isinstance(value, str):
        value = read_literal(value)
    if isinstance(value, list | tuple) and not value:
        raise TreeError("Choice tree must have at least one path, got an empty list.")
    try:
        return _PATHS.validate_python(value)
    except ValidationError as error:
        at = error.errors()[0]["loc"]
        if at and isinstance(value, list | tuple):
            value = value[int(at[0])]
        raise TreeError(
            f"Choice tree must list paths of ranks from 0, as [[0], [0, 0]], got {short(value)}."
        ) from error


class TreeShape:
    """Topology of a draft tree with n nodes: node 0 is the root, parents come before children.

    Attributes:
        parents: `parents[0] == -1`, `parents[i] < i`.
        depths: `(n,)` int64; the root has depth 0.
        ancestors: `(n, n)` bool; row i is True at i and at every ancestor of i.
        children: of every node, in order.
        max_depth: of the deepest node.
    """

    def __init__(self, parents: Iterable[int]) -> None:
        self.parents = tuple(parents)
        depths: list[int] = []
        for node, parent in enumerate(self.parents or (0,)):  # an empty list is no tree either
            if not 0 <= parent < node and (node, parent) != (0, -1):
                raise TreeError(
                    f"Draft tree parents must be [-1, earlier nodes …], got {self.parents!r}."
                )
            depths.append(depths[parent] + 1 if node else 0)
        self.max_depth = max(depths)
        # The controller makes many shapes that no forward uses: the rest is computed on demand.
        self._depths = depths
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        return torch.tensor(self._depths)

    @functools.cached_property
    def ancestors(self) -> torch.Tensor:
        ancestors = np.eye(len(self), dtype=bool)
        for node in range(1, len(self)):
            ancestors[node] |= ancestors[self.parents[node]]
        return torch.from_numpy(ancestors)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self)):
            children[self.parents[node]].append(node)
        return tuple(map(tuple, children))

    @classmethod
    @functools.lru_cache(maxsize=256)
    def chain(cls, length: int) -> TreeShape:
        """Root and `length` drafted tokens in a row."""
        return cls(range(-1, length))

    def __len__(self) -> int:
        return len(self.parents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeShape) and self.parents == other.parents

    def __hash__(self) -> int:
        return hash(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`(depths, ancestors)` on a device, copied there once."""
        if device.type == "cpu":
            return self.depths, self.ancestors
        if device not in self._on_device:
            self._on_device[device] = (upload(self.depths, device), upload(self.ancestors, device))
        return self._on_device[device]

    def path_to(self, node: int) -> Path:
        """Nodes from the root's child down to `node`; empty for the root."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def keep(self, nodes: Sequence[int]) -> TreeShape:
        """The tree of these nodes only: ascending, root and every parent among them."""
        if nodes == range(len(nodes)):
            return self if len(nodes) == len(self) else self._prefix(len(nodes))
        renumbered = {old: new for new, old in enumerate(nodes)}
        return TreeShape([-1, *(renumbered[self.parents[i]] for i in nodes[1:])])

    @functools.lru_cache(maxsize=512)  # noqa: B019 - few shapes, cut again and again
    def _prefix(self, count: int) -> TreeShape:
        return TreeShape(self.parents[:count])


def tree_buffers(shape: TreeShape) -> dict[str, list[int] | list[list[int]]]:
    """The tables of a tree by their names in TensorRT-LLM, Medusa and EAGLE, and SGLang.

    Bit j of a row's packed mask: the row attends to row j. Bit 0 of the first int32 is the root.
    Paths to the leaves are ordered from the last leaf to the first, padded with -1, which also
    stands for a missing child or sibling.

    Worked example, parents `[-1, 0, 0, 1]`:

        spec_decoding_packed_mask       [[1], [3], [5], [11]]
        spec_decoding_position_offsets  [0, 1, 1, 2]
        retrieve_indices                [[0, 1, 3], [0, 2, -1]]
        retrieve_next_token             [1, 3, -1, -1]
        retrieve_next_sibling           [-1, 2, -1, -1]

    Source: tensorrt_llm/runtime/medusa_utils.py; medusa/model/utils.py; sglang/srt/speculative.
    """
    bits = np.zeros((len(shape), -(-len(shape) // 32) * 32), dtype=bool)
    bits[:, : len(shape)] = shape.ancestors.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    leaves = [node for node, below in enumerate(shape.children) if not below]
    paths = [[0, *shape.path_to(leaf)] for leaf in reversed(leaves)]
    next_sibling = [-1] * len(shape)
    for siblings in shape.children:
        for node, after in zip(siblings, siblings[1:], strict=False):
            next_sibling[node] = after
    return {
        "spec_decoding_packed_mask": words.tolist(),
        "spec_decoding_position_offsets": shape.depths.tolist(),
        "retrieve_indices": [path + [-1] * (shape.max_depth + 1 - len(path)) for path in paths],
        "retrieve_next_token": [below[0] if below else -1 for below in shape.children],
        "retrieve_next_sibling": next_sibling,
    }


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to the device without waiting for the work queued there.

    Args:
        values: must not be changed afterwards.
    """
    if device.type in ("cpu", "mps"):  # on MPS, torch cannot pin memory
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=512)
def _shape_of(paths: tuple[Path, ...]) -> TreeShape:
    return merge_prefixes(paths)[1]  # sorted paths: path i adds node i + 1


def merge_prefixes(beams: Sequence[Sequence[int]]) -> tuple[list[int], TreeShape, list[list[int]]]:
    """Merge token sequences that share prefixes into one tree under a common root.

    Beams are added in order, with a node only where the prefix is new, so that siblings always have
    different tokens, as tree verification requires.

    Returns:
        tokens of nodes 1 … n-1, the shape (root included), and per beam the node of each token.

    Example: beams `[5, 6], [5, 7], [8]` → tokens `[5, 6, 7, 8]`, parents `[-1, 0, 1, 1, 0]`,
    nodes `[[1, 2], [1, 3], [4]]`.
    """
    tokens: list[int] = []
    parents = [-1]
    node_of: dict[tuple[int, int], int] = {}
    nodes: list[list[int]] = []
    for beam in beams:
        node = 0
        nodes.append([])
        for token in beam:
            if (node, token) not in node_of:
                node_of[node, token] = len(parents)
                parents.append(node)
                tokens.append(token)
            node = node_of[node, token]
            nodes[-1].append(node)
    return tokens, TreeShape(parents), nodes
