"""Moments of a device, and the phases of a step between them.

On CUDA a moment is when everything given to the device so far is done: an event is recorded now and
read later, behind the step's own synchronisation, so that measuring adds none.
"""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event
Span = tuple[Moment, Moment]


def now(device: torch.device) -> Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(span: Span) -> float:
    """Between two moments of one device; waits for the second."""
    begin, end = span
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class PhaseClock:
    """Splits one step's time into phases; on CUDA a phase ends when its kernels end."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began_s = device, time.perf_counter()
        self._marks = [now(device)]

    def mark(self) -> None:
        """The end of a phase; the first began with the clock."""
        self._marks.append(now(self._device))

    def phases_s(self) -> tuple[float, ...]:
        """Seconds of every phase, then of the whole until now."""
        phases = [seconds(span) for span in zip(self._marks, self._marks[1:], strict=False)]
        return (*phases, time.perf_counter() - self._began_s)
