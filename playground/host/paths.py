"""Default locations of the playground's files."""

from __future__ import annotations

from pathlib import Path

import platformdirs

APP = "speculative-decoding-playground"


def cache_dir() -> Path:
    """Fetched weights, GGUF tokenizers, kernels, the controller's experience; safe to delete."""
    return platformdirs.user_cache_path(APP, appauthor=False)


def suites() -> Path:
    """Downloaded public prompt suites."""
    return platformdirs.user_data_path(APP, appauthor=False) / "suites"


def training() -> Path:
    """Trained drafters, and the texts that they were trained on."""
    return platformdirs.user_data_path(APP, appauthor=False) / "training"


def run_log() -> Path:
    return platformdirs.user_data_path(APP, appauthor=False) / "runs.sqlite3"
