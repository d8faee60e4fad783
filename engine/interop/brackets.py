"""Nested bracketed lists of numbers read with the place of every part, so that faults can be shown.

Reads Python lists and tuples and Triton's braces alike: `[[0], (0, 1), {2}]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import TreeError

MAX_CHARS = 200_000
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_TOKEN = re.compile(r"\s+|#[^\n]*|[\[\](){},]|[^\s\[\](){},#]+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the text something stands, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass(frozen=True, slots=True)
class Word:
    """A number, or what stands in its stead."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Group:
    """What stands between two brackets."""

    bracket: str
    items: tuple[Item, ...]
    place: Place


Item = Word | Group


@dataclass(slots=True)
class _Open:
    bracket: str
    place: Place
    items: list[Item]
    wants_item: bool = True
    """Whether the next token may be an item: at the start, and after a comma."""

    def add(self, item: Item, shown: str) -> None:
        if not self.wants_item:
            raise TreeError(f"A comma is missing before {shown} at {item.place}.")
        self.items.append(item)
        self.wants_item = False

    def comma(self, place: Place) -> None:
        if self.wants_item:
            raise TreeError(f"Nothing stands before the comma at {place}. Remove the comma.")
        self.wants_item = True


def read_brackets(text: str) -> tuple[Item, ...]:
    """The items of a text, in order; those at the top are separated by commas too.

    Raises:
        TreeError: brackets do not match, commas are missing or too many; names the place.
    """
    if len(text) > MAX_CHARS:
        raise TreeError(f"Choice tree text has {len(text)} characters; {MAX_CHARS} are allowed.")
    stack = [_Open("", Place(1, 1), [])]
    for token, place in _tokens(text):
        if token in _PAIRS:
            stack.append(_Open(token, place, []))
        elif token in _PAIRS.values():
            closed = _close(stack, token, place)
            stack[-1].add(closed, closed.bracket)
        elif token == ",":
            stack[-1].comma(place)
        else:
            stack[-1].add(Word(token, place), token[:40])
    if len(stack) > 1:
        left = stack[-1]
        raise TreeError(
            f"{left.bracket} at {left.place} is never closed. Add {_PAIRS[left.bracket]}."
        )
    return tuple(stack[0].items)


def _close(stack: list[_Open], token: str, place: Place) -> Group:
    if len(stack) == 1:
        raise TreeError(f"{token} at {place} closes nothing. Remove it.")
    top = stack.pop()
    if _PAIRS[top.bracket] != token:
        raise TreeError(
            f"{top.bracket} at {top.place} is closed by {token} at {place}; "
            f"it needs {_PAIRS[top.bracket]}."
        )
    return Group(top.bracket, tuple(top.items), top.place)


def _tokens(text: str) -> list[tuple[str, Place]]:
    """Every bracket, comma and word with its place; blanks and # comments are left out."""
    found: list[tuple[str, Place]] = []
    line, start = 1, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if not token[0].isspace() and token[0] != "#":
            found.append((token, Place(line, match.start() - start + 1)))
        if "\n" in token:
            line += token.count("\n")
            start = match.start() + token.rindex("\n") + 1
    return found
