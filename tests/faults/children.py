"""Processes that are killed: the command line and the page, forked from one that has all imports.

The module is imported by the fork server, so that a child begins its work within milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import optuna  # noqa: F401  imported here, so that no child has to
import pytest

import playground.cli.tables
import playground.experiments.sweep.search
import playground.web.shell  # noqa: F401
from engine.training import session, trainer  # noqa: F401
from playground.cli.main import run
from playground.host.models import Models
from playground.web.server import serve
from tests.drafting import draft_as_set
from tests.playground.serving import KNOWN
from tests.playground.tiny import tiny_catalog

WAIT_S = 900.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class Child:
    """A process at work; what it prints is in `shown` and `said`."""

    def __init__(self, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.shown, self.said = folder / "stdout", folder / "stderr"
        for file in (self.shown, self.said):
            file.write_bytes(b"")
        asked = (self.shown, self.said, work, arguments)
        self.process: ForkServerProcess = _FORKS.Process(target=_work, args=asked, daemon=True)
        self.began_s = time.monotonic()
        self.process.start()

    @property
    def text(self) -> str:
        """What it has printed on stdout."""
        return self.shown.read_bytes().decode(errors="ignore")

    @property
    def errors(self) -> str:
        return self.said.read_bytes().decode(errors="replace")

    def until(self, done: Callable[[], bool]) -> bool:
        """Wait; False if it ended before."""
        while not done():
            if not self.process.is_alive():
                return False
            assert time.monotonic() - self.began_s < WAIT_S, self.errors
            time.sleep(0.005)
        return True

    def kill(self) -> bool:
        """No chance to clean up; False if it had ended by itself."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def interrupt(self, wait_s: float = WAIT_S, number: int = signal.SIGINT) -> float:
        """Press Ctrl+C, or send another signal, and wait for the end; seconds that it took."""
        assert self.process.pid is not None
        began_s = time.monotonic()
        os.kill(self.process.pid, number)
        self.process.join(wait_s)
        return time.monotonic() - began_s

    def ended(self) -> int:
        """Its exit code."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, self.errors
        return self.process.exitcode


def _work(shown: Path, said: Path, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    for number, file in ((1, shown), (2, said)):
        os.dup2(os.open(file, os.O_WRONLY), number)
    work(*arguments)


def words(line: str, *values: object) -> tuple[object, ...]:
    """The arguments of a command line; each {} is one of the values, which may have spaces."""
    rest = iter(values)
    return tuple(next(rest) if word == "{}" else word for word in line.split())


def command(*arguments: object) -> None:
    """The command line."""
    trainer.SAVE_EVERY_S = 0.05
    sys.argv = ["app.py", *map(str, arguments)]
    run()


def command_with_room(num_bytes: int, *arguments: object) -> None:
    """The command line on a disk on which no file gets larger than this."""
    fill_disk(num_bytes)
    command(*arguments)


def fill_disk(num_bytes: int) -> None:
    """Refuse to let files grow beyond this, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))


def page(target: Path, db: Path, port: int) -> None:
    """The page over the tiny target."""
    draft_as_set(pytest.MonkeyPatch())
    cache_dir = db.parent / "cache"
    catalog = tiny_catalog(target)
    serve(access=KNOWN, port=port, db=str(db), cache_dir=cache_dir, catalog=catalog, device="cpu")


def page_that_loads_forever(target: Path, db: Path, port: int) -> None:
    """The page over a target that is never loaded."""
    pytest.MonkeyPatch().setattr(Models, "target", lambda *_: time.sleep(WAIT_S))
    page(target, db, port)
