"""What a step of plain decoding takes here: from a run of the log, or measured after a text.

Whether a method pays is a question about plain decoding, so every run carries the figure that it is
compared with. A recent run of the same target on the same device is best; where there is none, a
few tokens of plain decoding are timed once the text is there, and remembered for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.base import BuildContext
from engine.metrics import StepParts, measure
from engine.model.target import Target
from engine.tuning.latency import bucket_of
from storage import RunDetail, RunLog, RunQuery, RunSummary

PLAIN = AutoregressiveConfig().decoding_type
RECENT = timedelta(hours=1)
"""A machine is faster or slower on another day."""
LEAST_STEPS = 16
"""Steps of a run whose mean is a figure."""
NUM_TOKENS, MOST_S, MOST_CONTEXT = 32, 1.0, 1024
"""Bounds of a measurement. It takes a third step at least, however slow the target."""
SAME_PLACE = ("device_name", "threads", "weights", "revision", "dtype")
"""What two runs have in common, of their environments, if their clocks can be compared."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds of one step, the time until the next included: 1 / tok/s.

    Attributes:
        source: a run of the log, or a few tokens that were timed after a text.
        run_id: of that run.
    """

    verify_s: float
    other_s: float
    source: Literal["run", "measured"]
    run_id: str | None = None

    @property
    def parts(self) -> StepParts:
        return StepParts(0.0, self.verify_s, self.other_s)

    @property
    def tok_s(self) -> float:
        return 1 / (self.verify_s + self.other_s)


class PlainSteps:
    """Finds what a plain step takes, by target, device and context length."""

    def __init__(self, log: RunLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._measured: dict[tuple[str, ...], tuple[float, PlainStep]] = {}

    def known(self, target: Target, context_len: int) -> PlainStep | None:
        """Of a recent run, or measured a short while ago."""
        query = RunQuery(
            target=target.name,
            decoding_type=PLAIN,
            dtype=target.dtype_name,
            device=str(target.device),
            status="completed",
            limit=8,
        )
        now, place = datetime.now(UTC), target.environment()
        for run in self._log.find(query).rows:
            near = bucket_of(_context_len(run)) == bucket_of(max(1, context_len))
            if near and now - run.created_at < RECENT and (step := _of_run(run)):
                detail = self._log.get(run.id)
                if detail is not None and _is_same_place(detail.environment, place):
                    return step
        at_s, step = self._measured.get(_key(target, context_len), (0.0, None))
        return step if step and self._clock() - at_s < RECENT.total_seconds() else None

    def measured(
        self, bench: BuildContext, token_ids: Sequence[int], cancelled: Callable[[], bool]
    ) -> PlainStep | None:
        """Timed now, behind the end of a text; None where it was stopped."""
        target, ids = bench.target, list(token_ids)[-MOST_CONTEXT:]
        ids = ids[max(0, len(ids) + NUM_TOKENS - target.context_len) :]
        limits = Limits(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        records: list[Any] = []
        began_s = self._clock()

        def enough() -> bool:
            return cancelled() or (len(records) > 3 and self._clock() - began_s > MOST_S)

        drafter = AutoregressiveConfig().build(bench)
        for record in decode(target, drafter, ids, limits=limits, cancelled=enough):
            records.append(record)
        found = measure(records)
        if cancelled() or not found.tok_s or found.time_split is None:
            return None
        verify_s = found.time_split.verify_s
        step = PlainStep(verify_s, max(0.0, 1 / found.tok_s - verify_s), "measured")
        self._measured[_key(target, len(token_ids))] = self._clock(), step
        return step


def plain_step_of(log: RunLog, run: RunDetail) -> PlainStep | None:
    """What a stored run is compared with: as it was kept, or plain decoding on its very prompt."""
    if kept := run.metrics.get("plain"):
        return _kept(kept)
    query = RunQuery(
        prompt_id=run.prompt_id,
        target=run.target,
        decoding_type=PLAIN,
        dtype=run.dtype,
        device=run.device,
        benchmark_id=run.benchmark_id,
        status="completed",
        limit=1,
    )
    found = next(iter(log.find(query).rows), None)
    detail = None if found is None else log.get(found.id)
    if detail is None or not _is_same_place(detail.environment, run.environment):
        return None
    return _of_run(detail)


def _kept(values: Any) -> PlainStep | None:
    """As it was stored; a run of a file may have anything there."""
    try:
        step = TypeAdapter(PlainStep).validate_python(values)
    except ValidationError:
        return None
    return step if step.verify_s > 0 and step.other_s >= 0 else None


def _of_run(run: RunSummary) -> PlainStep | None:
    """None where the run is too short to say."""
    if run.num_steps < LEAST_STEPS or not run.tok_s or run.verify_s is None:
        return None
    other_s = max(0.0, 1 / run.tok_s - run.verify_s)
    return PlainStep(run.verify_s, other_s, "run", run.id)


def _context_len(run: RunSummary) -> int:
    return max(1, run.num_prompt_tokens + run.num_new_tokens // 2)


def _is_same_place(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in SAME_PLACE)


def _key(target: Target, context_len: int) -> tuple[str, ...]:
    bucket = bucket_of(max(1, context_len))
    return target.name, target.dtype_name, str(target.device), str(bucket)
