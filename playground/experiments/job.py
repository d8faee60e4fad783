"""Experiments under way: jobs that belong to no page, their progress, and where they are measured.

A page or command starts a job and then only asks for it by its id: closing the page leaves it
running, and every tab sees the same. What is to be timed is queued for the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

from engine.drafters.base import BuildContext
from engine.errors import ConfigError, PlaygroundError, TargetError
from engine.model.sources import TargetSpec
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.finished import FinishedRequest
from playground.host.live import LiveRun
from playground.host.runner import ClosingError, EngineHost, QueueFullError
from storage import StorageError

State = Literal["queued", "running", "completed", "cancelled", "failed"]
Result = TypeVar("Result")
WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an experiment is.

    Attributes:
        num_done: requests (of a sweep: trials) done, failed or left out.
        eta_s: None until there is something to judge by.
        last: the request that was finished just now.
    """

    num_done: int
    num_planned: int
    message: str
    eta_s: float | None
    num_failed: int = 0
    last: FinishedRequest | None = None


def time_left(eta_s: float | None) -> str:
    """Time to go, as people say it: `about 3 min left`; empty where nothing is known or left."""
    return f"{about(eta_s)} left" if eta_s else ""


def about(seconds: float) -> str:
    """A duration as people say it: `about 40 s`, `about 3 min`, `about 2 h 5 min`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    is_long = seconds >= 5400
    return f"about {hours} h {minutes} min" if is_long else f"about {60 * hours + minutes} min"


class Job:
    """One experiment from the queue to its end.

    The thread that runs it writes, any thread reads.

    Attributes:
        owner: who is to be stopped together: a new job ends the owner's last one.
        error: one sentence, of a job that failed.
        waiting: says what it waits for, until there is progress.
        watchers: pages that its messages go to.
        taken_on: set once it is in the log as begun, or was refused; nothing is measured before.
        workers: name, device and task of each, where others measure.
        refused: why workers are not used, a sentence each.
    """

    def __init__(self, job_id: str, *, owner: str = "") -> None:
        self.id = job_id
        self.owner = owner
        self.state: State = "queued"
        self.progress: Progress | None = None
        self.error: str | None = None
        self.watchers = 0
        self.over = threading.Event()
        self.taken_on = threading.Event()
        self._cancel = threading.Event()
        self._run: LiveRun | None = None
        self.waiting: Callable[[], str] = lambda: "starting"
        self.workers: Callable[[], Sequence[tuple[str, str, str]]] = tuple
        self.refused: Sequence[str] = ()

    def cancel(self) -> None:
        """Ask it to end: at once if it waits for the engine, else within a step."""
        self._cancel.set()
        if self._run is not None:
            self._run.cancel()

    def cancelled(self) -> bool:
        """Whether it is to end: it was asked to, or what the engine does for it was."""
        run = self._run
        return self._cancel.is_set() or (run is not None and run.cancel_asked.is_set())

    def follow(self, run: LiveRun) -> None:
        """The engine does this for it from now on; both are cancelled together."""
        self._run = run
        if self._cancel.is_set():
            run.cancel()

    def tell(self, progress: Progress) -> None:
        self.progress = progress

    @property
    def message(self) -> str:
        """What is being done, or how it ended."""
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

    def start(self, job: Job, take_on: Callable[[], Callable[[], State]]) -> None:
        """Do a job's work in a thread of its own; the owner's other jobs are cancelled.

        Args:
            take_on: queues what is to be measured, and only then writes down that it began; it
                returns the work, which returns how it ended, or is cancelled.

        Raises ClosingError, ConfigError: nothing is taken on any more, or it is running already;
        and what `take_on` raises. Nothing is cancelled or left behind then.
        """
        with self._lock:
            if self._closed:
                raise ClosingError
            if job.id in self._jobs:
                raise ConfigError("This experiment is running already.")
            self._jobs[job.id] = job
        try:
            work = take_on()
        except BaseException:
            self._drop(job)
            job.cancel()
            job.state = "cancelled"
            job.over.set()
            raise
        finally:
            job.taken_on.set()
        self.cancel_owner(job.owner, but=job)
        run = partial(self._run, job, work)
        threading.Thread(target=run, name=f"job {job.id}", daemon=True).start()

    def cancel_owner(self, owner: str, *, but: Job | None = None) -> None:
        """Stop what an owner has under way."""
        for job in self.running():
            if owner and job.owner == owner and job is not but:
                job.cancel()

    def _run(self, job: Job, work: Callable[[], State]) -> None:
        def ended_as() -> State:
            try:
                return work()
            except CancelledError:
                return "cancelled"

        job.state = "running"
        ended = attempt(ended_as, where=f"job {job.id}")
        if isinstance(ended, Fault):
            job.error = ended.sentence
        self._drop(job)
        job.state = "failed" if isinstance(ended, Fault) else ended
        job.over.set()

    def _drop(self, job: Job) -> None:
        with self._lock:
            del self._jobs[job.id]

    def close(self) -> None:
        """Stop everything and wait for it; nothing is started any more."""
        with self._lock:
            self._closed = True
        jobs = self.running()
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.over.wait()


class OnTarget(Protocol):
    """Work on a target: which one, and in which dtype."""

    @property
    def target(self) -> TargetSpec: ...
    @property
    def dtype(self) -> str: ...


class BrokenOffError(PlaygroundError):
    """A measurement broke off for a reason that nobody foresaw; others may do."""


def submit(
    host: EngineHost,
    job: Job,
    workload: OnTarget,
    measure: Callable[[BuildContext], Result],
    *,
    check: Callable[[Target], None] = lambda target: None,
    patient: bool = False,
) -> Callable[[], Result]:
    """Queue a measurement that nothing may come between, among everybody's runs.

    Args:
        measure: is given the loaded target, on the engine's thread.
        check: refuses a target by raising.
        patient: wait for room in the queue.

    Returns:
        What waits for the result. It raises CancelledError where the measurement was stopped before
        it began, and PlaygroundError or StorageError where it could not be done.

    Nothing is measured before the job is taken on. Raises what `_queued` does.
    """
    results: list[Result] = []
    faults: list[PlaygroundError | StorageError] = []

    def work(run: LiveRun) -> None:
        job.follow(run)
        job.taken_on.wait()
        if job.cancelled():
            run.end("cancelled")
            return
        try:
            try:
                check(host.prepare(run, workload.target, workload.dtype))
            except ConfigError as error:  # whatever is measured on it, it is not the right target
                raise TargetError(str(error)) from error
            run.state = "running"
            results.append(measure(host.build_context()))
        except (PlaygroundError, StorageError) as error:
            faults.append(error)
        run.end("failed" if faults else "completed")

    def result() -> Result:
        run.over.wait()
        if faults:
            raise faults[0]
        if run.state == "failed":
            raise BrokenOffError(run.error or "The engine could not run it.")
        if not results:
            raise CancelledError
        return results[0]

    run = _queued(host, job, work, patient=patient)
    job.follow(run)
    job.waiting = lambda: run.doing(host.ahead_of(run))
    return result


def _queued(
    host: EngineHost, job: Job, work: Callable[[LiveRun], None], *, patient: bool
) -> LiveRun:
    """The engine's run that will do this work.

    Raises:
        QueueFullError: too many are waiting.
        CancelledError: the job was stopped while it waited.
        ClosingError: nothing is taken on any more.
    """
    while True:
        try:
            return host.submit(work, owner=job.owner)
        except QueueFullError:
            if not patient:
                raise
            if job.cancelled():
                raise CancelledError from None
            time.sleep(WAIT_S)
