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


@dataclass(frozen=True, slots=True)
class _Word:
    """A number, or what stands in its stead."""

    text: str
    place: str


@dataclass(slots=True)
class _Group:
    """What stands between two brackets."""

    bracket: str
    place: str
    items: list[_Word | _Group]
    wants_item: bool = True
    """Whether an item may follow: at the start, and after a comma."""


_PAIRS = {"[": "]", "(": ")", "{": "}"}
_TOKEN = re.compile(r"\s+|#[^\n]*|[\[\](){},]|[^\s\[\](){},#]+")


def place(line: int, column: int) -> str:
    return f"line {line}, column {column}"


def read_brackets(text: str) -> list[_Word | _Group]:
    """The items of a text, in order; those at the top are separated by commas too."""
    if len(text) > MAX_CHARS:
        raise TreeError(f"Choice tree text has {len(text)} characters; {MAX_CHARS} are allowed.")
    stack = [_Group("", "", [])]
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
            stack.append(_Group(token, at, []))
        elif token != ",":
            closes = token in _PAIRS.values()
            item = _close(stack, token, at) if closes else _Word(token, at)
            if not stack[-1].wants_item:
                shown = item.text[:40] if isinstance(item, _Word) else item.bracket
                raise TreeError(f"A comma is missing before {shown} at {item.place}.")
            stack[-1].items.append(item)
            stack[-1].wants_item = False
        elif stack[-1].wants_item:
            raise TreeError(f"Nothing stands before the comma at {at}. Remove the comma.")
        else:
            stack[-1].wants_item = True
    top = stack[-1]
    if top.bracket:
        raise TreeError(f"{top.bracket} at {top.place} is never closed. Add {_PAIRS[top.bracket]}.")
    return top.items


def _close(stack: list[_Group], token: str, at: str) -> _Group:
    if len(stack) == 1:
        raise TreeError(f"{token} at {at} closes nothing. Remove it.")
    top = stack.pop()
    if _PAIRS[top.bracket] != token:
        raise TreeError(
            f"{top.bracket} at {top.place} is closed by {token} at {at}; "
            f"it needs {_PAIRS[top.bracket]}."
        )
    return top


def tree_of(items: Sequence[_Word | _Group], format: str) -> Placed:
    """Paths from the groups of one outer list, or from those at the top (Triton's braces)."""
    only = items[0] if len(items) == 1 else None
    if isinstance(only, _Group):
        is_outer = bool(only.items) and all(isinstance(item, _Group) for item in only.items)
        items = only.items if is_outer or format != "triton" else items
    if not items:
        raise TreeError("Choice tree must have at least one path, got an empty list.")
    if len(items) > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {len(items)}.")
    places: dict[Path, str] = {}
    for number, item in enumerate(items, 1):
        path, where = _path(number, item), f"entry {number}, {item.place}"
        if path in places:
            raise TreeError(
                f"Path {list(path)} ({where}) is there already ({places[path]}). Remove one of "
                "them."
            )
        places[path] = where
    if format == "leaves":
        return ChoiceTree.parse(list(places), form="leaves"), places
    _check_connected(places)
    return ChoiceTree.parse(list(places)), places


def _check_connected(places: Mapping[Path, str]) -> None:
    """Refuse a gap, unless no path leads through another one: then only the ends are listed."""
    inner = {path[:depth] for path in places for depth in range(1, len(path))}
    if inner.isdisjoint(places):
        return
    for path, where in places.items():
        if path[:-1] and path[:-1] not in places:
            raise TreeError(
                f"Path {list(path)} ({where}) is not connected: its parent {list(path[:-1])} is "
                "not in the tree. Add it, or list only the ends of paths."
            )


def _path(number: int, item: _Word | _Group) -> Path:
    if isinstance(item, _Word):
        raise TreeError(
            f"{item.text[:40]} (entry {number}, {item.place}) is no path. A tree is a list of "
            "paths such as [[0], [0, 0]], each in brackets of its own."
        )
    if not item.items:
        raise TreeError(f"The path at {item.place} (entry {number}) is empty. Give it a rank.")
    for part in item.items:
        if isinstance(part, _Group):
            raise TreeError(f"The brackets at {part.place} (entry {number}) nest too deep.")
    return tuple(_integer(part, f"Entry {number}") for part in item.items)


def _integer(word: _Word | _Group, what: str) -> int:
    assert isinstance(word, _Word)
    if not re.fullmatch(r"[+-]?\d{1,9}", word.text):
        raise TreeError(f"{what} has {word.text[:40]!r} at {word.place}; it must be an integer.")
    if int(word.text) < 0:
        raise TreeError(f"{what} has {word.text} at {word.place}; it must be 0 or more.")
    return int(word.text)


def read_cartesian(items: Sequence[_Word | _Group]) -> Placed:
    """`[1, 7, 6]`: one root (the target's own token), 7 choices below it, 6 below each of them."""
    only = items[0] if len(items) == 1 else None
    words = only.items if isinstance(only, _Group) else items
    if not words or any(isinstance(word, _Group) for word in words):
        raise TreeError("Cartesian shorthand must be one list of counts such as [1, 7, 6].")
    counts = [_integer(word, "The shorthand") for word in words]
    if counts[0] != 1:
        raise TreeError(
            "A plain list of numbers is Cartesian shorthand and begins with 1, the target's own "
            f"token, got {counts[0]} at {words[0].place}: [1, 7, 6] is 7 choices with 6 below "
            "each. One path alone is written [[0, 0]]."
        )
    if len(counts) == 1:
        raise TreeError("Cartesian shorthand [1] is the root alone. Add counts, e.g. [1, 7, 6].")
    for word, count in zip(words, counts, strict=True):
        if count < 1:
            raise TreeError(f"The shorthand has 0 at {word.place}; every count is at least 1.")
    total = sum(itertools.accumulate(counts[1:], lambda a, b: min(a * b, 10**9)))
    if total > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {total}.")
    tree = ChoiceTree.parse(product_paths(counts[1:]), form="candidates")
    return tree, {path: words[len(path)].place for path in tree.paths}


def product_paths(widths: Sequence[int]) -> list[Path]:
    """Every path of a tree whose nodes at depth d all have `widths[d]` children."""
    ranges = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return [path for depth in depths for path in itertools.product(*ranges[:depth])]
