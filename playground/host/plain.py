"""The duration of a plain decoding step, timed directly before and after a run.

Every run of a page stores the baseline that it is compared with. A machine's speed changes within
minutes, so a run reuses the timing after the previous run only within a minute. Where the speed
changed between the two timings, the comparison is marked as uncertain.

A speedup is the ratio of the two displayed tok/s by the wall clock, over all steps of the run.
`playground.host.speedup` decides whether it is reliable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine.config import Limits, Sampling
from engine.metrics import (
    StepParts,
    Tally,
    TimeSplit,
    percentile,
    undisturbed,
)
from playground.host.speedup import Doubt, doubt_of

if TYPE_CHECKING:  # `runs list` reads stored baselines without torch
    from engine.drafters.base import BuildContext
    from engine.model.target import Target

MIN_STEPS = 16
"""Smallest number of steps that verified the root alone whose mean is a run's baseline."""
NUM_STEPS, MIN_TIMED_STEPS = 16, 5
BEFORE_S, AFTER_S = 0.12, 0.25
"""Time limits of the two timings after MIN_TIMED_STEPS; the first token waits for the first one."""
NUM_WARM_UP = 2
"""Warm-up steps of a timing, which are not counted."""
BRIEF_CONTEXT, MAX_CONTEXT = 128, 1024
"""Tokens of context; short before a run, because the first token waits for the timing."""
LONG_TEXT = 512
"""Tokens beyond which a step in a brief context says too little."""
RECENT_S = 60.0
"""A timing that ended this recently is reused for a run, whose first token then need not wait."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds from one step to the next: 1 / tok/s.

    Attributes:
        source: `around` the run, or by its `own` undrafted steps.
        drift: duration of a step after the run over that before it; 1 where the two were timed
            alternately, None where plain decoding was not timed on both sides of the run.
        noise: ratio of the quartiles of its steps.
    """

    verify_s: float
    other_s: float
    source: Literal["around", "own"]
    drift: float | None = None
    noise: float = 1.0

    @property
    def parts(self) -> StepParts:
        return StepParts(0.0, self.verify_s, self.other_s)

    @property
    def tok_s(self) -> float:
        return 1 / sum(self.parts)

    def during(self, metrics: Mapping[str, Any]) -> PlainStep:
        """This baseline at the machine's speed during the run itself.

        A run that drafted nothing in some of its steps has timed plain decoding under the same load
        as its drafts (a page that draws on the same cores, for example), which a timing around the
        run misses.

        Example: 16 ms, 15 of them to verify one row, timed around a run whose own undrafted steps
        took 30 ms to verify: 31 ms.

        Args:
            metrics: of the run; one with fewer than `MIN_STEPS` such steps keeps this baseline.
                A lookahead step that drafted nothing verified its window and is none of them.
        """
        verify_s = metrics.get("undrafted_verify_s")
        if not verify_s or (metrics.get("num_undrafted") or 0) < MIN_STEPS:
            return self
        return PlainStep(verify_s, self.other_s, "own", drift=1.0)

    def doubt(self, own_step_s: float) -> Doubt | None:
        """Why it is unreliable for a run with this mean wall-clock step time, if it is."""
        plain_step_s = self.verify_s + self.other_s
        return doubt_of(own_step_s, plain_step_s, drift=self.drift, noise=self.noise)


