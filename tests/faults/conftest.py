"""What the campaign of kills counts, and its summary line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models import save_tiny

KILLS = {
    "page": (1, 20),
    "generate": (2, 25),
    "bench": (2, 20),
    "sweep": (1, 15),
    "train": (2, 20),
    "ray": (2, 10),
}
"""Kills of each action, in the short campaign and in the long one."""


@dataclass
class Tally:
    """What kills cost, over all actions."""

    killed: int = 0
    unlogged: int = 0
    wrongly_marked: int = 0
    resumed: int = 0
    equal: int = 0

    def end(self, num_kills: int, *, equal: bool) -> None:
        """An action that was killed so often is done; whether as without the kills."""
        self.killed += num_kills
        self.resumed += num_kills
        self.equal += num_kills * equal

    @property
    def line(self) -> str:
        return (
            f"killed {self.killed}, tokens shown but not logged {self.unlogged}, runs wrongly "
            f"marked {self.wrongly_marked}, resumed equal {self.equal} of {self.resumed}"
        )


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[TALLY].killed:
        terminalreporter.write_line(config.stash[TALLY].line)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[TALLY]


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> dict[str, int]:
    """How often each action is killed."""
    long = bool(request.config.getoption("--faults-long"))
    return {action: counts[long] for action, counts in KILLS.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that writes about a thousand tokens a second."""
    return save_tiny(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=2,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
