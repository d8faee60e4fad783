"""Devices that are not `cuda:0`: another card, a card without bfloat16, one that is not CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model import clock
from engine.model.plan import pick_dtype

CARDS = {0: (8, 6), 1: (7, 5)}
"""Compute capability of two cards, the first of which is the current one."""


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cuda:0", torch.bfloat16), ("cuda:1", torch.float16), ("mps", torch.float16)],
)
def test_bfloat16_that_is_only_emulated_is_not_chosen(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capability(device: torch.device | None = None) -> tuple[int, int]:
        return CARDS[0 if device is None else device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    assert pick_dtype("auto", torch.device(device)) == dtype


def test_timestamps_are_recorded_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.stream = "the current card's"

        def record(self, stream: str = "the current card's") -> None:
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    event: Any = clock.now(torch.device("cuda", 1))[0]
    assert event.stream == "that of cuda:1"
