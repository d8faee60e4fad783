"""Captures the kernels that a function launches as a CUDA graph, and replays them as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from engine.errors import first_line

T = TypeVar("T")
WARM_UPS = 2
"""Runs before a capture: libraries initialise in the first, which cannot be captured."""


class CaptureError(Exception):
    """A function cannot be captured."""


@dataclass(frozen=True, eq=False)
class Graph(Generic[T]):
    """A captured function, launched as a whole by `replay`.

    Attributes:
        results: what it returned: tensors that every replay overwrites. Other graphs may write to
            the same memory: copy what must outlast their replays.
    """

    replay: Callable[[], None]
    results: T


class CudaGraphs:
    """Captures graphs on a device; tests have a stand-in that runs on any."""

    name = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        """Which all graphs share; it dies with the last of them."""
        self._alive: weakref.WeakSet[Graph[Any]] = weakref.WeakSet()

    @staticmethod
    def run_on(device: torch.device) -> bool:
        """Whether a device has graphs; ROCm's is called `cuda`, too."""
        return device.type == "cuda"

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Capture a function; its results are valid after the first replay.

        Args:
            run: reads tensors at fixed addresses. Its Python control flow is fixed on capture, and
                it runs before it is replayed, so it must be idempotent.

        Raises CaptureError: it waits for the device, or does something else that is not capturable.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                return self._capture(run)
            except RuntimeError as error:
                # A capture that fails at its end leaves its stream the current one.
                torch.cuda.set_stream(current)
                self._pool = None
                torch.cuda.synchronize(self._device)
                raise CaptureError(_cause(error)) from error

    def _capture(self, run: Callable[[], T]) -> Graph[T]:
        # One stream for all: cuBLAS keeps a workspace per stream, allocated in the first warm-up.
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        pool = self._pool if self._alive else None
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = run()
        captured, self._pool = Graph(graph.replay, results), graph.pool()
        self._alive.add(captured)
        return captured


def _cause(error: BaseException) -> str:
    """First line of the original error; ending the capture fails only because of it."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)
