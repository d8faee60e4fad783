"""Both ways to record; real graphs where the switch `--gpu` says that there is a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.kernels.cuda.recorder import CudaGraphs, Recorder, Tape

RECORDERS: dict[str, Callable[[], Recorder]] = {
    "tape": Tape,
    "graphs": lambda: CudaGraphs(torch.device("cuda")),
}
KINDS = ["tape", pytest.param("graphs", marks=pytest.mark.gpu)]


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if name == "graphs" else "cpu")
