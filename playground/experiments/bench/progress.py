"""How far a benchmark is, and how a call that ran it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from playground.experiments.bench.measured import Measured


@dataclass(frozen=True, slots=True)
class Skipped:
    """A turn that the target cannot take, and why."""

    suite: str
    prompt: str
    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a benchmark is; `eta_s` is None until there is something to judge by.

    Attributes:
        num_past: requests done, failed or left out.
        last: the request that was finished just now.
    """

    num_past: int
    num_requests: int
    num_failed: int
    words: str
    eta_s: float | None
    last: Measured | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of `run_plan` did."""

    cancelled: bool
    num_new: int
    num_failed: int
    skipped: tuple[Skipped, ...]

    @property
    def status(self) -> Literal["completed", "cancelled"]:
        return "cancelled" if self.cancelled else "completed"


class Eta:
    """Time that is left: requests to come, at the mean seconds of those that were run."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, configuration: str, seconds: float) -> None:
        """A request of this configuration took so long."""
        self._seconds.setdefault(configuration, []).append(seconds)

    def seconds(self, num_left: int) -> float | None:
        """None before the first request."""
        means = [sum(taken) / len(taken) for taken in self._seconds.values()]
        return num_left * sum(means) / len(means) if means else None


def time_left(eta_s: float | None) -> str:
    """Time to go, as people say it: `about 3 min left`; empty where nothing is known or left."""
    if not eta_s:
        return ""
    if eta_s < 90:
        return f"about {max(1, round(eta_s))} s left"
    minutes = round(eta_s / 60)
    long = f"{minutes // 60} h {minutes % 60} min" if minutes >= 90 else f"{minutes} min"
    return f"about {long} left"
