"""The program over a tiny target, asked by other programs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from playground.web.door import Access
from storage import RunLog
from tests.playground.serving import TOKEN, Served, serving
from tests.playground.tiny import save_tiny_llama, tiny_catalog


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("api")
    catalog = tiny_catalog(save_tiny_llama(folder / "tiny"))
    with (
        RunLog.open(str(folder / "runs.db")) as log,
        serving(catalog, log, folder / "cache", Access(token=TOKEN)) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """A program without a token, on loopback."""
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
