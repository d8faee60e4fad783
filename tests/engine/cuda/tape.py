"""Stands in for CUDA graphs on the processor and on the pretended device.

No faster than running the function again. It keeps what a CUDA graph keeps: fixed addresses, fixed
Python values, no reading of values on the host; so everything around the capture is the same. On
the pretended device it also takes nothing from the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.kernels.cuda.graphs import CaptureError, CudaGraphs, Graph
from tests.engine.device.pretend import PretendTensor, logged

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator: `fresh` are the outputs that it does not share with an input."""

    run: Callable[[], Any]
    fresh: tuple[tuple[int, Tensor], ...]


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
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
    x = x.data_ if isinstance(x, PretendTensor) else x
    return x.untyped_storage().data_ptr() or id(x)


class Tape(CudaGraphs):
    """Captures operators one by one and replays them on the same memory, on any device."""

    name = "a tape of operators"

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    @staticmethod
    def run_on(device: torch.device) -> bool:
        return True

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        run()  # what is made once is made in the warm-up
        operators = _Operators()
        with logged() as log, operators:
            results = run()
        if log.waits or log.uploads:
            raise CaptureError(f"it waits for the device: {(log.waits + log.uploads)[0]}")

        def replay() -> None:
            for call in operators.calls:
                out = tree_leaves(call.run())
                for i, held in call.fresh:
                    held.copy_(out[i])

        return Graph(replay, results)
