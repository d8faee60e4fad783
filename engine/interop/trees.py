"""Choice trees as text: every format that other tools write, in and out, with detection.

`parse_tree` finds out by itself which format it was given, and names the place of a fault:

    [[0], [0, 0], [1]]                        Medusa, EAGLE, TensorRT-LLM; also `name = [...]`
    [(0,), (0, 0), (1,)]                      vLLM until 0.20
    {0}, {0, 0}, {1}                          Triton; also a whole config.pbtxt
    [1, 7, 6]                                 Cartesian: 1 root, 7 choices below it, 6 below each
    {"Successors": [[1, 2], [3], [], []]}     Sequoia's growmap as JSON
    medusa_choices: [[0], [0, 0], [1]]        YAML, in flow or block style

Lists hold every candidate, or only the ends of paths (`ChoiceTree.parse` says which is which).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import ConfigError, TreeError
from engine.interop import tree_writers as write
from engine.interop.brackets import Group, Item, Word, read_brackets
from engine.interop.growmap import tree_of_growmap
from engine.interop.tree_files import (
    OWN_KEYS,
    is_pbtxt,
    read_json,
    tree_in_json,
    tree_in_pbtxt,
    tree_in_yaml,
    yaml_key,
)
from engine.tree import MAX_NODES, ChoiceTree, Path

FormatName = Literal[
    "lists", "leaves", "tuples", "yaml", "triton", "pbtxt", "cartesian", "sequoia", "preset"
]
_ASSIGNED = re.compile(r"\A(?:\s|#[^\n]*\n)*[A-Za-z_]\w*\s*(?::[^=\n]*)?=\s*(?=[\[(])")
_FLAT_LIST = re.compile(r"[\[(][\s\d,]*[\])]\Z")


@dataclass(frozen=True, slots=True)
class TreeFormat:
    """A way to write a choice tree.

    Attributes:
        whole: whether every tree can be written so; Cartesian and Sequoia cannot say some.
    """

    name: FormatName
    title: str
    example: str
    whole: bool = True


FORMATS: tuple[TreeFormat, ...] = (
    TreeFormat("lists", "Python lists, all nodes (Medusa, EAGLE, TensorRT-LLM)", "[[0], [0, 0]]"),
    TreeFormat("leaves", "Python lists, ends of paths only", "[[0, 0], [1]]"),
    TreeFormat("tuples", "Python tuples (vLLM until 0.20)", "[(0,), (0, 0)]"),
    TreeFormat("yaml", "TensorRT-LLM YAML", "medusa_choices:\n- [0]\n- [0, 0]"),
    TreeFormat("triton", "Triton braces", "{0}, {0, 0}"),
    TreeFormat("pbtxt", "Triton config.pbtxt parameter", 'string_value: "{0}, {0, 0}"'),
    TreeFormat("cartesian", "Cartesian shorthand", "[1, 7, 6]", whole=False),
    TreeFormat("sequoia", "Sequoia growmap (JSON)", '{"Successors": [[1], []]}', whole=False),
    TreeFormat("preset", "Preset of this playground (YAML)", "candidates:\n  - [0]"),
)

_WRITERS: dict[FormatName, Callable[[ChoiceTree], str]] = {
    "lists": lambda tree: write.lists(tree.paths),
    "leaves": lambda tree: write.lists(tree.leaves),
    "tuples": write.tuples,
    "yaml": write.yaml_list,
    "triton": write.braces,
    "pbtxt": lambda tree: write.pbtxt_parameter("medusa_choices", write.braces(tree)),
    "cartesian": write.shorthand,
    "sequoia": write.growmap,
    "preset": write.preset,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One path as listed, and where."""

    path: Path
    where: str


