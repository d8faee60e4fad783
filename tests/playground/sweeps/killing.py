"""Runs a sweep in another process, for tests that kill it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from playground.experiments.sweep.run import run_sweep
from playground.experiments.sweep.trials import key_of
from tests.playground.sweeps.scripted import Scripted, open_store

WAIT_S = 60.0
FORKS = multiprocessing.get_context("fork")
"""A new interpreter would import torch first; the fork needs nothing that other threads hold."""


class Hanging(Scripted):
    """Measures some trials, then says so and hangs in the middle of the next.

    By then the log has `num_answered` requests of that one.
    """

    def __init__(self, num_whole: int, sign: Path, num_answered: int) -> None:
        super().__init__()
        self._num_whole = num_whole
        self._sign = sign
        self._num_answered = num_answered

    def __call__(self, config: Any, run_group: str, trial: Any) -> Any:
        if len(self.configs) == self._num_whole:
            trial.answered(self._num_answered)
            self._sign.write_text(key_of({"max_draft_len": config.max_draft_len}))
            time.sleep(WAIT_S)
        return super().__call__(config, run_group, trial)


def run_and_hang(folder: Path, name: str, num_whole: int, sign: Path, num_answered: int) -> None:
    """What the other process does."""
    _, store = open_store(folder)
    run_sweep(store.load(name), Hanging(num_whole, sign, num_answered))


def start_until_it_hangs(
    folder: Path, name: str, num_whole: int, num_answered: int = 0
) -> tuple[BaseProcess, str]:
    """The process, and the point in which it hangs after so many whole trials."""
    sign = folder / "sign"
    sign.unlink(missing_ok=True)
    asked = (folder, name, num_whole, sign, num_answered)
    process = FORKS.Process(target=run_and_hang, args=asked, daemon=True)
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


def run_until_killed(folder: Path, name: str, num_whole: int, num_answered: int = 0) -> str:
    """Run a sweep in another process and kill it in a trial; returns that trial's point."""
    process, point = start_until_it_hangs(folder, name, num_whole, num_answered)
    kill(process)
    return point
