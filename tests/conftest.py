"""Switches for the tests that need time, a network, a browser or a GPU."""

from __future__ import annotations

import gc
import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
# Test processes with full thread pools on the same cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from engine.tuning.controller import build_drafter
from tests import blocking
from tests import postgres as postgresql
from tests.compiling import compiled_once as compiled_once
from tests.drafting import MODULES, draft_as_set

blocking.install()
SWITCHES = ("slow", "network", "browser", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    for switch in SWITCHES:
        parser.addoption(f"--{switch}", action="store_true", help=f"run the tests marked {switch}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for switch in SWITCHES:
        if config.getoption(f"--{switch}"):
            continue
        skip = pytest.mark.skip(reason=f"marked {switch}; run with --{switch}")
        for item in items:
            if switch in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exempt imports and tests from garbage collection: every loaded model asks for a whole one.

    Looking through them takes 0.2 s each time, and hundreds of tests load models.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def event_loops_are_never_blocked() -> Iterator[None]:
    """Nothing of ours waits for a database, a file or a clock where requests are answered."""
    with blocking.none_noted():
        yield


@pytest.fixture(scope="session", autouse=True)
def drafts_as_set() -> Iterator[None]:
    """Everywhere but in tests of the controller."""
    with pytest.MonkeyPatch.context() as patch:
        draft_as_set(patch)
        yield


@pytest.fixture
def auto_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting decides for itself here, as it does by default."""
    for module in MODULES:
        monkeypatch.setattr(f"playground.{module}.build_drafter", build_drafter)


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgresql.Server]:
    """A server for all tests; its database `empty_log` is there to be copied."""
    if reason := postgresql.missing():
        pytest.skip(reason)
    with postgresql.server() as server:
        server.make_template("empty_log")
        yield server
