"""Running experiments as jobs that belong to no page: their progress, and how they are queued.

A page or command starts a job and then looks it up by its id: closing the page leaves it running,
and every tab sees the same. Measurements are queued for the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, PlaygroundError, TargetError
from engine.model.sources import TargetSpec
from playground.errors import Fault, attempt
from playground.experiments.finished import FinishedRequest
from playground.host.live import LiveRun
from playground.host.runner import ClosingError, EngineHost, QueueFullError
from storage import StorageError

State = Literal["queued", "running", "completed", "cancelled", "failed"]
Result = TypeVar("Result")
RETRY_S = 0.1
"""Between two attempts to enter a full queue."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an experiment is.

    Attributes:
        num_done: requests (of a sweep: trials) done, failed or left out.
        eta_s: None until it can be estimated.
        last: the request that has just finished.
    """

    num_done: int
    num_planned: int
    message: str
    eta_s: float | None
    num_failed: int = 0
    last: FinishedRequest | None = None

    @property
    def share(self) -> float:
        """The share of the requests that are done."""
        return self.num_done / max(1, self.num_planned)


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


class Job:
    """One experiment from the queue to its end.

    Written by the thread that runs it; any thread may read.

    Attributes:
        owner: a new job of the same owner cancels this one; by default, every job has its own.
        error: why it failed, in one sentence.
        waiting: what it waits for, in words, until there is progress.
        watchers: number of pages that follow it.
        registered: set once the log has its beginning, or it was refused; nothing is measured
            before.
        workers: name, device and task of each worker of a cluster.
        worker_rejections: why workers could not be used, a sentence each.
    """

    def __init__(self, job_id: str) -> None:
        self.id = self.owner = job_id
        self.state: State = "queued"
        self.progress: Progress | None = None
        self.error: str | None = None
        self.watchers = 0
        self.over = threading.Event()
        self.registered = threading.Event()
        self._cancel = threading.Event()
        self._live_run: LiveRun | None = None
        self.waiting: Callable[[], str] = lambda: "starting"
        self.workers: Callable[[], Sequence[tuple[str, str, str]]] = tuple
        self.worker_rejections: Sequence[str] = ()

    def cancel(self) -> None:
        """End it: at once if it waits for the engine, else within a step."""
        self._cancel.set()
        if self._live_run is not None:
            self._live_run.cancel()

    def cancelled(self) -> bool:
        """Whether it, or its run on the engine, was cancelled."""
        run = self._live_run
        return self._cancel.is_set() or (run is not None and run.cancel_requested.is_set())

    def attach(self, run: LiveRun) -> None:
        """Make this its run on the engine; both are cancelled together."""
        self._live_run = run
        if self._cancel.is_set():
            run.cancel()

    def update(self, progress: Progress) -> None:
        self.progress = progress

    def check_target(self, environment: Mapping[str, Any]) -> None:
        """Raises ConfigError: the job cannot be measured in this environment."""

    @property
    def message(self) -> str:
        """Its current activity, or how it ended."""
        if self.over.is_set():
            return {"cancelled": "stopped", "failed": "failed"}.get(self.state, "done")
        if self.cancelled():
            return "stopping"
        return self.waiting() if self.progress is None else self.progress.message


class Jobs:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._closed = False

    def get(self, job_id: str) -> Job | None:
        """The job if it is not over."""
        with self._lock:
            return self._jobs.get(job_id)

    def running(self) -> list[Job]:
        with self._lock:
            return list(self._jobs.values())

    def start(self, job: Job, register: Callable[[], Callable[[], State]]) -> None:
        """Run a job in a thread of its own; the owner's other jobs are cancelled.

        Args:
            register: queues the measurement, and only then writes its beginning to the log;
                returns the work, which returns how it ended or raises CancelledError.

        Raises ClosingError, ConfigError: the server is closing, or the job is running already; and
        what `register` raises. Then nothing is cancelled, and the log has nothing of the job.
        """
        with self._lock:
            if self._closed:
                raise ClosingError
            if job.id in self._jobs:
                raise ConfigError("This experiment is running already.")
            self._jobs[job.id] = job
        try:
            work = register()
        except BaseException:
            self._drop(job)
            job.cancel()
            job.state = "cancelled"
            job.over.set()
            raise
        finally:
            job.registered.set()
        self.cancel_owner(job.owner, but=job)
        run = partial(self._run, job, work)
        threading.Thread(target=run, name=f"job {job.id}", daemon=True).start()

    def cancel_owner(self, owner: str, *, but: Job | None = None) -> None:
        """Cancel the jobs of an owner."""
        for job in self.running():
            if job.owner == owner and job is not but:
                job.cancel()

    def _run(self, job: Job, work: Callable[[], State]) -> None:
        def outcome_of_work() -> State:
            try:
                return work()
            except CancelledError:
                return "cancelled"

        job.state = "running"
        outcome = attempt(outcome_of_work, where=f"job {job.id}")
        if isinstance(outcome, Fault):
            job.error = outcome.sentence
        self._drop(job)
        job.state = "failed" if isinstance(outcome, Fault) else outcome
        job.over.set()

    def _drop(self, job: Job) -> None:
        with self._lock:
            del self._jobs[job.id]

    def close(self) -> None:
        """Cancel all jobs, wait for them, and accept no more."""
        with self._lock:
            self._closed = True
        jobs = self.running()
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.over.wait()


class MeasurementFailedError(PlaygroundError):
    """A measurement failed by a bug, whose traceback is logged; others may still work."""


def submit(
    host: EngineHost,
    job: Job,
    target: TargetSpec,
    dtype: str,
    measure: Callable[[BuildContext], Result],
    *,
    wait_for_room: bool = False,
) -> Callable[[], Result]:
    """Queue a measurement on the engine; no other run interrupts it.

    It does not start before the job is registered.

    Args:
        measure: called with the loaded target, on the engine's thread.
        wait_for_room: wait while the engine's queue is full.

    Returns:
        A function that waits for the result. It raises CancelledError where the measurement was
        stopped before it began, and PlaygroundError or StorageError where it failed.

    Raises:
        QueueFullError: the engine's queue is full.
        CancelledError: the job was stopped while it waited.
        ClosingError: the engine accepts no more jobs.
    """
    future: Future[Result] = Future()

    def work(run: LiveRun) -> None:
        job.attach(run)
        job.registered.wait()
        if job.cancelled():
            run.end("cancelled")
            return
        try:
            context = _load_target(host, job, run, target, dtype)
            future.set_result(measure(context))
        except (PlaygroundError, StorageError) as error:
            future.set_exception(error)
        run.end("failed" if future.exception() else "completed")

    def result() -> Result:
        run.over.wait()
        if future.done():
            return future.result()
        if run.state == "failed":
            raise MeasurementFailedError(run.error or "The engine could not run it.")
        raise CancelledError

    run = _queued(host, job, work, wait_for_room=wait_for_room)
    job.attach(run)
    job.waiting = lambda: run.status_text(host.ahead_of(run))
    return result


def _load_target(
    host: EngineHost, job: Job, run: LiveRun, target: TargetSpec, dtype: str
) -> BuildContext:
    """Raises TargetError: the target cannot be loaded, or the job refuses it."""
    try:
        job.check_target(host.prepare(run, target, dtype).environment())
    except ConfigError as error:  # not a ConfigError: no setting of the measurement is at fault
        raise TargetError(str(error)) from error
    run.state = "running"
    return host.build_context()


def _queued(
    host: EngineHost, job: Job, work: Callable[[LiveRun], None], *, wait_for_room: bool
) -> LiveRun:
    while True:
        try:
            return host.submit(work, owner=job.owner)
        except QueueFullError:
            if not wait_for_room:
                raise
            if job.cancelled():
                raise CancelledError from None
            time.sleep(RETRY_S)
