"""What drafting has gained and lost: of a text, of one kind of draft, and of trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

FREE_HICCUP_MS = 40.0
"""Hiccups in drafted steps that are never charged to drafting, in milliseconds per text."""
HICCUP_TOLERANCE = 2.0
"""Beyond that, drafted steps may lose this many times the share of time that hiccups take of plain
steps."""
NOISE_TOLERANCE, NOISE_HICCUP_STEPS = 3.0, 10.0
"""What noise excuses: so many standard errors of the time of all drafted steps, and so many plain
steps of hiccups; a machine whose plain steps vary has those, too."""


@dataclass(slots=True)
class LossAccount:
    """What drafting has lost in a text, in milliseconds.

    A program that draws or compiles on the same cores now and then holds up a step for many times
    its usual time. Such a hiccup hits drafted and plain steps alike, and is not charged to drafting
    unless drafted steps have many more of them. Where programs run beside it all the time, every
    step takes longer than expected, or shorter: what plain steps show of that is not charged
    either.

    Attributes:
        elapsed_ms: since the text began.
    """

    elapsed_ms: float = 0.0
    _settled_ms: float = 0.0
    _pending_ms: float = 0.0
    _pending_tokens: int = 0
    _drafted_ms: float = 0.0
    _drafted_hiccup_ms: float = 0.0
    _excess_ms: float = 0.0
    _usual_ms_squared: float = 0.0
    _plain_hiccup_ms: float = 0.0

    def add_drafted_step(
        self, ms: float, num_tokens: int, hiccup_ms: float, usual_ms: float
    ) -> None:
        """Record a drafted step.

        Args:
            hiccup_ms: by how much something else held it up; included in `ms`.
            usual_ms: what such a step was expected to take.
        """
        self.elapsed_ms += ms
        self._drafted_ms += ms
        self._pending_ms += ms
        self._pending_tokens += num_tokens
        self._drafted_hiccup_ms += hiccup_ms
        self._excess_ms += ms - hiccup_ms - usual_ms
        self._usual_ms_squared += usual_ms**2

    def add_plain_step(self, ms: float, before_ms: float, after_ms: float | None) -> None:
        """Record a plain step.

        Args:
            before_ms, after_ms: the estimates of a plain step's time without and with this one;
                None for an outlier, which says nothing of the steps before it.
        """
        self.elapsed_ms += ms
        if after_ms is None:
            self._plain_hiccup_ms += max(0.0, ms - before_ms)
            return
        # Drafted steps are judged by the plain steps before and after them.
        self._settled_ms += self._pending_ms - self._pending_tokens * (before_ms + after_ms) / 2
        self._pending_ms, self._pending_tokens = 0.0, 0

    def loss_ms(self, plain_ms: float, noise: float = 0.0) -> float:
        """The loss so far; negative for a gain.

        Args:
            plain_ms: what a plain step takes.
            noise: see `Costs.noise`.
        """
        pending_ms = self._pending_ms - self._pending_tokens * plain_ms
        hiccups_ms = self._excused_hiccups_ms(NOISE_HICCUP_STEPS * noise * plain_ms)
        excess_ms = min(
            self._excess_ms, NOISE_TOLERANCE * noise * math.sqrt(self._usual_ms_squared)
        )
        return self._settled_ms + pending_ms - hiccups_ms - max(0.0, excess_ms)

    def _excused_hiccups_ms(self, noise_ms: float) -> float:
        """Hiccups of drafted steps that are not charged."""
        quiet_ms = self.elapsed_ms - self._drafted_ms - self._plain_hiccup_ms
        rate = self._plain_hiccup_ms / quiet_ms if quiet_ms else 0.0
        usual_ms = rate * (self._drafted_ms - self._drafted_hiccup_ms)
        free_ms = max(FREE_HICCUP_MS, noise_ms)
        return min(self._drafted_hiccup_ms, free_ms + HICCUP_TOLERANCE * usual_ms)


class RunningSpeedup:
    """Speed of recent drafted steps over plain decoding, as measured.

    Args:
        prior: assumed before the first step.
        memory: weight of the past per step.
        prior_steps: weight of `prior`, in steps.
    """

    def __init__(self, prior: float, memory: float, prior_steps: float) -> None:
        self._memory = memory
        self.num_tokens, self.plain_steps = prior * prior_steps, prior_steps

    @property
    def value(self) -> float:
        return self.num_tokens / self.plain_steps

    def observe(self, num_tokens: int, plain_steps: float) -> None:
        """Record a drafted step, which took as long as this many plain steps."""
        self.num_tokens = self._memory * self.num_tokens + num_tokens
        self.plain_steps = self._memory * self.plain_steps + plain_steps


@dataclass(slots=True)
class Trials:
    """Occasional drafts of a kind that does not pay off, or less than another.

    Attributes:
        loss_share, initial_loss_ms: what they may lose: of the elapsed time, and at first.
        lost_ms: what they have lost.
        num_left: drafts left of the trial under way.
    """

    loss_share: float
    initial_loss_ms: float
    lost_ms: float = 0.0
    num_left: int = 0

    def max_loss_ms(self, elapsed_ms: float) -> float:
        """What the next draft may lose; within a trial, only the text's account limits it."""
        return math.inf if self.num_left else self.balance_ms(elapsed_ms)

    def balance_ms(self, elapsed_ms: float) -> float:
        """What trials may still lose; negative if the last one lost more than it might."""
        return self.initial_loss_ms + self.loss_share * elapsed_ms - self.lost_ms
