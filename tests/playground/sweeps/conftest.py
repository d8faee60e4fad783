"""A server whose catalogue has n-gram lookup."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.drafters.lookup.ngram import NGramConfig
from playground.host.catalog import Catalog
from tests.playground.tiny import offering, tiny_catalog


def ngram_catalog(folder: Path) -> Catalog:
    """Offers n-gram lookup besides the scripted drafter."""
    return offering(tiny_catalog(folder), ngram=NGramConfig())


@pytest.fixture
def catalog(tiny_folder: Path) -> Catalog:
    return ngram_catalog(tiny_folder)
