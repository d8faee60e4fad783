"""Sweeps in memory, and a server whose catalogue has n-gram lookup."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from playground.experiments.sweep.report import SweepStore
from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from presets import MethodPreset
from storage import RunLog
from tests.playground.tiny import tiny_catalog


@pytest.fixture
def store() -> Iterator[SweepStore]:
    with RunLog.open() as log:
        yield SweepStore(log)


def ngram_catalog(folder: Path) -> Catalog:
    """Offers n-gram lookup besides the scripted drafter."""
    tiny = tiny_catalog(folder)
    ngram = MethodPreset(name="ngram", title="N-gram", config=NGramConfig())
    return dataclasses.replace(
        tiny,
        presets={**tiny.presets, "ngram": ngram},
        types={**tiny.types, "NGram": NGramConfig},
    )


@pytest.fixture
def host(tiny_folder: Path, tmp_path: Path, log: RunLog) -> Iterator[EngineHost]:
    catalog = ngram_catalog(tiny_folder)
    host = EngineHost(log, catalog, cache_dir=tmp_path / "cache", device="cpu")
    yield host
    host.close()
