"""Long actions of the Tree page: on the engine's thread, told in words, stopped on demand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError
from engine.tuning.watch import StoppedError, Watch
from playground.host.live import LiveRun
from playground.host.runner import EngineHost

MAX_ENDS = 64
Work = Callable[[LiveRun], dict[str, Any]]
"""Done on the engine's thread; what it returns is told to the page that asked."""


class Jobs:
    """The page's jobs by id; results of the newest are kept."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def start(self, work: Work, *, owner: str) -> str:
        """Queue it; an unfinished job of the same owner is stopped.

        Raises:
            QueueFullError: too many are waiting.
        """
        return self._host.submit(lambda run: self._do(run, work), owner=owner).id

    def _do(self, run: LiveRun, work: Work) -> None:
        try:
            end = work(run)
        except StoppedError as stopped:
            run.words = str(stopped)
            run.end("cancelled")
            return
        with self._lock:
            self._ends[run.id] = end
            while len(self._ends) > MAX_ENDS:
                self._ends.popitem(last=False)
        run.words = str(end.get("words", "done"))
        run.end("completed")

    def state(self, job: str) -> dict[str, Any]:
        """How far a job is: words, progress, whether it is over, its fault, its result.

        Raises:
            ConfigError: there is no such job.
        """
        run = self._of(job)
        over = run.over.is_set()
        ahead = 0 if over else self._host.ahead_of(run)
        waiting = "waiting for the engine" + (f", {ahead} ahead" if ahead > 1 else "")
        with self._lock:
            end = self._ends.get(job)
        return {
            "words": waiting if ahead else run.words,
            "progress": run.progress,
            "over": over,
            "error": run.error,
            "end": end if over else None,
        }

    def stop(self, job: str) -> None:
        """Raises ConfigError: there is no such job."""
        self._of(job).cancel()

    def _of(self, job: str) -> LiveRun:
        run = self._host.runs.get(job)
        if run is None:
            raise ConfigError("That measurement is no longer known. Start it again.")
        return run


def watch_of(run: LiveRun, words: str, *, begin: float = 0.0, end: float = 1.0) -> Watch:
    """Tells the page how far a part of a job is, and stops it when the page asks."""

    def tell(fraction: float) -> None:
        run.state, run.words = "running", words
        run.progress = begin + (end - begin) * fraction

    return Watch(tell, run.cancel_asked.is_set)
