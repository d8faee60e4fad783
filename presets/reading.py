"""YAML as plain data: what JSON can say, bounded before it is built.

libyaml, which splits the text, is as fast as it is trusting: its own composer recurses until the
process dies. Here the nodes are put together in Python, counted, and no deeper than JSON's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from engine.errors import ConfigError
from engine.safe_text import MAX_DEPTH, MAX_DIGITS, as_text, read_text

MAX_CHARS = 4 << 20
MAX_NODES = 100_000
"""Texts, lists and mappings; one that is named with `*` counts at every place."""
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
        return yaml.load(as_text(text, what=where, most=MAX_CHARS), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "malformed")
        raise ConfigError(f"{where}{line} is not valid YAML: {problem:.200}.") from error


class _Python(Reader, Scanner, Parser):
    """The text's events where PyYAML has no libyaml; a sixth as fast."""

    def __init__(self, stream: str) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)


_Events: Any = getattr(getattr(yaml, "cyaml", None), "CParser", _Python)


class _Loader(Composer, _Events, SafeConstructor, Resolver):  # type: ignore[misc]
    """Nodes in Python from libyaml's events; dates stay text, and `1e-3` is a number."""

    yaml_constructors = {
        tag: construct
        for tag, construct in SafeConstructor.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "str", "seq", "map")
    }
    yaml_implicit_resolvers = {
        sign: [(tag, regexp) for tag, regexp in known if tag.removeprefix(_TAG) in _IMPLICIT]
        for sign, known in Resolver.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        _Events.__init__(self, stream)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._depth = self._num_nodes = 0
        self._sizes: dict[str, int] = {}
        """Nodes under every name that is given and closed."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        name = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if name not in self._sizes:
                self._refuse(f"*{name[:40]} names nothing that is closed before it", event)
            self._num_nodes += self._sizes[name]
        before = self._num_nodes
        self._num_nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"it nests deeper than {MAX_DEPTH}", event)
        if self._num_nodes > MAX_NODES:
            self._refuse(f"it has more than {MAX_NODES} values", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if name and not isinstance(event, yaml.AliasEvent):
            self._sizes[name] = self._num_nodes - before
        return node

    def number(self, node: yaml.ScalarNode) -> Any:
        """An integer, a float or a truth value."""
        kind = node.tag.rpartition(":")[2]
        build = getattr(SafeConstructor, f"construct_yaml_{kind}")
        try:
            value = build(self, node)
        except (ValueError, LookupError, OverflowError):  # PyYAML lets Python's own errors out
            self._refuse(f"{node.value[:40]!r} is not {kind}", node)
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            self._refuse(f"an integer has at most {MAX_DIGITS} digits", node)
        return value

    @staticmethod
    def _refuse(problem: str, at: Any) -> Any:
        raise ConstructorError(None, None, problem, at.start_mark)


for _kind in ("int", "float", "bool"):
    _Loader.add_constructor(_TAG + _kind, _Loader.number)
_Loader.add_implicit_resolver(_TAG + "float", _EXPONENT, list("-+0123456789"))
