"""Drafters of tests that are their own session."""

from __future__ import annotations

from typing import Any

from engine.drafters.base import Drafter, DraftSession, Start


class OneText(Drafter, DraftSession[Any]):
    """One text at a time; `begin` is called when it opens, before its prompt is read."""

    def __init__(self) -> None:
        """No session yet."""

    def open(self, start: Start) -> DraftSession[Any]:
        DraftSession.__init__(self, self, start)
        self.begin()
        return self

    def begin(self) -> None:
        """Nothing to set up."""

    @property
    def parts(self) -> Any:
        return (self,)
