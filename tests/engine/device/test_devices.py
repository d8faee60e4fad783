"""Drafters whose model is on another device than the target's; no accelerator is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu.compile import NoKernels, library
from tests.models import VOCAB


@pytest.mark.slow
def test_listed_tokens_are_drafted_by_a_model_on_another_device(tmp_path: Path) -> None:
    """By the compiled kernels, token by token, and sampled."""
    try:
        library(tmp_path / "kernels")
    except NoKernels as error:
        pytest.skip(f"no compiled kernels here: {error}")
    (tmp_path / "draft_vocab.json").write_text(json.dumps([*range(VOCAB)][::-1][:200]))
    command = [sys.executable, "-m", "tests.engine.device.draft_vocab", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["16", "16", "16"]