class BaselineTimer:
    """Times plain decoding before a run (in the constructor) and after it (`after`)."""

    def __init__(
        self,
        context: BuildContext,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        cancelled: Callable[[], bool],
        last: MutableMapping[Target, Timing],
    ) -> None:
        """Time it before the run, unless the timing after the last run is recent.

        Args:
            sampling: of the run; filtering a large vocabulary may take as long as a forward.
            last: the timing after the last run by target; updated.
        """
        self._context, self._cancelled = context, cancelled
        self._brief_ids = list(prompt_ids)[-BRIEF_CONTEXT:]
        self._sampling, self._last = sampling.replace(seed=0), last
        timing = last.get(context.target)
        is_usable = timing is not None and timing.is_recent(self._sampling)
        self._before = timing if is_usable else self._time(self._brief_ids, BEFORE_S)

    @property
    def before(self) -> PlainStep | None:
        """The baseline during the run; None where the timing was stopped."""
        return self._before.step(1.0, None) if self._before else None

    def after(self, token_ids: Sequence[int], own_step_s: float) -> PlainStep | None:
        """A plain step after these tokens, at the machine's mean speed during the run.

        It is timed again where it took longer than a step of the run, which cannot be.

        Args:
            token_ids: up to the middle of the run's answer: steps slow down with the context, and
                this one is compared with the mean of the run.
        """
        step = self._after(token_ids)
        if step and step.doubt(own_step_s) == "cheap step":
            step = self._after(token_ids)
        return step

    def _after(self, token_ids: Sequence[int]) -> PlainStep | None:
        """Example: 5 ms before the run and 6 ms after it make 5.5 ms.

        Where the text is long, a step in its context is timed too, and scaled by 5.5 / 6.
        """
        before, again = self._before, self._time(self._brief_ids, AFTER_S)
        if before is None or again is None:
            return self.before
        drift = again.split.total_s / before.split.total_s
        is_long = len(token_ids) > LONG_TEXT
        there = self._time(list(token_ids)[-MAX_CONTEXT:], AFTER_S) if is_long else again
        noise = max(before.noise, again.noise)
        self._last[self._context.target] = again
        return (there or again).step((1 + 1 / drift) / 2, drift, noise)

    def _time(self, token_ids: Sequence[int], max_s: float) -> Timing | None:
        """None where it was stopped, or the context is full."""
        from engine.decode import decode
        from engine.drafters.autoregressive import AutoregressiveConfig

        target = self._context.target
        ids = token_ids[max(0, len(token_ids) + NUM_STEPS + 1 - target.context_len) :]
        limits = Limits(max_new_tokens=NUM_STEPS + 1, ignore_eos=True)
        tally, began_s = Tally(), time.monotonic()

        def enough() -> bool:
            late = time.monotonic() - began_s > max_s
            return self._cancelled() or (late and len(tally.step_s) >= MIN_TIMED_STEPS)

        drafter = AutoregressiveConfig().build(self._context)
        records = decode(
            target, drafter, ids, sampling=self._sampling, limits=limits, cancelled=enough
        )
        for record in records:
            tally.add(record)
        steps = tally.by_size.get(0, [])[NUM_WARM_UP:]
        if len(steps) < 2 or self._cancelled():
            return None
        times = [step.total_s for step in steps]
        noise = percentile(times, 75) / percentile(times, 25)
        return Timing(TimeSplit.mean(undisturbed({0: steps})), noise, self._sampling)


@dataclass(frozen=True, slots=True)
class Timing:
    """One timing: the mean of the undisturbed steps, the ratio of the quartiles of all."""

    split: TimeSplit
    noise: float
    sampling: Sampling
    ended_s: float = field(default_factory=time.monotonic)

    def is_recent(self, sampling: Sampling) -> bool:
        """Whether it was made with this sampling, within the last `RECENT_S`."""
        return self.sampling == sampling and time.monotonic() - self.ended_s < RECENT_S

    def step(self, scale: float, drift: float | None, noise: float = 1.0) -> PlainStep:
        other_s = self.split.total_s - self.split.verify_s
        times = scale * self.split.verify_s, scale * other_s
        return PlainStep(*times, "around", drift=drift, noise=noise)


def stored_plain_step(metrics: Mapping[str, Any]) -> PlainStep | None:
    """The baseline stored with a run; None where there is none, or an invalid one."""
    try:
        step = TypeAdapter(PlainStep).validate_python(metrics.get("plain"))
    except ValidationError:
        return None
    return step if step.verify_s > 0 and step.other_s >= 0 else None


def step_parts(metrics: Mapping[str, Any]) -> StepParts | None:
    """Mean seconds from one step of a run to the next, by part; they add up to decode_s / steps."""
    split, steps, decode_s = (metrics.get(name) for name in ("time_split", "num_steps", "decode_s"))
    if not (split and steps and decode_s):
        return None
    draft_s, verify_s, _ = TimeSplit(**split).parts
    return StepParts(draft_s, verify_s, decode_s / steps - draft_s - verify_s)
