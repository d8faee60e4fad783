"""Reads YAML as plain data of JSON's types, with limits checked before it is built.

libyaml is fast but unsafe: its composer recurses until the process dies. So its events are counted
first, and may nest no deeper than JSON's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from engine.errors import ConfigError
from engine.safe_text import MAX_DEPTH, MAX_DIGITS, as_text, read_text

MAX_CHARS = 4 << 20
MAX_NODES = 100_000
"""Scalars, lists and mappings; the target of an alias counts at every occurrence."""
_TAG = "tag:yaml.org,2002:"
_IMPLICIT = ("null", "bool", "int", "float", "merge")
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+\Z")


def read_yaml(path: Path) -> Any:
    """Plain data of a YAML file.

    Raises ConfigError: unreadable, or malformed; names file and line.
    """
    return parse_yaml(read_text(path, most=MAX_CHARS), where=str(path))


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain data of YAML text.

    Raises ConfigError: malformed; names the place and the line.
    """
    try:
        text = as_text(text, what=where, most=MAX_CHARS)
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "malformed")
        raise ConfigError(f"{where}{line} is not valid YAML: {problem:.200}.") from error


_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's own loader, six times slower, where it has no libyaml."""


def _check_size(text: str) -> None:
    """Raises ConstructorError: the text nests too deeply, has too many values or a bad alias."""
    num_nodes, sizes = 0, dict[str, int]()
    unclosed: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_BASE):
        if isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            if name not in sizes:
                _refuse(f"*{name[:40]} names nothing that is closed before it", event)
            num_nodes += sizes[name]
        elif isinstance(event, yaml.NodeEvent):
            unclosed.append((event.anchor, num_nodes))
            num_nodes += 1
        if num_nodes > MAX_NODES:
            _refuse(f"it has more than {MAX_NODES} values", event)
        if len(unclosed) > MAX_DEPTH:
            _refuse(f"it nests deeper than {MAX_DEPTH}", event)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
            anchor, before = unclosed.pop()
            if anchor:
                sizes[anchor] = num_nodes - before


def _refuse(problem: str, at: Any) -> NoReturn:
    raise ConstructorError(None, None, problem, at.start_mark)


class _Loader(_BASE):  # type: ignore[misc]
    """Reads dates as text, and `1e-3` as a number."""

    yaml_constructors = {
        tag: construct
        for tag, construct in SafeConstructor.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "str", "seq", "map")
    }
    yaml_implicit_resolvers = {
        sign: [(tag, regexp) for tag, regexp in known if tag.removeprefix(_TAG) in _IMPLICIT]
        for sign, known in Resolver.yaml_implicit_resolvers.items()
    }

    def number(self, node: yaml.ScalarNode) -> Any:
        """An integer, a float or a boolean."""
        kind = node.tag.rpartition(":")[2]
        build = getattr(SafeConstructor, f"construct_yaml_{kind}")
        try:
            value = build(self, node)
        except (ValueError, LookupError, OverflowError):  # PyYAML does not catch Python's errors
            _refuse(f"{node.value[:40]!r} is not {kind}", node)
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            _refuse(f"an integer has at most {MAX_DIGITS} digits", node)
        return value


for _kind in ("int", "float", "bool"):
    _Loader.add_constructor(_TAG + _kind, _Loader.number)
_Loader.add_implicit_resolver(_TAG + "float", _EXPONENT, list("-+0123456789"))
