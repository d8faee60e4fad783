"""What the campaigns have to say, at the end of the tests."""

from __future__ import annotations

import pytest

from tests.hostile.campaign import REPORTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in REPORTS:
        terminalreporter.write_line(line)