def parse_tree(
    text: str,
    *,
    format: FormatName | Literal["auto"] = "auto",
    max_depth: int | None = None,
    num_ranks: int | None = None,
    what: str = "the drafter",
) -> ChoiceTree:
    """Read a tree.

    Args:
        format: the format; `auto` finds out.
        max_depth, num_ranks: what the drafter offers, e.g. its number of heads; None = any.
        what: the drafter's name in the message when the tree does not fit it.

    Raises:
        ConfigError: there is no such format.
        TreeError: not a tree; names the path, and where it stands.
    """
    if format != "auto":
        _check_known(format)
    tree, entries = _read(text, detect_format(text) if format == "auto" else format)
    for entry in entries:
        if max_depth is not None and len(entry.path) > max_depth:
            raise TreeError(
                f"Path {list(entry.path)} ({entry.where}) has depth {len(entry.path)}, but {what} "
                f"drafts {max_depth} tokens deep. Shorten it, or use a drafter with more heads."
            )
        if num_ranks is not None and max(entry.path) >= num_ranks:
            raise TreeError(
                f"Path {list(entry.path)} ({entry.where}) uses rank {max(entry.path)}, but {what} "
                f"offers ranks 0 to {num_ranks - 1}. Use lower ranks."
            )
    return tree


def format_tree(tree: ChoiceTree, format: FormatName) -> str:
    """Write a tree; `parse_tree` reads it back equal.

    Raises:
        ConfigError: there is no such format.
        TreeError: the format cannot say this tree (Cartesian, Sequoia), or the tree is empty.
    """
    _check_known(format)
    if not tree.paths:
        raise TreeError("Choice tree must have at least one path, got an empty list.")
    return _WRITERS[format](tree)


def detect_format(text: str) -> FormatName:
    """Which format a text is in, from its outermost signs.

    Raises:
        TreeError: it is none of them.
    """
    named = _ASSIGNED.match(text) is not None
    start = _ASSIGNED.sub("", text, count=1).strip().strip("\"'").strip()
    if not start:
        raise TreeError("Choice tree text is empty. Paste a tree such as [[0], [0, 0], [1]].")
    if is_pbtxt(text):
        return "pbtxt"
    if start[0] == "{" and '"' in start:
        return "sequoia" if "Successors" in start or "branches" in start else "preset"
    key = None if named else yaml_key(text)
    if key is not None:
        return "preset" if key in OWN_KEYS else "yaml"
    if start[0] == "{":
        return "triton"
    if start[0] in "[(])}":
        if _FLAT_LIST.match(start) and any(sign.isdigit() for sign in start):
            return "cartesian"
        return "tuples" if start.startswith(("[(", "((")) else "lists"
    raise TreeError(
        f"{start[:30]!r} does not begin like a choice tree. Paste lists such as [[0], [0, 0]], "
        "Triton's {0}, {0, 0}, a YAML or pbtxt file that has one, or a Sequoia growmap."
    )


def _check_known(format: str) -> None:
    names = get_args(FormatName)
    if format not in names:
        raise ConfigError(f"format must be one of {', '.join(names)}, got {format!r:.40}.")


def _read(text: str, format: FormatName) -> tuple[ChoiceTree, list[_Entry]]:
    if format == "sequoia":
        tree = tree_of_growmap(read_json(text))
        return tree, [_Entry(path, f"node {node}") for node, path in enumerate(tree.paths, 1)]
    if format == "pbtxt":
        return _tree_of(read_brackets(tree_in_pbtxt(text)), "triton")
    if format in ("yaml", "preset"):
        found = tree_in_json(text) if text.lstrip().startswith("{") else tree_in_yaml(text)
        return _tree_of(read_brackets(found), "lists")
    items = read_brackets(_bare(text))
    return _cartesian(items) if format == "cartesian" else _tree_of(items, format)


def _bare(text: str) -> str:
    """The text with `name =` before it and quotes around it blanked out: places stay."""
    head = _ASSIGNED.match(text)
    if head:
        text = re.sub(r"[^\n]", " ", head.group()) + text[head.end() :]
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] in "\"'" and stripped[-1] == stripped[0]:
        start, end = text.index(stripped[0]), text.rindex(stripped[0])
        text = f"{text[:start]} {text[start + 1 : end]}"
    return text


