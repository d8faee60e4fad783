"""Records what a function launches, to launch it again as a whole: CUDA graphs, or a tape.

A recorded function takes nothing, reads tensors at fixed addresses and leaves its results at fixed
addresses; whatever Python decided while it was recorded stays decided. It must be idempotent,
because recording runs it before it is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
WARM_UPS = 2
"""Runs before a capture: libraries set themselves up in the first, which a graph cannot hold."""


class CaptureError(Exception):
    """What a function does cannot be recorded."""


class Recording(Protocol[T_co]):
    """A function that can be launched again as a whole."""

    @property
    def results(self) -> T_co:
        """What it returned: tensors that every replay fills anew.

        Other recordings may write to the same memory: copy what must outlast their replays.
        """

    def replay(self) -> None:
        """Launch it."""


class Recorder(Protocol):
    """Makes recordings."""

    name: str

    @property
    def num_bytes(self) -> int:
        """Memory that recordings hold beside their inputs."""

    def record(self, run: Callable[[], T]) -> Recording[T]:
        """Record a function; its results are valid after the first replay.

        Raises:
            CaptureError: it waits for the device, or does anything else that cannot be recorded.
        """


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Graph(Generic[T]):
    graph: Any
    results: T

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """Records as CUDA graphs, which share one pool of memory."""

    name = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[Any] | None = None
        self._sizes: list[tuple[weakref.ref[Any], int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(size for graph, size in self._sizes if graph() is not None)

    def record(self, run: Callable[[], T]) -> Recording[T]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                return self._record(run)
            except RuntimeError as error:
                # A capture that fails at its end leaves its stream the current one.
                torch.cuda.set_stream(current)
                self._last = None
                torch.cuda.synchronize(self._device)
                raise CaptureError(_cause(error)) from error

    def _record(self, run: Callable[[], T]) -> Recording[T]:
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
        recording = _Graph(graph, results)
        self._last = weakref.ref(recording)
        self._sizes = [(ref, size) for ref, size in self._sizes if ref() is not None]
        grown = torch.cuda.memory_reserved(self._device) - before
        self._sizes.append((self._last, max(0, grown)))
        return recording

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


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator: `fresh` are the outputs that it does not share with an input."""

    run: Callable[[], Any]
    fresh: tuple[tuple[int, Tensor], ...]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        numbers = any(isinstance(x, bool | int | float) for x in tree_leaves(out))
        if numbers or torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureError(f"{func} reads values on the host")
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = [(i, x) for i, x in enumerate(tree_leaves(out)) if isinstance(x, Tensor)]
        fresh = tuple((i, x) for i, x in outputs if _storage(x) not in inputs)
        if fresh or func._schema.is_mutable:
            self.calls.append(_Call(lambda: func(*args, **kwargs), fresh))
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() or id(x)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Tape(Generic[T]):
    calls: tuple[_Call, ...]
    results: T

    @property
    def num_bytes(self) -> int:
        held = {_storage(x): x for call in self.calls for _, x in call.fresh}
        return sum(x.untyped_storage().nbytes() for x in held.values())

    def replay(self) -> None:
        for call in self.calls:
            out = tree_leaves(call.run())
            for i, held in call.fresh:
                held.copy_(out[i])


class Tape:
    """Records operators one by one and replays them on the same memory, on any device.

    No faster than running the function again. It keeps what a CUDA graph keeps: fixed addresses,
    fixed Python values, no reading of values on the host; so everything around the capture is
    the same and can run where there is no CUDA.
    """

    name = "a tape of operators"

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(tape.num_bytes for tape in self._tapes)

    def record(self, run: Callable[[], T]) -> Recording[T]:
        watch = _Watch()
        with watch:
            results = run()
        tape = _Tape(tuple(watch.calls), results)
        self._tapes.add(tape)
        return tape
