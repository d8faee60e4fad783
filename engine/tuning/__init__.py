"""Measures what drafting brings and costs, and decides how much of it pays off."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import PlaygroundError

OnProgress = Callable[[float], None]
"""Called with the completed fraction, 0 to 1; may raise `StoppedError` to stop the measurement."""


class StoppedError(PlaygroundError):
    """A measurement was stopped; nothing of it is kept."""


def no_progress(done: float) -> None:
    """Reports nothing."""


def progress_range(on_progress: OnProgress, begin: float, end: float) -> OnProgress:
    """A callback for a part of the work, which takes the whole from `begin` to `end`."""
    return lambda done: on_progress(begin + done * (end - begin))
