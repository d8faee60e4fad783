"""Choice trees written in each text format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from engine.errors import TreeError
from engine.interop.growmap import growmap_of
from engine.tree import ChoiceTree, Path


def lists(paths: Sequence[Path]) -> str:
    """`[[0], [0, 0]]`."""
    return json.dumps([list(path) for path in paths])


def tuples(tree: ChoiceTree) -> str:
    """`[(0,), (0, 0)]`, as vLLM wanted it until 0.20."""
    return str(list(tree.paths))


def braces(tree: ChoiceTree) -> str:
    """`{0}, {0, 0}`, as Triton's parameters want it."""
    return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths)


def pbtxt_parameter(key: str, value: str) -> str:
    """One parameter of Triton's config.pbtxt."""
    return f'parameters: {{ key: "{key}"  value: {{ string_value: "{value}" }} }}'


def yaml_list(tree: ChoiceTree, key: str = "medusa_choices") -> str:
    """A YAML key with one line per path."""
    lines = (f"- {json.dumps(list(path))}" for path in tree.paths)
    return f"{key}:\n" + "\n".join(lines) + "\n"


def preset(tree: ChoiceTree) -> str:
    """A preset of this playground."""
    lines = "\n".join(f"  - {json.dumps(list(path))}" for path in tree.paths)
    return (
        f"name: tree-{len(tree)}\ntitle: {len(tree)} nodes, depth {tree.depth}\n"
        f"methods:\n- Medusa\n- Eagle\ncandidates:\n{lines}\n"
    )


def growmap(tree: ChoiceTree) -> str:
    """Sequoia's growmap as JSON.

    Raises:
        TreeError: the tree skips a rank.
    """
    return json.dumps(growmap_of(tree))


def shorthand(tree: ChoiceTree) -> str:
    """`[1, 7, 6]`: one root, 7 choices below it, 6 below each of these.

    Raises:
        TreeError: the tree is not of that kind.
    """
    counts = counts_of(tree)
    if counts is None:
        raise TreeError(
            "Cartesian shorthand says trees in which every node of a depth has the same number of "
            "children, ranks from 0 up; this tree is not one. Choose another format."
        )
    return json.dumps([1, *counts])


def counts_of(tree: ChoiceTree) -> list[int] | None:
    """Children per node at each depth, if all nodes of a depth have equally many, ranks 0 and up.

    `[7, 6]` for seven choices with six below each; None for any other tree.
    """
    sizes = [sum(len(path) == depth for path in tree.paths) for depth in range(1, tree.depth + 1)]
    widths = [size // above for above, size in itertools.pairwise([1, *sizes])]
    return widths if set(product_paths(widths)) == set(tree.paths) else None


def product_paths(widths: Sequence[int]) -> list[Path]:
    """Every path of a tree whose nodes at depth d all have `widths[d]` children."""
    ranges = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return [path for depth in depths for path in itertools.product(*ranges[:depth])]
