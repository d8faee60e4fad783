from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.device.pretend import pretend_device


@pytest.fixture(params=["pretend", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The pretended accelerator, and with --gpu a real one."""
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    with pretend_device() as device:
        yield device
