"""Stands in for CUDA graphs on the pretended device: every replay runs the function anew.

It must do what the recorded run did: the same operators with the same numbers and shapes, waiting
for nothing, with nothing from the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeVar

from engine.kernels.cuda.graphs import CaptureError, Graph
from tests.engine.device.pretend import PretendTensor, logged

T = TypeVar("T")


def _tensors(output: Any) -> list[PretendTensor]:
    values = (output.logits, output.hidden, output.layers)
    return [value for value in values if value is not None]


class Reruns:
    """Records by writing down what runs."""

    name = "runs that are compared"

    def capture(self, run: Callable[[], T]) -> Graph[T]:
        run()  # what is made once is made in the warm-up
        with logged() as log:
            results = run()
        if log.waits or log.uploads:
            raise CaptureError(f"it waits for the device: {(log.waits + log.uploads)[0]}")

        def replay() -> None:
            with logged() as again:
                new_results = run()
            pairs = zip_longest(again.operators, log.operators)
            assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
            assert not again.waits and not again.uploads
            for mine, new in zip(_tensors(results), _tensors(new_results), strict=True):
                mine.data_.copy_(new.data_)

        return Graph(replay, results)
