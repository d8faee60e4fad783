"""Nested brackets as choice trees: Python's lists and tuples, Triton's braces, Cartesian counts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import TreeError
from engine.tree import MAX_NODES, ChoiceTree, Path

MAX_CHARS = 200_000
Placed = tuple[ChoiceTree, Mapping[Path, str]]
"""A tree, and where each of its listed paths stands."""
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_TOKEN = re.compile(r"\s+|#[^\n]*|[\[\](){},]|[^\s\[\](){},#]+")


@dataclass(slots=True)
class Item:
    """A number or what stands in its stead; or a bracket, and the items behind it.

    Attributes:
        wants_item: whether a bracket may be followed by an item: at the start, and after a comma.
    """

    text: str
    place: str
    items: list[Item] | None = None
    wants_item: bool = True


def place(line: int, column: int) -> str:
    return f"line {line}, column {column}"


def read_brackets(text: str) -> list[Item]:
    """The items of a text, in order; those at the top are separated by commas too."""
    if len(text) > MAX_CHARS:
        raise TreeError(f"Choice tree text has {len(text)} characters; {MAX_CHARS} are allowed.")
    items: list[Item] = []
    stack = [Item("", "", items)]
    line, start = 1, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token[0].isspace() or token[0] == "#":
            if "\n" in token:
                line += token.count("\n")
                start = match.start() + token.rindex("\n") + 1
            continue
        at = place(line, match.start() - start + 1)
        if token in _PAIRS:
            stack.append(Item(token, at, []))
        elif token != ",":
            item = _closed(stack, token, at) if token in _PAIRS.values() else Item(token, at)
            top = stack[-1]
            if not top.wants_item:
                raise TreeError(f"A comma is missing before {item.text[:40]} at {item.place}.")
            assert top.items is not None
            top.items.append(item)
            top.wants_item = False
        elif stack[-1].wants_item:
            raise TreeError(f"Nothing stands before the comma at {at}. Remove the comma.")
        else:
            stack[-1].wants_item = True
    top = stack[-1]
    if top.text:
        raise TreeError(f"{top.text} at {top.place} is never closed. Add {_PAIRS[top.text]}.")
    return items


def _closed(stack: list[Item], token: str, at: str) -> Item:
    if len(stack) == 1:
        raise TreeError(f"{token} at {at} closes nothing. Remove it.")
    top = stack.pop()
    if _PAIRS[top.text] != token:
        raise TreeError(
            f"{top.text} at {top.place} is closed by {token} at {at}; it needs {_PAIRS[top.text]}."
        )
    return top


def tree_of(items: Sequence[Item], format: str) -> Placed:
    """Paths from the groups of one outer list, or from those at the top (Triton's braces)."""
    inner = items[0].items if len(items) == 1 else None
    if inner is not None:
        is_outer = bool(inner) and all(item.items is not None for item in inner)
        items = inner if is_outer or format != "triton" else items
    if not items:
        raise TreeError("Choice tree must have at least one path, got an empty list.")
    _check_size(len(items))
    places: dict[Path, str] = {}
    for number, item in enumerate(items, 1):
        path, where = _path(number, item), f"entry {number}, {item.place}"
        if path in places:
            raise TreeError(
                f"Path {list(path)} ({where}) is already listed ({places[path]}). Remove one of "
                "them."
            )
        places[path] = where
    if format == "leaves":
        return ChoiceTree.parse(list(places), form="leaves"), places
    _check_connected(places)
    return ChoiceTree.parse(list(places)), places


def _check_size(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {num_nodes}.")


def _check_connected(places: Mapping[Path, str]) -> None:
    """Refuse a gap, unless no path leads through another one: then only the ends are listed."""
    inner: set[Path] = set()
    for path in places:
        inner.update(path[:depth] for depth in range(1, len(path)))
        _check_size(len(inner))
    for path, where in () if inner.isdisjoint(places) else places.items():
        if path[:-1] and path[:-1] not in places:
            raise TreeError(
                f"Path {list(path)} ({where}) is not connected: its parent {list(path[:-1])} is "
                "not in the tree. Add it, or list only the ends of paths."
            )


def _path(number: int, item: Item) -> Path:
    if item.items is None:
        raise TreeError(
            f"{item.text[:40]} (entry {number}, {item.place}) is not a path. A tree is a list of "
            "paths such as [[0], [0, 0]], each in its own brackets."
        )
    if not item.items:
        raise TreeError(f"The path at {item.place} (entry {number}) is empty. Give it a rank.")
    _check_size(len(item.items))
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


def read_cartesian(items: Sequence[Item]) -> Placed:
    """`[1, 7, 6]`: one root (the target's own token), 7 choices below it, 6 below each of them."""
    inner = items[0].items if len(items) == 1 else None
    numbers = items if inner is None else inner
    if not numbers or any(item.items is not None for item in numbers):
        raise TreeError("Cartesian shorthand must be one list of counts such as [1, 7, 6].")
    counts = [_integer(item, "The shorthand") for item in numbers]
    if counts[0] != 1:
        raise TreeError(
            "A plain list of numbers is Cartesian shorthand and begins with 1, the target's own "
            f"token, got {counts[0]} at {numbers[0].place}: [1, 7, 6] is 7 choices with 6 below "
            "each. One path alone is written [[0, 0]]."
        )
    if len(counts) == 1:
        raise TreeError("Cartesian shorthand [1] is the root alone. Add counts, e.g. [1, 7, 6].")
    for item, count in zip(numbers, counts, strict=True):
        if count < 1:
            raise TreeError(f"The shorthand has 0 at {item.place}; every count is at least 1.")
    _check_size(sum(itertools.accumulate(counts[1:], lambda a, b: min(a * b, 10**9))))
    tree = ChoiceTree.parse(product_paths(counts[1:]), form="candidates")
    return tree, {path: numbers[len(path)].place for path in tree.paths}


def product_paths(widths: Sequence[int]) -> list[Path]:
    """Every path of a tree whose nodes at depth d all have `widths[d]` children."""
    ranges = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return [path for depth in depths for path in itertools.product(*ranges[:depth])]
