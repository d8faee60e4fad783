"""Splits a step's time into phases, on the CPU's clock or by CUDA events."""

from __future__ import annotations

import time

import torch


class PhaseClock:
    """Marks the phases of one step after another.

    On CUDA a phase ends when its kernels end: events are recorded at the marks and read after the
    step's own synchronisation, so measuring adds none.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Start a step."""
        self._marks.clear()
        self._events.clear()
        self.mark()

    def mark(self) -> None:
        """End of a phase."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._marks.append(time.perf_counter())

    def phases_s(self) -> tuple[list[float], float]:
        """Seconds of every phase so far, and from the first mark until now."""
        total = time.perf_counter() - self._marks[0]
        if not self._cuda:
            pairs = zip(self._marks, self._marks[1:], strict=False)
            return [end - begin for begin, end in pairs], total
        self._events[-1].synchronize()
        total = time.perf_counter() - self._marks[0]
        events = zip(self._events, self._events[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in events], total
