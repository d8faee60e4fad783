"""Choice trees in nested brackets: Python's lists and tuples, Triton's braces, Cartesian counts."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import TreeError
from engine.tree import MAX_NODES, ChoiceTree, GapError, Path, check_length


@dataclass(frozen=True, slots=True)
class Item:
    """A number, or other text; or a bracket with its items."""

    text: str
    place: str
    items: list[Item] | None = None


def read_brackets(text: str) -> list[Item]:
    """The top-level items of a text, without `name =` and surrounding quotes.

    Lists, tuples and Triton's braces are Python syntax, so Python parses them.
    """
    check_length(text)
    try:
        statements = ast.parse(text.strip()).body
        nodes = [getattr(statement, "value", None) or statement for statement in statements]
        match nodes:
            case [ast.Constant(value=str(quoted))]:
                return read_brackets(quoted)
        return [_item(node) for node in nodes]
    except SyntaxError as error:
        at = _place(error.lineno or 1, error.offset or 1)
        raise TreeError(f"The tree is malformed at {at}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TreeError("The tree is malformed: it is not a list of paths.") from error


def _place(line: int, column: int) -> str:
    return f"line {line}, column {column}"


def _item(node: ast.AST) -> Item:
    at = _place(getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return Item("", at, [_item(part) for part in parts])
        case ast.Dict(keys=[]):  # empty braces
            return Item("", at, [])
        case ast.Constant(value=value):
            return Item(repr(value), at)
        case ast.Subscript(slice=part) | ast.Call(args=[part, *_]):  # [0] [1] and [0] (1)
            raise TreeError(f"A comma is missing before {_place(part.lineno, part.col_offset)}.")
    return Item(ast.unparse(node), at)


def data_items(values: Sequence[object]) -> list[Item]:
    """The items of parsed YAML or JSON."""
    return [
        Item(str(value), f"item {n}", data_items(value) if isinstance(value, list) else None)
        for n, value in enumerate(values, 1)
    ]


def tree_of(items: Sequence[Item], format: str) -> ChoiceTree:
    """A tree from the paths in one outer list, or in top-level groups (Triton's braces)."""
    inner = items[0].items if len(items) == 1 else None
    if inner is not None:
        is_outer = bool(inner) and all(item.items is not None for item in inner)
        items = inner if is_outer or format != "triton" else items
    places: dict[Path, str] = {}
    for number, item in enumerate(items, 1):
        path, where = _path(number, item), f"entry {number}, {item.place}"
        if path in places:
            raise TreeError(
                f"Path {list(path)} ({where}) is already listed ({places[path]}). Remove one of "
                "them."
            )
        places[path] = where
    try:
        return ChoiceTree.parse(list(places))
    except GapError as error:
        where = places[error.path]
        raise TreeError(
            f"Path {list(error.path)} ({where}) is not connected: its parent "
            f"{list(error.path[:-1])} is not in the tree. Add it, or list only the ends of paths."
        ) from error


def _path(number: int, item: Item) -> Path:
    if item.items is None:
        raise TreeError(
            f"{item.text[:40]} (entry {number}, {item.place}) is not a path. A tree is a list of "
            "paths such as [[0], [0, 0]], each in its own brackets."
        )
    if not item.items:
        raise TreeError(f"The path at {item.place} (entry {number}) is empty. Give it a rank.")
    for part in item.items:
        if part.items is not None:
            raise TreeError(f"The brackets at {part.place} (entry {number}) nest too deep.")
    return tuple(_integer(part, f"Entry {number}") for part in item.items)


def _integer(item: Item, what: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,9}", item.text):
        raise TreeError(f"{what} has {item.text[:40]!r} at {item.place}; it must be an integer.")
    if int(item.text) < 0:
        raise TreeError(f"{what} has {item.text} at {item.place}; it must be 0 or more.")
    return int(item.text)


def read_cartesian(items: Sequence[Item]) -> ChoiceTree:
    """A tree from one list of counts, or a single count.

    `[1, 7, 6]` is the root, 7 choices below it, 6 below each of them.
    """
    numbers = items[0].items or items
    counts = [_integer(item, "The shorthand") for item in numbers]
    if counts[0] != 1:
        raise TreeError(
            "A plain list of numbers is Cartesian shorthand and begins with 1, the target's own "
            f"token, got {counts[0]} at {numbers[0].place}: [1, 7, 6] is 7 choices with 6 below "
            "each. One path alone is written [[0, 0]]."
        )
    if len(counts) == 1:
        raise TreeError("Cartesian shorthand [1] is the root alone. Add counts, e.g. [1, 7, 6].")
    if 0 in counts:
        place = numbers[counts.index(0)].place
        raise TreeError(f"The shorthand has 0 at {place}; every count is at least 1.")
    size = sum(itertools.accumulate(counts[1:], lambda a, b: min(a * b, 10**9)))
    if size > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {size}.")
    return ChoiceTree.parse(product_paths(counts[1:]), form="candidates")


def product_paths(widths: Sequence[int]) -> list[Path]:
    """Every path of a tree whose nodes at depth d all have `widths[d]` children."""
    ranges = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return [path for depth in depths for path in itertools.product(*ranges[:depth])]
