"""Where sweeps are kept, opened for the first time by several processes at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from playground.experiments.sweep.store import close_storage, open_storage
from tests.playground.sweeps.killing import FORKS, WAIT_S

NUM_PROCESSES, NUM_FILES = 3, 8


def open_all(folder: Path, gate: object) -> None:
    """What each process does: open every file at the moment at which the others do."""
    for number in range(NUM_FILES):
        gate.wait(WAIT_S)  # type: ignore[attr-defined]
        close_storage(open_storage(sa.make_url(f"sqlite:///{folder / f'{number}.sqlite3'}")))


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_processes_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    gate = FORKS.Barrier(NUM_PROCESSES)
    processes = [
        FORKS.Process(target=open_all, args=(tmp_path, gate), daemon=True)
        for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
