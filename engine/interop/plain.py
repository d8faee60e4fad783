"""Small values as texts and back: JSON, YAML blocks, commands; keys that were not used."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import ConfigError


def dumps(values: Mapping[str, Any]) -> str:
    """JSON in one line, as command lines want it."""
    return json.dumps(values, separators=(",", ":"))


def yaml_block(values: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings as YAML; lists in flow style, texts quoted only where they must be."""
    lines: list[str] = []
    pad = " " * indent
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:\n{yaml_block(value, indent + 2)}".rstrip("\n"))
        else:
            lines.append(f"{pad}{key}: {_yaml_value(value)}")
    return "\n".join(lines) + "\n"


def _yaml_value(value: Any) -> str:
    plain = r"[A-Za-z_./~][\w./~-]*"
    words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "~"}
    if isinstance(value, str) and re.fullmatch(plain, value) and value.lower() not in words:
        return value
    if isinstance(value, set | frozenset | tuple):
        value = sorted(value) if isinstance(value, set | frozenset) else list(value)
    return json.dumps(value)


def command(*parts: str | tuple[str, object]) -> str:
    """A shell command, one option with its value per line."""
    lines: list[str] = []
    for part in parts:
        lines.append(part if isinstance(part, str) else f"{part[0]} {shlex.quote(str(part[1]))}")
    return " \\\n  ".join(lines) + "\n"


def sort_keys(
    keys: Iterable[str], *, used: Iterable[str], known: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that were not used: those that the engine knows, and those that it does not."""
    used, known = set(used), set(known)
    left = [key for key in keys if key not in used]
    ignored = tuple(key for key in left if key in known)
    unknown = []
    for key in left:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known | used), n=1, cutoff=0.6)
            unknown.append(f"{key} (did you mean {near[0]}?)" if near else key)
    return ignored, tuple(unknown)


def whole(values: Mapping[str, Any], key: str) -> int:
    """An integer setting; from a command line it comes as text.

    Raises:
        ConfigError: it is none.
    """
    value = values[key]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} must be an integer, got {value!r:.80}.")
    return value


def number(values: Mapping[str, Any], key: str) -> float:
    """A number; from a command line it comes as text.

    Raises:
        ConfigError: it is none.
    """
    value = values[key]
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{key} must be a number, got {value!r:.80}.")
