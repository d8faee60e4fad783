"""The duration of a plain decoding step, timed directly before a run and after it.

Every run of a page carries the baseline that it is compared with. A machine's speed changes within
minutes, so a run takes over the timing after the previous one only within a minute; where the speed
changed between the two timings, the comparison is marked as uncertain.

A speedup is the ratio of the two displayed tok/s by the wall clock, over every step of the run.
`playground.host.baseline` decides whether it is reliable.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine.config import Limits
from engine.metrics import (
    StepParts,
    Tally,
    TimeSplit,
    percentile,
    stored_figures,
    undisturbed,
)
from engine.tuning.latency import bucket_of
from playground.host.baseline import Evidence, doubt_of
from storage import RunDetail, RunLog, RunQuery

if TYPE_CHECKING:  # `runs list` reads stored baselines without torch
    from engine.drafters.base import BuildContext
    from engine.model.target import Target

PLAIN = "Autoregressive"
LEAST_STEPS = 16
"""Steps of a run whose mean is a figure."""
NUM_STEPS, LEAST_TIMED = 16, 5
BEFORE_S, AFTER_S = 0.12, 0.25
"""Limits of one timing, after LEAST_TIMED steps; the first token waits for the first."""
NUM_WARM = 2
"""Warm-up steps of a timing, not counted."""
BRIEF, MOST_CONTEXT = 128, 1024
"""Tokens of context; brief before a run, because the first token waits for it."""
RECENT_S = 60.0
"""A timing within this time before a run is used for it, so that its first token need not wait."""
NUM_RECENT = 16
"""Timings for the median of a target."""
SAME_PLACE = ("device_name", "threads", "weights", "revision", "dtype")
"""Entries of two environments that must be equal to compare their timings."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds of one step, the time until the next included: 1 / tok/s.

    Attributes:
        source: timed around the run, or a run of the log, or the run's `own` undrafted steps;
            `measured` is what older versions kept.
        run_id: of that run.
        drift: how many times as long a step took after the run as before it; 1 where the two took
            turns, None where plain decoding was not timed on both sides of the run.
        noise: ratio of the quartiles of its steps.
        disagreement: over the median of the recent timings of this target; 1 if there are none.
    """

    verify_s: float
    other_s: float
    source: Literal["around", "run", "own", "measured"]
    run_id: str | None = None
    drift: float | None = None
    noise: float = 1.0
    disagreement: float = 1.0

    @property
    def parts(self) -> StepParts:
        return StepParts(0.0, self.verify_s, self.other_s)

    @property
    def tok_s(self) -> float:
        return 1 / sum(self.parts)

    def during(self, metrics: Mapping[str, Any]) -> PlainStep:
        """This baseline at the speed that the machine had during the run itself.

        A run that drafted nothing in some of its steps timed plain decoding in turns with its
        drafts, under whatever else the machine was doing (a page that draws on the same cores, for
        one), which a timing around the run does not see.

        Example: 16 ms, 15 of them to verify one row, timed around a run whose own undrafted steps
        took 30 ms to verify: 31 ms.

        Args:
            metrics: of the run; one with fewer than `LEAST_STEPS` such steps keeps this baseline.
        """
        verify_s = metrics.get("undrafted_verify_s")
        num_undrafted = sum((metrics.get("bypasses") or {}).values())
        if not verify_s or num_undrafted < LEAST_STEPS or self.source == "run":
            return self
        return PlainStep(verify_s, self.other_s, "own", drift=1.0)

    def evidence(self, own_step_s: float | None = None) -> Evidence:
        """For a run with this mean step time on the wall clock."""
        step_s = self.verify_s + self.other_s
        return Evidence(own_step_s, step_s, self.drift, self.noise, self.disagreement)


class BaselineTimer:
    """Times plain decoding before one run, in the constructor, and after it, by `after`."""

    def __init__(
        self,
        context: BuildContext,
        prompt_ids: Sequence[int],
        cancelled: Callable[[], bool],
        recent: Recent,
    ) -> None:
        """Time it before the run, unless the timing after the last run is recent."""
        self._context, self._cancelled = context, cancelled
        self._brief = list(prompt_ids)[-BRIEF:]
        self._recent = recent
        timing = recent.timing_for(context.target, self._bucket)
        self._before = timing or self._time(self._brief, BEFORE_S)

    @property
    def before(self) -> PlainStep | None:
        """The baseline during the run; None where the timing was stopped."""
        return self._before.step(1.0, None) if self._before else None

    def after(self, token_ids: Sequence[int], own_step_s: float | None = None) -> PlainStep | None:
        """A plain step after these tokens, at the machine's mean speed during the run.

        It is timed once more where no step of a method could be as fast as `own_step_s`.

        Args:
            token_ids: up to the middle of the run's answer: steps grow with the context, and the
                last one would be slower than the mean that it is compared with.
        """
        step = self._after(token_ids)
        if step and doubt_of(step.evidence(own_step_s)) == "cheap step":
            step = self._after(token_ids)
        return step

    def _after(self, token_ids: Sequence[int]) -> PlainStep | None:
        """Example: 5 ms before the run and 6 ms after it make 5.5 ms.

        Where the text is long, its step is timed by itself, and taken for 5.5 / 6 of that.
        """
        before, again = self._before, self._time(self._brief, AFTER_S)
        if before is None or again is None:
            return self.before
        drift = again.split.total_s / before.split.total_s
        is_brief = bucket_of(len(token_ids)) == self._bucket
        there = again if is_brief else self._time(list(token_ids)[-MOST_CONTEXT:], AFTER_S)
        noise = max(before.noise, again.noise)
        disagreement = self._recent.disagreement(self._context.target, self._bucket, again)
        self._recent.add(self._context.target, self._bucket, again)
        step = (there or again).step((1 + 1 / drift) / 2, drift, noise)
        return replace(step, disagreement=disagreement)

    @property
    def _bucket(self) -> int:
        return bucket_of(len(self._brief) + NUM_STEPS)

    def _time(self, token_ids: Sequence[int], most_s: float) -> _Timing | None:
        """None where it was stopped, or the context is full."""
        from engine.decode import decode
        from engine.drafters.autoregressive import AutoregressiveConfig

        target = self._context.target
        ids = token_ids[max(0, len(token_ids) + NUM_STEPS + 1 - target.context_len) :]
        limits = Limits(max_new_tokens=NUM_STEPS + 1, ignore_eos=True)
        tally, began_s = Tally(), time.monotonic()

        def enough() -> bool:
            late = time.monotonic() - began_s > most_s
            return self._cancelled() or (late and len(tally.step_s) >= LEAST_TIMED)

        drafter = AutoregressiveConfig().build(self._context)
        for record in decode(target, drafter, ids, limits=limits, cancelled=enough):
            tally.add(record)
        steps = tally.by_size.get(0, [])[NUM_WARM:]
        return _Timing.of(steps) if len(steps) > 1 and not self._cancelled() else None


@dataclass(frozen=True, slots=True)
class _Timing:
    """One timing: the mean of the undisturbed steps, the quartiles of all."""

    split: TimeSplit
    noise: float

    @classmethod
    def of(cls, steps: Sequence[TimeSplit]) -> _Timing:
        times = [step.total_s for step in steps]
        noise = percentile(times, 75) / percentile(times, 25)
        return cls(TimeSplit.mean(undisturbed({0: steps})), noise)

    def step(self, scale: float, drift: float | None, noise: float = 1.0) -> PlainStep:
        other_s = self.split.total_s - self.split.verify_s
        times = scale * self.split.verify_s, scale * other_s
        return PlainStep(*times, "around", drift=drift, noise=noise)


class Recent:
    """The last timings after runs: target, context, and when they ended."""

    def __init__(self) -> None:
        self._timings: deque[tuple[weakref.ref[Target], int, _Timing, float]] = deque(
            maxlen=NUM_RECENT
        )

    def add(self, target: Target, bucket: int, timing: _Timing) -> None:
        self._timings.append((weakref.ref(target), bucket, timing, time.monotonic()))

    def timing_for(self, target: Target, bucket: int) -> _Timing | None:
        """The last one, if it is of this target and context and still recent."""
        if not self._timings:
            return None
        ref, at, timing, ended_s = self._timings[-1]
        same = ref() is target and at == bucket
        return timing if same and time.monotonic() - ended_s < RECENT_S else None

    def disagreement(self, target: Target, bucket: int, timing: _Timing) -> float:
        """A timing over the median of those of this target, at this context."""
        same = [
            past.split.total_s
            for ref, at, past, _ in self._timings
            if ref() is target and at == bucket
        ]
        return timing.split.total_s / statistics.median(same) if same else 1.0


def plain_step_of(log: RunLog, run: RunDetail) -> PlainStep | None:
    """The baseline of a stored run: its own, or a run of plain decoding on the same prompt."""
    if "plain" in run.metrics:
        return stored_plain_step(run.metrics)
    query = RunQuery(
        prompt_id=run.prompt_id,
        target=run.target,
        decoding_type=PLAIN,
        dtype=run.dtype,
        device=run.device,
        benchmark_id=run.benchmark_id,
        experiment=run.experiment,
        status="completed",
        limit=1,
    )
    newest = next(iter(log.rows(query)), None)
    detail = None if newest is None else log.get(newest.id)
    places = [one and [one.environment.get(name) for name in SAME_PLACE] for one in (run, detail)]
    if detail is None or places[0] != places[1]:
        return None
    parts = step_parts(detail.metrics) if detail.num_steps >= LEAST_STEPS else None
    if parts is None:
        return None
    drift = 1.0 if run.experiment else None
    return PlainStep(parts.verify, parts.draft + parts.other, "run", detail.id, drift)


def stored_plain_step(metrics: Mapping[str, Any]) -> PlainStep | None:
    """The baseline stored with a run; None where there is none, or an invalid one."""
    try:
        step = TypeAdapter(PlainStep).validate_python(metrics.get("plain"))
    except ValidationError:
        return None
    return step if step.verify_s > 0 and step.other_s >= 0 else None


def step_parts(metrics: Mapping[str, Any]) -> StepParts | None:
    """Seconds of a run's mean step until the next, so that its tokens over them are its tok/s."""
    figures = stored_figures(metrics)
    split, steps = figures.get("time_split"), figures.get("num_steps")
    if not (split and steps and figures["decode_s"]):
        return None
    draft_s, verify_s, _ = TimeSplit(**split).parts
    return StepParts(draft_s, verify_s, figures["decode_s"] / steps - draft_s - verify_s)
