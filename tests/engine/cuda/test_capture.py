"""A tape keeps what a CUDA graph keeps: addresses, and whatever Python decided."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.kernels.cuda.graphs import CaptureError
from tests.engine.cuda.tape import CAPTURERS, KINDS, Tape, device_of


@pytest.mark.parametrize("name", KINDS)
def test_a_replay_reads_inputs_anew_and_keeps_its_addresses(name: str) -> None:
    capturer, device = CAPTURERS[name](), device_of(name)
    x = torch.arange(4.0, device=device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        doubled = 2 * x
        view = doubled[1:]
        view.add_(1)
        return doubled, view.sum()

    graph = capturer.capture(run)
    doubled, total = graph.results
    address = doubled.data_ptr()
    for start in (0, 5):
        x.copy_(torch.arange(start, start + 4.0))
        graph.replay()
        expected = 2 * torch.arange(start, start + 4.0) + torch.tensor([0.0, 1, 1, 1])
        assert torch.equal(doubled.cpu(), expected)
        assert float(total) == float(expected[1:].sum())
    assert graph.results[0].data_ptr() == address


@pytest.mark.parametrize("name", KINDS)
def test_what_python_decided_stays_decided(name: str) -> None:
    capturer, device = CAPTURERS[name](), device_of(name)
    factor, x = [2.0], torch.ones(3, device=device)
    graph = capturer.capture(lambda: x * factor[0])
    factor[0] = 100.0
    graph.replay()
    assert graph.results.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", KINDS)
def test_reading_a_value_on_the_host_is_refused_and_later_captures_work(name: str) -> None:
    capturer, device = CAPTURERS[name](), device_of(name)
    x = torch.ones(3, device=device)
    with pytest.raises(CaptureError):
        capturer.capture(lambda: x * float(x.sum()))
    graph = capturer.capture(lambda: x * x.sum())
    graph.replay()
    assert graph.results.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_that_of_graphs_that_are_still_there(name: str) -> None:
    capturer = CAPTURERS[name]()
    x = torch.ones(1 << 20, device=device_of(name))
    graph = capturer.capture(lambda: (x * 2, x + 1))
    assert capturer.num_bytes >= 2 * 4 << 20
    del graph
    gc.collect()
    assert capturer.num_bytes == 0


def test_shapes_that_depend_on_values_are_refused() -> None:
    x = torch.ones(3)
    for inference in (False, True):
        for run in (x.nonzero, lambda: bool(x.sum() > 0), lambda: x[x > 0]):
            with torch.inference_mode(inference):
                with pytest.raises(CaptureError, match="reads values on the host"):
                    Tape().capture(run)
