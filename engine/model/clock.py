"""Timestamps of a device, and the phases of a step between them.

On CUDA a timestamp is when all work launched so far has finished: an event is recorded now and read
after the step's own synchronisation, so that timing adds none.
"""

from __future__ import annotations

import time

import torch

Timestamp = float | torch.cuda.Event
Span = tuple[Timestamp, Timestamp]


def now(device: torch.device) -> Timestamp:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(span: Span) -> float:
    """Seconds between two timestamps of one device; waits for the second."""
    begin, end = span
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class PhaseClock:
    """Splits a step's time into phases; on CUDA a phase ends when its kernels finish."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began_s = device, time.perf_counter()
        self._marks = [now(device)]

    def mark(self) -> None:
        """End a phase; the first began when the clock was made."""
        self._marks.append(now(self._device))

    def phases_s(self) -> tuple[float, ...]:
        """Seconds of each phase, then of the whole step until now."""
        phases = [seconds(span) for span in zip(self._marks, self._marks[1:], strict=False)]
        return (*phases, time.perf_counter() - self._began_s)
