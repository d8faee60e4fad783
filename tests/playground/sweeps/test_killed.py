"""A process that is killed in a trial loses nothing: the trial is continued."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.experiments.sweep.trials import key_of
from tests.playground.sweeps.scripted import Scripted, open_store, resumed, state_of, swept

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
WAIT_S = 60.0
FORKS = multiprocessing.get_context("fork")
"""A new interpreter would import torch first; the fork needs nothing that other threads hold."""


class Hanging(Scripted):
    """Measures some trials, then says so and hangs in the middle of the next."""

    def __init__(self, num_whole: int, sign: Path) -> None:
        super().__init__()
        self._num_whole, self._sign = num_whole, sign

    def __call__(self, trial: Any) -> Any:
        if len(self.configs) == self._num_whole:
            self._sign.write_text(key_of(trial.point))
            time.sleep(WAIT_S)
        return super().__call__(trial)


def run_and_hang(folder: Path, num_whole: int, sign: Path, begun: Any) -> None:
    """What the other process does: begin a sweep, or go on with it."""
    with open_store(folder) as store:
        measure = Hanging(num_whole, sign)
        if begun is None:
            resumed(store, "s", measure)
        else:
            vary, changes = begun
            swept(store, *vary, measure=measure, name="s", **changes)


def start_until_it_hangs(
    folder: Path, num_whole: int, *vary: str, **changes: Any
) -> tuple[BaseProcess, str]:
    """The process, and the point in which it hangs after so many whole trials."""
    sign = folder / "sign"
    sign.unlink(missing_ok=True)
    process = FORKS.Process(
        target=run_and_hang,
        args=(folder, num_whole, sign, (vary, changes) if vary else None),
        daemon=True,
    )
    process.start()
    end = time.monotonic() + WAIT_S
    while not (sign.exists() and sign.read_text()):
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)
    return process, sign.read_text()


def kill(process: BaseProcess) -> None:
    """No chance to clean up."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def run_until_killed(folder: Path, num_whole: int, *vary: str, **changes: Any) -> str:
    """Run a sweep in another process and kill it in a trial; returns that trial's point."""
    process, point = start_until_it_hangs(folder, num_whole, *vary, **changes)
    kill(process)
    return point


@pytest.mark.parametrize("mode", ["search", "grid"])
def test_resume_after_kills_does_exactly_what_was_planned(tmp_path: Path, mode: str) -> None:
    run_until_killed(tmp_path, 1, "max_draft_len=1:6", trials=6, mode=mode)
    interrupted = run_until_killed(tmp_path, 1)
    with open_store(tmp_path) as store:
        sweep, measure = store.load("s"), Scripted()
        assert sweep.row.status == "interrupted"
        assert [t.outcome for t in sweep.trials] == ["measured", "measured", "running"]
        assert [row["outcome"] for row in state_of(sweep)["trials"]][-1] == "interrupted"
        done = resumed(store, "s", measure)
    tried = [key_of({"max_draft_len": c.max_draft_len}) for c in measure.configs]
    assert tried[0] == interrupted and len(tried) == len(set(tried)) == 4
    assert done.row.status == "completed"
    assert [t.outcome for t in done.trials] == ["measured"] * 6
    assert [t.number for t in done.trials] == [1, 2, 3, 4, 5, 6]
    assert sorted(int(t.point["max_draft_len"] or 0) for t in done.trials) == [1, 2, 3, 4, 5, 6]


def test_two_processes_never_run_one_sweep(tmp_path: Path) -> None:
    process, _ = start_until_it_hangs(tmp_path, 1, "max_draft_len=1:4", mode="grid")
    with open_store(tmp_path) as store:
        assert [head.status for head in store.heads()] == ["running"]
        with pytest.raises(ConfigError, match="running already"):
            resumed(store, "s")
    kill(process)
    with open_store(tmp_path) as store:
        assert resumed(store, "s").row.status == "completed"
