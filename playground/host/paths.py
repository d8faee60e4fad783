"""Where the playground keeps its files, unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import platformdirs

APP = "speculative-decoding-playground"


def cache_dir() -> Path:
    """Fetched and converted weights; safe to delete."""
    return platformdirs.user_cache_path(APP, appauthor=False)


def suites() -> Path:
    """Public sets of prompts that were fetched."""
    return platformdirs.user_data_path(APP, appauthor=False) / "suites"


def run_log() -> Path:
    return platformdirs.user_data_path(APP, appauthor=False) / "runs.sqlite3"
