"""What drafting has gained and lost: of a text, of one kind of draft, and of trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.tuning.costs import HICCUP_RATIO

FREE_HICCUP_MS = 40.0
"""Hiccups in drafted steps that are never charged to drafting, in milliseconds per text."""
HICCUP_TOLERANCE = 2.0
"""Beyond that, drafted steps may lose this many times the share of time that hiccups take of plain
steps."""


@dataclass(slots=True)
class LossAccount:
    """What drafting has lost in a text, in milliseconds.

    A program that draws or compiles on the same cores now and then holds up a step for many times
    its usual time. Such a hiccup hits drafted and plain steps alike, and is not charged to drafting
    unless drafted steps have many more of them.

    Attributes:
        elapsed_ms: since the text began.
    """

    elapsed_ms: float = 0.0
    _settled_ms: float = 0.0
    _pending_ms: float = 0.0
    _pending_tokens: int = 0
    _drafted_ms: float = 0.0
    _drafted_hiccup_ms: float = 0.0
    _plain_hiccup_ms: float = 0.0

    def add_drafted_step(self, ms: float, num_tokens: int, hiccup_ms: float) -> None:
        """Record a drafted step.

        Args:
            hiccup_ms: by how much something else held it up; included in `ms`.
        """
        self.elapsed_ms += ms
        self._drafted_ms += ms
        self._pending_ms += ms
        self._pending_tokens += num_tokens
        self._drafted_hiccup_ms += hiccup_ms

    def add_plain_step(self, ms: float, before_ms: float, after_ms: float) -> None:
        """Record a plain step.

        Args:
            before_ms, after_ms: the estimates of a plain step's time without and with this one.
        """
        self.elapsed_ms += ms
        if ms > HICCUP_RATIO * before_ms:
            self._plain_hiccup_ms += max(0.0, ms - after_ms)
            if after_ms == before_ms:  # a step that says nothing of those before it
                return
        # Drafted steps are judged by the plain steps before and after them.
        self._settled_ms += self._pending_ms - self._pending_tokens * (before_ms + after_ms) / 2
        self._pending_ms, self._pending_tokens = 0.0, 0

    def loss_ms(self, plain_ms: float) -> float:
        """The loss so far, where a plain step takes `plain_ms`; negative for a gain."""
        pending_ms = self._pending_ms - self._pending_tokens * plain_ms
        return self._settled_ms + pending_ms - self._excused_ms

    @property
    def _excused_ms(self) -> float:
        """Hiccups of drafted steps that are not charged."""
        quiet_ms = self.elapsed_ms - self._drafted_ms - self._plain_hiccup_ms
        rate = self._plain_hiccup_ms / quiet_ms if quiet_ms else 0.0
        usual_ms = rate * (self._drafted_ms - self._drafted_hiccup_ms)
        return min(self._drafted_hiccup_ms, FREE_HICCUP_MS + HICCUP_TOLERANCE * usual_ms)


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
