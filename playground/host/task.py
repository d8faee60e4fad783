"""A task: whatever runs for a while, with its progress, how it is cancelled, and how it ended.

Runs, experiments, trainings and the measurements of a page are tasks. The engine's thread does
their turns in the order of arrival (`playground.host.runner`). One that takes several turns, or
none, has a thread of its own, belongs to no page, and is looked up by its id: closing a page leaves
it running, and every tab sees the same.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from engine.errors import ConfigError, PlaygroundError
from engine.tuning import OnProgress, StoppedError
from playground.errors import Fault, attempt
from storage import Status

State = Literal["queued", "loading", "prefill", "running"] | Status
ENDINGS: dict[State, str] = {
    "running": "running in another process",
    "completed": "done",
    "cancelled": "stopped. Resume runs what is missing.",
    "interrupted": "interrupted: its process ended. Resume runs what is missing.",
    "failed": "failed. Resume tries again.",
}
"""The state of a stored task that does not run here, in words."""


class ClosingError(PlaygroundError):
    """The engine accepts no more tasks."""

    def __init__(self) -> None:
        super().__init__("The playground is closing. Start it again to continue.")


@dataclass(slots=True, eq=False)
class Task:
    """One task, from the queue to its end.

    One thread at a time writes, any reads.
    """

    owner: str
    """The browser tab that started it, or adopted it while no page watched it; a new task of an
    owner cancels its last one."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    state: State = "queued"
    activity: str = ""
    """The current activity, or how it ended, in a few words."""
    share: float | None = None
    """The share that is done, 0 to 1; None if it is unknown."""
    error: str | None = None
    """Why it failed, in one sentence."""
    answer: dict[str, Any] | None = None
    """What its work returned, for the page that submitted it."""
    watchers: int = 0
    """Number of pages that follow it."""
    registered: threading.Event = field(default_factory=threading.Event)
    """Set once the log has its beginning, or it was refused; no turn of it begins before."""
    cancel_requested: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    began_s: float = field(default_factory=time.monotonic)
    progressed_s: float = math.inf
    """When the engine last made progress with a text; infinite for other work until cancelled."""
    ahead: Callable[[], int] = lambda: 0
    """The number of turns before its own in the engine's queue."""
    withdraw: Callable[[], None] = lambda: None
    """Takes it out of the engine's queue."""
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def status_text(self) -> str:
        """What it does, what it waits for and for how long, or how it ended."""
        if self.over.is_set():
            return self.activity
        if self.cancel_requested.is_set():
            return "stopping"
        if self.state != "queued":
            return self.activity
        ahead = self.ahead()
        words = f"waiting for the engine, {ahead} ahead" if ahead else "starting"
        return f"{words} · {time.monotonic() - self.began_s:.0f} s"

    @property
    def status(self) -> dict[str, Any]:
        """What a page shows of it, as JSON."""
        text, share = self.status_text, self.share
        return {"state": self.state, "text": text, "progress": share, "error": self.error}

    def reporter(self, words: str) -> OnProgress:
        """A callback that shows these words and a share, and stops the work once cancelled."""

        def on_progress(share: float) -> None:
            if self.cancel_requested.is_set():
                raise StoppedError("The measurement was stopped; nothing of it is kept.")
            self.state, self.activity, self.share = "running", words, share

        return on_progress

    def cancelled(self) -> bool:
        """Whether its work should end."""
        return self.cancel_requested.is_set()

    def cancel(self) -> None:
        """End it: at once if it waits in the queue, else within one step."""
        self.progressed_s = min(self.progressed_s, time.monotonic())
        self.cancel_requested.set()
        self.withdraw()

    def end(self, state: State, activity: str | None = None, *, error: str | None = None) -> None:
        """Set its final state; a task that has already ended is unchanged."""
        with self._ending:
            if not self.over.is_set():
                self.activity = self.activity if activity is None else activity
                self.error, self.share, self.state = error, None, state
                self.over.set()

    def do(
        self,
        work: Callable[[], dict[str, Any] | None],
        *,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Do its work, and end it if the work has not.

        Args:
            work: returns a result, whose `text` says what was done; raises StoppedError or
                CancelledError where it was cancelled.
        """

        def outcome() -> tuple[State, str]:
            try:
                self.answer = work()
            except StoppedError as stopped:
                return "cancelled", str(stopped)
            except CancelledError:
                return "cancelled", "stopped"
            return "completed", self.answer["text"] if self.answer else "done"

        ended = attempt(outcome, where=f"task {self.id}")
        before_end()
        if isinstance(ended, Fault):
            self.end("failed", "failed", error=ended.sentence)
        else:
            self.end(*ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """What a page shows of a stored task, wherever it runs.

    Attributes:
        status: as it is stored.
        task: None unless it runs here.
        version: differs whenever its report does.
        counts: how far it is, in words.
        share: the share that is done; None where it does not run, or that is unknown.
        is_whole: whether nothing is missing once it is completed.
    """

    status: State
    task: Task | None
    version: str
    counts: Sequence[str] = ()
    share: float | None = None
    error: str = ""
    is_whole: bool = True

    @property
    def text(self) -> str:
        """Its progress and current activity, or how it ended."""
        doing = self.task.status_text if self.task else ENDINGS[self.status]
        return " · ".join(filter(None, [*self.counts, doing]))

    @property
    def is_running(self) -> bool:
        """Whether it runs, here or in another process."""
        return self.status == "running" or self.task is not None

    @property
    def can_resume(self) -> bool:
        return not self.is_running and not (self.status == "completed" and self.is_whole)


Threaded = TypeVar("Threaded", bound=Task)


class TaskThreads(Generic[Threaded]):
    """The unfinished tasks that have a thread of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, Threaded] = {}
        self._closed = False

    def get(self, task_id: str) -> Threaded | None:
        """The task if it is not over."""
        with self._lock:
            return self._tasks.get(task_id)

    def running(self) -> list[Threaded]:
        with self._lock:
            return list(self._tasks.values())

    def start(
        self, task: Threaded, register: Callable[[], Callable[[], dict[str, Any] | None]]
    ) -> None:
        """Run a task; the owner's other tasks are cancelled.

        Args:
            register: queues its first turn, and only then writes its beginning to the log; returns
                the work of `Task.do`.

        Raises ClosingError, ConfigError: the server is closing, or the task is running already; and
        what `register` raises. Then nothing is cancelled, and the log has nothing of the task.
        """
        with self._lock:
            if self._closed:
                raise ClosingError
            if task.id in self._tasks:
                raise ConfigError("This is running already.")
            self._tasks[task.id] = task
        try:
            work = register()
        except BaseException:
            self._drop(task)
            task.cancel()
            task.end("cancelled")
            raise
        finally:
            task.registered.set()
        self.cancel_owner(task.owner, but=task)

        def run() -> None:
            task.do(work, before_end=lambda: self._drop(task))

        threading.Thread(target=run, name=f"task {task.id}", daemon=True).start()

    def stop(self, task_id: str) -> None:
        """Cancel a task. Raises ConfigError: it does not run here."""
        task = self.get(task_id)
        if task is None:
            raise ConfigError("Another process runs this. Stop it there.")
        task.cancel()

    def cancel_owner(self, owner: str, *, but: Task | None = None) -> None:
        """Cancel the tasks of an owner."""
        for task in self.running():
            if task.owner == owner and task is not but:
                task.cancel()

    def close(self) -> None:
        """Cancel all tasks, wait for them, and accept no more."""
        with self._lock:
            self._closed = True
        tasks = self.running()
        for task in tasks:
            task.cancel()
        for task in tasks:
            task.over.wait()

    def _drop(self, task: Task) -> None:
        with self._lock:
            del self._tasks[task.id]


def time_left(eta_s: float | None) -> str:
    """The remaining time in words, `about 3 min left`; empty where it is unknown or 0."""
    return f"{approximate_duration(eta_s)} left" if eta_s else ""


def approximate_duration(seconds: float) -> str:
    """A rounded duration in words: `about 40 s`, `about 3 min`, `about 2 h 5 min`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    is_long = seconds >= 5400
    return f"about {hours} h {minutes} min" if is_long else f"about {60 * hours + minutes} min"