def _tree_of(items: Sequence[Item], format: FormatName) -> tuple[ChoiceTree, list[_Entry]]:
    """Paths from the groups of one outer list, or from those at the top (Triton's braces)."""
    only = items[0] if len(items) == 1 else None
    if isinstance(only, Group) and (format != "triton" or _is_outer(only)):
        items = only.items
    if not items:
        raise TreeError("Choice tree must have at least one path, got an empty list.")
    if len(items) > MAX_NODES:
        raise TreeError(f"Choice tree must have at most {MAX_NODES} nodes, got {len(items)}.")
    entries = [_entry(number, item) for number, item in enumerate(items, 1)]
    listed: dict[Path, str] = {}
    for entry in entries:
        if entry.path in listed:
            raise TreeError(
                f"Path {list(entry.path)} ({entry.where}) is there already "
                f"({listed[entry.path]}). Remove one of them."
            )
        listed[entry.path] = entry.where
    if format == "leaves":
        return ChoiceTree.parse(list(listed), form="leaves"), entries
    _check_connected(entries, listed)
    return ChoiceTree.parse(list(listed)), entries


def _check_connected(entries: Sequence[_Entry], listed: dict[Path, str]) -> None:
    """Refuse a gap, unless no path leads through another one: then only the ends are listed."""
    inner = {path[:depth] for path in listed for depth in range(1, len(path))}
    if inner.isdisjoint(listed):
        return
    for entry in entries:
        parent = entry.path[:-1]
        if parent and parent not in listed:
            raise TreeError(
                f"Path {list(entry.path)} ({entry.where}) is not connected: its parent "
                f"{list(parent)} is not in the tree. Add it, or list only the ends of paths."
            )


def _is_outer(group: Group) -> bool:
    return bool(group.items) and all(isinstance(item, Group) for item in group.items)


def _entry(number: int, item: Item) -> _Entry:
    where = f"entry {number}, {item.place}"
    if isinstance(item, Word):
        raise TreeError(
            f"{item.text[:40]} ({where}) is no path. A tree is a list of paths such as "
            "[[0], [0, 0]], each in brackets of its own."
        )
    if not item.items:
        raise TreeError(f"The path at {item.place} (entry {number}) is empty. Give it a rank.")
    return _Entry(tuple(_rank(part, number) for part in item.items), where)


def _rank(item: Item, number: int) -> int:
    if isinstance(item, Group):
        raise TreeError(f"The brackets at {item.place} (entry {number}) nest too deep.")
    return _integer(item, f"Entry {number}", least=0)


def _integer(word: Word, what: str, *, least: int) -> int:
    if not re.fullmatch(r"[+-]?\d{1,9}", word.text):
        raise TreeError(f"{what} has {word.text[:40]!r} at {word.place}; it must be an integer.")
    if int(word.text) < least:
        raise TreeError(f"{what} has {word.text} at {word.place}; it must be {least} or more.")
    return int(word.text)


def _cartesian(items: Sequence[Item]) -> tuple[ChoiceTree, list[_Entry]]:
    """`[1, 7, 6]`: one root (the target's own token), 7 choices below it, 6 below each of them."""
    only = items[0] if len(items) == 1 else None
    parts = only.items if isinstance(only, Group) else items
    words = [part for part in parts if isinstance(part, Word)]
    if not words or len(words) < len(parts):
        raise TreeError("Cartesian shorthand must be one list of counts such as [1, 7, 6].")
    counts = [_integer(word, "The shorthand", least=0) for word in words]
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
    tree = ChoiceTree.parse(write.product_paths(counts[1:]), form="candidates")
    return tree, [_Entry(path, str(words[len(path)].place)) for path in tree.paths]
