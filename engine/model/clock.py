"""The engine's clock, timestamps of a device, and the phases of a step between them.

On CUDA a timestamp is when all work launched so far has finished: an event is recorded now and read
after the step's own synchronisation, so that timing adds none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Stopped(threading.local):
    total_s = 0.0


_stopped = _Stopped()


def time_s() -> float:
    """Seconds from any origin; differences count what steps take, on this thread."""
    return time.perf_counter() - _stopped.total_s


@contextmanager
def clock_stopped(device: torch.device) -> Iterator[None]:
    """Stop this thread's clock for what is done once and is part of no step."""
    synchronize(device)
    began_s = time.perf_counter()
    try:
        yield
    finally:
        _stopped.total_s += time.perf_counter() - began_s


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Timestamp = tuple[float | torch.cuda.Event, float]
"""The host's time, or an event of CUDA and how long the clock had stood still before it."""
Span = tuple[Timestamp, Timestamp]


def now(device: torch.device) -> Timestamp:
    if device.type != "cuda":
        return time_s(), 0.0
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event, _stopped.total_s


def seconds(span: Span) -> float:
    """Seconds between two timestamps of one device; waits for the second."""
    (begin, stopped_s), (end, end_stopped_s) = span
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 - (end_stopped_s - stopped_s)


class PhaseClock:
    """Splits a step's time into phases; on CUDA a phase ends when its kernels finish."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began_s = device, time_s()
        self._marks = [now(device)]

    def mark(self) -> None:
        """End a phase; the first began when the clock was made."""
        self._marks.append(now(self._device))

    def phases_s(self) -> tuple[float, ...]:
        """Seconds of each phase, then of the whole step until now."""
        phases = [seconds(span) for span in zip(self._marks, self._marks[1:], strict=False)]
        return (*phases, time_s() - self._began_s)
