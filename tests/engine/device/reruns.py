"""Stands in for CUDA graphs on the pretended device: every replay runs the function anew.

It must do what the recorded run did: the same operators with the same numbers and shapes, waiting
for nothing, with nothing from the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from engine.kernels.cuda.graphs import CaptureError, Graph
from tests.engine.device.pretend import Log, PretendTensor, logged

T = TypeVar("T")


@dataclass(frozen=True)
class _Rerun(Generic[T]):
    run: Callable[[], T]
    results: T
    recorded: Log

    def replay(self) -> None:
        with logged() as log:
            results = self.run()
        pairs = zip_longest(log.operators, self.recorded.operators)
        assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
        assert not log.waits and not log.uploads
        for mine, new in zip(_tensors(self.results), _tensors(results), strict=True):
            mine.data_.copy_(new.data_)


def _tensors(output: Any) -> list[PretendTensor]:
    values = (output.logits, output.hidden, output.layers)
    return [value for value in values if value is not None]


class Reruns:
    """Records by writing down what runs."""

    name = "runs that are compared"
    num_bytes = 0

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        run()  # what is made once is made in the warm-up
        with logged() as log:
            results = run()
        if log.waits or log.uploads:
            raise CaptureError(f"it waits for the device: {(log.waits + log.uploads)[0]}")
        return _Rerun(run, results, log)
