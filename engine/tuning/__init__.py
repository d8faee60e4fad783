"""Measures what a drafter offers and costs, and finds the settings that pay."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import PlaygroundError

OnProgress = Callable[[float], None]
"""Called with the completed fraction, 0 to 1; raises `StoppedError` to stop a measurement."""


class StoppedError(PlaygroundError):
    """A measurement was stopped; nothing of it is kept."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The measurement was stopped; nothing of it is kept.")


def ignore(done: float) -> None:
    """No progress is reported."""


def part(on_progress: OnProgress, begin: float, end: float) -> OnProgress:
    """For a part of the work, which takes progress from `begin` to `end`."""
    return lambda done: on_progress(begin + done * (end - begin))
