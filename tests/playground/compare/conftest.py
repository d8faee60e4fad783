"""A host over a tiny target that also offers a corrupted method; one for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from playground.host.runner import EngineHost
from playground.runs.reading import History
from storage import RunLog
from tests.playground.compare.corrupted import with_corrupted
from tests.playground.tiny import ScriptedDrafter, tiny_catalog

KNOWN = 30
"""Tokens that the scripted drafter need know: texts are short here."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    log = RunLog.open(str(tmp_path_factory.mktemp("compare") / "runs.db"))
    yield log
    log.close()


@pytest.fixture(scope="module")
def host(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, log: RunLog
) -> Iterator[EngineHost]:
    catalog = with_corrupted(tiny_catalog(tiny_folder))
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedDrafter, "KNOWN", KNOWN)
        host = EngineHost(log, catalog, cache_dir=cache, device="cpu")
        yield host
        host.close()


@pytest.fixture(scope="module")
def history(host: EngineHost) -> History:
    return History(host.runs, host.log)
