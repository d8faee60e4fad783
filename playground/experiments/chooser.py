"""Which configurations of an experiment continue: all, or the faster half after each repeat.

Successive halving: all methods answer once, with plain decoding beside them, then the faster half
once more, and so on; the last two continue until the time is up.
Source: arXiv:1502.07943, Fig. 3.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from playground.experiments.plan import ExperimentPlan, Halving
from playground.experiments.statistics import FinishedRequest, Totals, plain_pairs
from playground.host.speedup import speedup_of

FINALISTS = 2
MAX_OVERRUN = 2.0
"""How many times its budget a search may take until the remaining methods have answered twice; each
answers once, however long that takes."""


class Chooser:
    """Keeps every configuration, or within a time budget the faster half after each repeat.

    Attributes:
        running: names of the methods that have not been dropped, without plain decoding.
        faults: configurations that failed, and why; they do not continue either.
        budget_s: None without a limit; then no method is dropped.
    """

    def __init__(self, plan: ExperimentPlan) -> None:
        self.plan = plan
        self.running = [c.name for c in plan.configurations[1:]]
        self.budget_s = plan.chooser.budget_s if isinstance(plan.chooser, Halving) else None
        self.requests: list[FinishedRequest] = []
        self.faults: dict[str, str] = {}
        self._begin_s: float | None = None

    @classmethod
    def of(
        cls, plan: ExperimentPlan, requests: Sequence[FinishedRequest], faults: Mapping[str, str]
    ) -> Self:
        """The choice after these requests, with the faults that their configurations ended with.

        A fault counts from the first repeat on in which its configuration has not answered all.
        """
        chooser, answers = cls(plan), Counter((r.configuration, r.repeat) for r in requests)
        for request in requests:
            ended = (name for name in faults if answers[name, request.repeat] < len(plan.items))
            chooser.faults = {name: faults[name] for name in ended}
            chooser.add(request)
        chooser.faults = dict(faults)
        return chooser

    def begin(self) -> None:
        """Start the clock; the target is loaded."""
        self._begin_s = time.monotonic()

    def is_active(self, name: str) -> bool:
        """Whether a configuration continues."""
        return name not in self.faults and name in (self.plan.reference.name, *self.running)

    @property
    def _spent_s(self) -> float:
        return 0.0 if self._begin_s is None else time.monotonic() - self._begin_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the time is up; None without a limit."""
        return None if self.budget_s is None else max(0.0, self.budget_s - self._spent_s)

    @property
    def spent_share(self) -> float | None:
        """Share of the time that is spent; None without a limit."""
        return None if self.budget_s is None else min(1.0, self._spent_s / self.budget_s)

    @property
    def is_over(self) -> bool:
        """Whether the time is up; one or two answers each may take longer than the budget."""
        if self.budget_s is None or self.remaining_s:
            return False
        is_late = self._spent_s > MAX_OVERRUN * self.budget_s
        return self.all_answered(0 if is_late else 1)

    @property
    def candidates(self) -> list[str]:
        return [name for name in self.running if name not in self.faults]

    def all_answered(self, repeat: int) -> bool:
        """Whether the candidates have answered everything of a repeat; an interval needs two."""
        answers = Counter(r.configuration for r in self.requests if r.repeat == repeat)
        return all(answers[name] >= len(self.plan.items) for name in self.candidates)

    def add(self, request: FinishedRequest) -> None:
        """Drop the slower half once all candidates have answered everything of this repeat."""
        if self.budget_s is None:
            return
        self.requests.append(request)
        candidates, repeat = self.candidates, request.repeat
        everyone = {self.plan.reference.name, *candidates}
        answers = sum(r.repeat == repeat and r.configuration in everyone for r in self.requests)
        if len(candidates) <= FINALISTS or answers < len(everyone) * len(self.plan.items):
            return
        by_speed = sorted(candidates, key=self._speed, reverse=True)
        self.running = by_speed[: max(FINALISTS, -(-len(by_speed) // 2))]

    def _speed(self, name: str) -> float:
        """Speedup so far, or its upper bound where the baseline is unreliable."""
        pairs = plain_pairs(self.requests, name, self.plan)
        speedup = speedup_of(pairs)
        return (speedup and (speedup.ratio or Totals.of([own for own, _ in pairs]).mat)) or 0.0
