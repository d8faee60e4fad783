"""Errors that a user can cause, one class for each that a caller may want to catch.

Every message is one or two sentences: what is wrong with which value, then what to do.
"""

import difflib
from collections.abc import Iterable, Mapping


class PlaygroundError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(PlaygroundError):
    """A setting is unknown, of the wrong type or out of range.

    Attributes:
        faults: what is wrong, a sentence for each setting; empty where no setting is to blame.
    """

    def __init__(self, message: str = "", *, faults: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


class TreeError(ConfigError):
    """A choice tree is malformed, or deeper or wider than its drafter."""


class SourceError(PlaygroundError):
    """Weights could not be found, fetched or trusted."""


class TargetError(PlaygroundError):
    """The model cannot serve as a target here."""


class OutOfMemoryError(TargetError):
    """The model needs more memory than the device has."""


class DrafterError(PlaygroundError):
    """The drafter does not fit the target."""


class VocabularyError(DrafterError):
    """The drafter's vocabulary differs from the target's."""

    BY_TEXT = "(vocabulary=text)"
    """Part of the message where drafting by text would help."""


class PromptError(PlaygroundError):
    """The prompt is empty, too long for the context, or cannot be rendered."""


def validate_choice(name: str, value: object, choices: Iterable[str], advice: str = "") -> str:
    """The value, if it is one of the choices. Raises ConfigError: it is not; ends with `advice`."""
    allowed = tuple(choices)
    if not isinstance(value, str) or value not in allowed:
        sentence = f"{name} must be one of {', '.join(allowed)}, got {value!r:.80}."
        raise ConfigError(f"{sentence} {advice}".rstrip())
    return value


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """A hint at the choice most similar to a misspelled name; empty if none is similar."""
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.4)
    return f"Did you mean {near[0]}?" if near else ""


def first_line(error: BaseException, most: int = 200) -> str:
    """Another library's error message as one printable line, to be quoted in a sentence.

    A first line that ends with a colon is joined with the second.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    text = "".join(c if c.isprintable() else "?" for c in text or type(error).__name__)
    return text[:most].rstrip(".: ")
