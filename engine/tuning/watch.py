"""Lets somebody watch a long measurement, and stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import PlaygroundError


class StoppedError(PlaygroundError):
    """A measurement was stopped; nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how far a measurement is, and who may stop it.

    Attributes:
        progress: told the fraction done, from 0 to 1.
        cancelled: asked at every `at`.
    """

    progress: Callable[[float], None] = lambda fraction: None
    cancelled: Callable[[], bool] = lambda: False

    def at(self, done: int, total: int) -> None:
        """So much is done.

        Raises:
            StoppedError: somebody stopped it.
        """
        if self.cancelled():
            raise StoppedError("The measurement was stopped; nothing of it is kept.")
        self.progress(done / total if total else 1.0)

    def part(self, begin: float, end: float) -> Watch:
        """For a part of the work, which takes progress from `begin` to `end`."""
        return Watch(lambda done: self.progress(begin + done * (end - begin)), self.cancelled)


UNWATCHED = Watch()
"""Nobody is told, and nobody stops it."""
