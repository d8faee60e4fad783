"""Which configurations of an experiment go on answering: all, or the faster half of each repeat.

Successive halving: all methods answer once beside plain decoding, then the faster half once more,
and so on; the last two go on until the time is up.
Source: arXiv:1502.07943, Fig. 3.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from playground.experiments.finished import FinishedRequest, pairs_of
from playground.experiments.plan import ExperimentPlan, Halving
from playground.experiments.report.statistics import Totals, speedup_of

FINALISTS = 2
MAX_OVERRUN = 2.0
"""Times the budget that a search may take until those that are left have answered twice."""


class Chooser:
    """Every configuration answers everything.

    Attributes:
        running: names of the methods that go on, plain decoding aside.
        left_s: seconds until the time is up; None without a limit.
    """

    def __init__(self, plan: ExperimentPlan) -> None:
        self.plan = plan
        self.running = [c.name for c in plan.configurations[1:]]

    def begin(self) -> None:
        """The target is loaded: the time counts from here."""

    def add(self, request: FinishedRequest, faults: Collection[str]) -> None:
        """A request is finished; `faults` are the configurations that failed so far."""

    def answers(self, name: str) -> bool:
        """Whether a configuration goes on answering."""
        return name in self.running or name == self.plan.reference.name

    @property
    def left_s(self) -> float | None:
        return None

    @property
    def is_over(self) -> bool:
        return False


class HalvingChooser(Chooser):
    def __init__(
        self,
        plan: ExperimentPlan,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(plan)
        self.budget_s = budget_s
        self.requests: list[FinishedRequest] = []
        self._clock = clock
        self._begin_s: float | None = None
        self._faults: Collection[str] = ()

    def begin(self) -> None:
        self._begin_s = self._clock()

    @property
    def _spent_s(self) -> float:
        return 0.0 if self._begin_s is None else self._clock() - self._begin_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.budget_s - self._spent_s)

    @property
    def is_over(self) -> bool:
        """On a slow machine two answers of each take longer than the budget."""
        if self.left_s:
            return False
        return self.is_confirmed or self._spent_s > MAX_OVERRUN * self.budget_s

    @property
    def alive(self) -> list[str]:
        return [name for name in self.running if name not in self._faults]

    @property
    def is_confirmed(self) -> bool:
        """Whether those in the running have answered everything twice: an interval needs that."""
        twice = Counter(r.configuration for r in self.requests if r.repeat == 1)
        return all(twice[name] >= len(self.plan.items) for name in self.alive)

    def add(self, request: FinishedRequest, faults: Collection[str]) -> None:
        """Drops the slower half of those that have answered everything of this repeat."""
        self.requests.append(request)
        self._faults = faults
        alive, repeat = self.alive, request.repeat
        everyone = {self.plan.reference.name, *alive}
        answers = sum(r.repeat == repeat and r.configuration in everyone for r in self.requests)
        if len(alive) <= FINALISTS or answers < len(everyone) * len(self.plan.items):
            return
        by_speed = sorted(alive, key=self._speed, reverse=True)
        self.running = by_speed[: max(FINALISTS, -(-len(by_speed) // 2))]

    def _speed(self, name: str) -> float:
        """Speedup so far; where the baseline is in doubt its bound, so that it is timed again."""
        pairs = pairs_of(self.requests, name, self.plan)
        speedup = speedup_of(pairs)
        return (speedup and (speedup.ratio or Totals.of([own for own, _ in pairs]).mat)) or 0.0


def chooser_of(plan: ExperimentPlan) -> Chooser:
    if isinstance(plan.chooser, Halving):
        return HalvingChooser(plan, plan.chooser.budget_s)
    return Chooser(plan)
