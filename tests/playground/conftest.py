"""A host over a tiny random target and a run log in a temporary file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from playground.host.catalog import Catalog
from playground.host.runner import EngineHost
from playground.runs.reading import History
from storage import RunLog
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import save_tiny_llama, tiny_catalog


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    with RunLog.open(str(tmp_path / "runs.db")) as log:
        yield log


@pytest.fixture
def catalog(tiny_folder: Path) -> Catalog:
    """What the host offers."""
    return tiny_catalog(tiny_folder)


@pytest.fixture
def host(catalog: Catalog, tmp_path: Path, log: RunLog) -> Iterator[EngineHost]:
    host = EngineHost(log, catalog, cache_dir=tmp_path / "cache", device="cpu")
    yield host
    host.close()


@pytest.fixture
def history(host: EngineHost) -> History:
    return History(host.runs, host.log)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The program over the tiny target."""
    with serving_tiny(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """A program without a token, on loopback."""
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
