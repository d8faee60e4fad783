from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.device.pretend import pretend_device


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The pretended accelerator."""
    with pretend_device() as device:
        yield device
