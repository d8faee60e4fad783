"""Exports, imported methods, and the files and commands of other engines as text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError

Verdict = Literal["exact", "with losses", "not supported"]
Version = tuple[int, ...]
MAX_CHARS = 200_000
ReadYaml = Callable[[str], Any]
"""Parses YAML to plain data; callers pass it in, since the engine package does not import yaml."""
_OPTION = re.compile(r"-(?![\d.]).")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_PLAIN = re.compile(r"[A-Za-z_./~][\w./~-]*")
_YAML_WORDS = frozenset("true false yes no on off null y n ~".split())


@dataclass(frozen=True, slots=True)
class File:
    """A text to save or to paste; `language` is for syntax highlighting."""

    name: str
    text: str
    language: str = "text"


@dataclass(frozen=True, slots=True)
class Export:
    """A method as an engine runs it.

    `warnings` have a sentence per difference from the method here; `refusal` says why the engine
    cannot run it, without files then, and `nearest` is the closest alternative.
    """

    engine: str
    version: str
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    nearest: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.refusal:
            return "not supported"
        return "with losses" if self.warnings else "exact"


@dataclass(frozen=True, slots=True)
class ImportedMethod:
    """An engine's config read as a method here.

    `notes` say how it was read where that is not obvious; `ignored` keys do not bear on what is
    drafted: where the drafter runs, for how many. `target` is None where the text names none.
    """

    config: MethodConfig
    target: str | None = None
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes and the ignored keys, a line each."""
        unread = (f"ignored: {key} has no effect on drafting." for key in self.ignored)
        return (*(f"note: {note}" for note in self.notes), *unread)


def yaml_block(values: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings as YAML; lists in flow style, texts quoted only where they must be."""
    pad = " " * indent
    lines = [
        f"{pad}{key}:\n{yaml_block(value, indent + 2)}"
        if isinstance(value, Mapping)
        else f"{pad}{key}: {_yaml_value(value)}\n"
        for key, value in values.items()
    ]
    return "".join(lines)


def _yaml_value(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value)


def command(start: str, *options: str | tuple[str, object]) -> str:
    """A shell command, one option with its value per line."""
    lines = [
        option if isinstance(option, str) else f"{option[0]} {shlex.quote(str(option[1]))}"
        for option in options
    ]
    return " \\\n  ".join([start, *lines]) + "\n"


class Flags(NamedTuple):
    """A command line: options by name, underscores as dashes, "" for no value.

    `environment` has the assignments before it, NAME=VALUE.
    """

    options: dict[str, str]
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def first(self, *names: str) -> str | None:
        """Value of the first of these options that is there."""
        return next((self.options[name] for name in names if name in self.options), None)


def read_flags(text: str, *, switches: Container[str] = ()) -> Flags:
    """Take a command line apart; no word after one of the `switches` is its value.

    Raises:
        ConfigError: quotes do not match, or an option is given twice.
    """
    try:
        tokens = shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError as error:
        raise ConfigError(f"The command cannot be parsed: {error}.") from error
    options: dict[str, str] = {}
    environment: dict[str, str] = {}
    arguments: list[str] = []
    tokens.reverse()
    while tokens:
        name, equals, value = (token := tokens.pop()).partition("=")
        if _OPTION.match(token):
            given, name = options, name.replace("_", "-")
            if not equals and name not in switches and tokens and not _OPTION.match(tokens[-1]):
                value = tokens.pop()
        elif _ASSIGNMENT.match(token):
            given = environment
        else:
            arguments.append(token)
            continue
        if given.setdefault(name, value) != value:
            raise ConfigError(f"{name} is given twice: {given[name]!r:.40} and {value!r:.40}.")
    return Flags(options, tuple(arguments), environment)


def read_mapping(
    text: str, read_yaml: ReadYaml, keys: tuple[str, ...], expected: str
) -> tuple[dict[str, Any], str | None]:
    """A mapping, or the one under one of the keys, and the `model` beside that key.

    Raises:
        ConfigError: there is none; begins with `expected`.
    """
    values, target = read_yaml(text), None
    for key in keys:
        if isinstance(values, Mapping) and values.get(key) is not None:
            target = values.get("model")
            values = read_yaml(values[key]) if isinstance(values[key], str) else values[key]
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"{expected}, got {text.strip()[:60]!r}.")
    named = {str(key): value for key, value in values.items()}
    return named, target if isinstance(target, str) else None
