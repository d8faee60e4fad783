"""How often each action is killed, and the target of them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import save_tiny

KILLS = {
    "page": (1, 20),
    "generate": (2, 25),
    "bench": (2, 20),
    "sweep": (1, 15),
    "train": (2, 20),
    "ray": (2, 10),
}
"""Kills of each action, in the short campaign and in the long one."""


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> dict[str, int]:
    """How often each action is killed."""
    long = bool(request.config.getoption("--faults-long"))
    return {action: counts[long] for action, counts in KILLS.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that writes about a thousand tokens a second."""
    return save_tiny(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=2,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
