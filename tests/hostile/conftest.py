"""What the campaigns have to say, at the end of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.campaign import REPORTS
from tests.playground.serving import Served, serving_tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The program over a tiny target."""
    with serving_tiny(tmp_path_factory.mktemp("served")) as served:
        yield served


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in REPORTS:
        terminalreporter.write_line(line)
