"""The target of every killed action."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that writes about a thousand tokens a second."""
    return save_tiny(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=2,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
