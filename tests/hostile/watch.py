"""How long a case may take, and values that are cheap to write and dear to copy."""

from __future__ import annotations

import time
from typing import Any

MOST_S = 5.0


class Watch:
    """How long something has taken; a process that is paused meanwhile is not slow."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    @property
    def took_s(self) -> float:
        return min(time.monotonic() - self._wall, time.process_time() - self._cpu)


def shared_lists() -> list[Any]:
    """Lists within lists, each ten times the same: 10^60 if they were copied."""
    value: list[Any] = []
    for _ in range(60):
        value = [value] * 10
    return value
