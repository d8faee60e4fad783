"""Captures what a function launches as a CUDA graph, to launch it again as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
WARM_UPS = 2
"""Runs before a capture: libraries set themselves up in the first, which a graph cannot hold."""


class CaptureError(Exception):
    """What a function does cannot be captured."""


class Graph(Protocol[T_co]):
    """A function that can be launched again as a whole."""

    @property
    def results(self) -> T_co:
        """What it returned: tensors that every replay fills anew.

        Other graphs may write to the same memory: copy what must outlast their replays.
        """

    def replay(self) -> None:
        """Launch it."""


class Capturer(Protocol):
    """Makes graphs: on a device `CudaGraphs`; tests have one that runs on any."""

    name: str

    @property
    def num_bytes(self) -> int:
        """Memory that graphs hold beside their inputs."""

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        """Capture a function; its results are valid after the first replay.

        Args:
            run: reads tensors at fixed addresses. Whatever Python decides in it stays decided, and
                it runs before it is replayed, so that it must be idempotent.

        Raises CaptureError: it waits for the device, or does anything else that cannot be captured.
        """


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _CudaGraph(Generic[T]):
    graph: Any
    results: T

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    name = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[Any] | None = None
        self._sizes: list[tuple[weakref.ref[Any], int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(size for graph, size in self._sizes if graph() is not None)

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                return self._capture(run)
            except RuntimeError as error:
                # A capture that fails at its end leaves its stream the current one.
                torch.cuda.set_stream(current)
                self._last = None
                torch.cuda.synchronize(self._device)
                raise CaptureError(_cause(error)) from error

    def _capture(self, run: Callable[[], T]) -> Graph[T]:
        # One stream for all: cuBLAS keeps a workspace per stream, made in the first warm-up.
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool(), stream=stream, capture_error_mode="thread_local"
        ):
            results = run()
        captured = _CudaGraph(graph, results)
        self._last = weakref.ref(captured)
        self._sizes = [(ref, size) for ref, size in self._sizes if ref() is not None]
        grown = torch.cuda.memory_reserved(self._device) - before
        self._sizes.append((self._last, max(0, grown)))
        return captured

    def _pool(self) -> Any:
        """The pool of a graph that is still there; a pool dies with its last graph."""
        last = None if self._last is None else self._last()
        return None if last is None else last.graph.pool()


def _cause(error: BaseException) -> str:
    """First line of what went wrong first; ending the capture fails only because of it."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
