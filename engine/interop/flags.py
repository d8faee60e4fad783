"""Command lines of other engines taken apart: options with their values, and words without."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from engine.errors import ConfigError

MAX_CHARS = 200_000
_NEGATIVE = re.compile(r"-[\d.]")


@dataclass(frozen=True, slots=True)
class Flags:
    """A command line.

    Attributes:
        options: by name with its dashes, underscores as dashes; a flag without value has "".
        words: everything that belongs to no option, in order.
    """

    options: dict[str, str]
    words: tuple[str, ...]

    def first(self, *names: str) -> str | None:
        """Value of the first of these options that is there."""
        return next((self.options[name] for name in names if name in self.options), None)


def read_flags(text: str, *, switches: frozenset[str] = frozenset()) -> Flags:
    """Take a command line apart; line breaks, with or without backslash, are blanks.

    Args:
        switches: options that take no value, so that a word after one stays a word.

    Raises:
        ConfigError: quotes do not match, or an option is given twice.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"The command has {len(text)} characters; {MAX_CHARS} are allowed.")
    try:
        tokens = shlex.split(re.sub(r"\\\s*\n", " ", text), comments=True)
    except ValueError as error:
        raise ConfigError(f"The command cannot be taken apart: {error}.") from error
    options: dict[str, str] = {}
    words: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not _is_option(token):
            words.append(token)
            continue
        name, equals, value = token.partition("=")
        name = "-" * (len(name) - len(name.lstrip("-"))) + name.lstrip("-").replace("_", "-")
        if not equals and name not in switches and at < len(tokens) and not _is_option(tokens[at]):
            value = tokens[at]
            at += 1
        if name in options and options[name] != value:
            raise ConfigError(f"{name} is given twice: {options[name]!r:.40} and {value!r:.40}.")
        options[name] = value
    return Flags(options, tuple(words))


def _is_option(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not _NEGATIVE.match(token)
