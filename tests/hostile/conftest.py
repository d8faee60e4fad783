"""The program over a tiny target, a log, and what the campaigns have to say at the end."""

from __future__ import annotations

import pytest

from tests.hostile.campaign import REPORTS
from tests.playground.conftest import log as log
from tests.playground.conftest import served as served


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in REPORTS:
        terminalreporter.write_line(line)
