"""Workers on a Ray cluster: actors that keep a target loaded and do one task after another.

    driver ── do(task) ──► a free worker: a process of its own, its target, its link to the log
       ▲                      │ the loop that measures without Ray, too; its runs go to the log
       └── its messages ◄─────┘

A task is any function of a `TaskContext`. Ray sends it to a worker and reports a worker that dies;
the task is then done again by another, from what the log already has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.experiments.job import Job, Progress
from playground.experiments.measurement import check_same_target
from playground.experiments.plan import Workload
from playground.experiments.pool import Pool, connected, worker_capacity
from playground.experiments.worker import About, Task, TaskContext, Worker, WorkerConfig, program
from playground.host.runner import EngineHost

__all__ = ["NoWorkerError", "TaskContext", "WorkerLostError", "Workers", "workers", "workers_of"]
LOG = logging.getLogger(__name__)
POLL_S = 0.3
START_S = 300.0
"""Longest wait for a worker's process: others may hold its cores, and a busy machine imports for
minutes."""
MAX_LOST = 5
"""Workers that one task may lose."""
WORK = "work"
"""The actor's one thread that computes; others answer for it meanwhile."""


class WorkerLostError(PlaygroundError):
    """A worker died over its task, which another may do again."""


class NoWorkerError(PlaygroundError):
    """All workers died, and none could take their place; what was to be done can be resumed."""


class _Handle(NamedTuple):
    """A worker from the driver's side."""

    actor: Any
    about: About


class Workers:
    """The workers of one experiment; any thread may have a task done.

    Attributes:
        refused: why workers are not used, a sentence each.
    """

    def __init__(
        self,
        pool: Pool,
        config: WorkerConfig,
        *,
        one_device: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start them; what cannot be used is left out.

        Args:
            one_device: use only workers on the kind of device that the first one has.
            cancelled: give up while they start.

        Raises:
            ConfigError: no worker can be used.
            CancelledError: it was given up.
        """
        self._config, self._one_device, self._cancelled = config, one_device, cancelled
        self._gpus, self._cpus, size = worker_capacity(pool)
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._free: SimpleQueue[_Handle | None] = SimpleQueue()
        self._handles: list[_Handle] = []
        self._num_starting = 0
        self._busy: dict[str, str] = {}
        self.refused: list[str] = []
        try:
            with ThreadPoolExecutor(size) as threads:
                try:
                    list(threads.map(lambda _: self._start(), range(size)))
                except BaseException:  # the threads end before this does
                    self._closing.set()
                    raise
            if cancelled():
                raise CancelledError
            if not self._handles:
                raise ConfigError(f"No worker can be used. {' '.join(self.refused)}")
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._handles)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where the first worker runs."""
        return self._handles[0].about.environment

    def rows(self) -> list[tuple[str, str, str]]:
        """Every worker: name, device, what it does."""
        with self._lock:
            abouts = [handle.about for handle in self._handles]
        return [(one.name, one.device, self._busy.get(one.name, "idle")) for one in abouts]

    def do(
        self,
        task: Task,
        *,
        taken: Callable[[About], object] = lambda about: None,
        tell: Callable[[Any], object] = lambda message: None,
        cancelled: Callable[[], bool] = lambda: False,
        title: str = "working",
    ) -> Any:
        """Have a free worker do this; returns the task's result.

        Args:
            taken: called with the worker that does it.
            title: what the worker is said to do.

        Raises:
            WorkerLostError: it died; another worker is started in its place.
            NoWorkerError: none is left.
            PlaygroundError, StorageError: as the task raised it.
        """
        handle = self._free.get()
        if handle is None:
            self._free.put(None)
            raise NoWorkerError(f"No worker is left. {' '.join(self.refused)}")
        self._busy[name := handle.about.name] = title

        def forward(message: Any) -> None:
            if isinstance(message, Progress):
                self._busy[name] = f"{title}: {message.num_done} of {message.num_planned}"
            tell(message)

        try:
            taken(handle.about)
            result = self._follow(handle, task, forward, cancelled)
        except WorkerLostError as error:
            LOG.warning("%s", error)
            self._replace(handle)
            raise
        except BaseException:
            self._free.put(handle)
            raise
        else:
            self._free.put(handle)
            return result
        finally:
            self._busy.pop(name, None)

    def do_all(
        self,
        tasks: Mapping[str, Task],
        *,
        tell: Callable[[str, Any], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Do every task by whoever is free, again where a worker was lost; results by name."""
        failed = threading.Event()

        def do(name: str) -> Any:
            for num_lost in range(1, MAX_LOST + 1):
                try:
                    return self.do(
                        tasks[name],
                        tell=lambda message: tell(name, message),
                        cancelled=lambda: cancelled() or failed.is_set(),
                        title=name,
                    )
                except WorkerLostError:
                    if num_lost == MAX_LOST:
                        failed.set()
                        raise
                except BaseException:
                    failed.set()
                    raise
            raise AssertionError("unreachable")

        with ThreadPoolExecutor(len(tasks)) as threads:
            return dict(zip(tasks, threads.map(do, tasks), strict=True))

    def close(self) -> None:
        """Stop all workers."""
        import ray

        self._closing.set()
        with self._lock:
            handles, self._handles = self._handles, []
        for handle in handles:
            with suppress(Exception):  # whatever it is, the worker is gone
                ray.kill(handle.actor)

    # ---- one worker

    def _replace(self, lost: _Handle) -> None:
        """Start another worker beside those that go on."""
        with self._lock:
            self._handles.remove(lost)
            self._num_starting += 1

        def start() -> None:
            self._start()
            with self._lock:
                self._num_starting -= 1
                if not self._handles and not self._num_starting:
                    self._free.put(None)

        threading.Thread(target=start, name="worker start", daemon=True).start()

    def _start(self) -> None:
        """Start a worker; if it cannot be used, say why."""
        import ray

        actor_class = ray.remote(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            concurrency_groups={WORK: 1},
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._cpus)}},
        )
        actor, who = actor_class(Worker).remote(), "A worker"
        try:
            about: About = self._await(actor.about.remote(), START_S)
            who = f"Worker {about.name}"
            self._check(about)
            ready = actor.prepare.options(concurrency_group=WORK)
            about = replace(
                about, environment=self._await(ready.remote(self._config, gpu=self._gpus > 0))
            )
            with self._lock:
                if self._handles:
                    self._check_like(about, self._handles[0].about)
                self._handles.append(handle := _Handle(actor, about))
            self._free.put(handle)
        except CancelledError:
            ray.kill(actor)
        except (ray.exceptions.RayError, PlaygroundError) as error:
            self.refused.append(f"{who} is not used: {_sentence(error)}")
            LOG.warning("%s", self.refused[-1])
            ray.kill(actor)

    def _await(self, answer: Any, timeout_s: float | None = None) -> Any:
        """A worker's answer; raises CancelledError when nobody waits for it any more."""
        import ray

        begin_s = time.monotonic()
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if self._closing.is_set() or self._cancelled():
                raise CancelledError
            if timeout_s is not None and time.monotonic() - begin_s > timeout_s:
                raise ConfigError(
                    f"Ray has not started it within {timeout_s:g} s; others may hold its cores, or "
                    "its machine is busy."
                )
        return ray.get(answer)

    def _check(self, about: About) -> None:
        """Raises ConfigError: it has another version, or cannot reach the log."""
        import ray

        if about.program != program():
            raise ConfigError(
                f"it runs version {about.program}; this is {program()}. Install the same version "
                "on every node."
            )
        url, here = self._config.log_url or "", ray.get_runtime_context().get_node_id()
        if url.startswith("sqlite") and about.node != here:
            raise ConfigError(
                "it is on another machine, where it cannot write to a SQLite file. Give "
                "--db postgresql+psycopg://…"
            )

    def _check_like(self, about: About, first: About) -> None:
        check_same_target(first.environment, about.environment)
        if self._one_device and about.device != first.device:
            raise ConfigError(
                f"it runs on {about.device}, but {first.name} on {first.device}, and the best "
                "settings for one are not those for the other. Sweep each kind by itself."
            )

    def _follow(
        self,
        handle: _Handle,
        task: Task,
        tell: Callable[[Any], object],
        cancelled: Callable[[], bool],
    ) -> Any:
        """Forward a task's messages until it is over; its result."""
        import ray

        actor, stopped, done = handle.actor, False, list[Any]()
        try:
            result = actor.do.options(concurrency_group=WORK).remote(task)
            while not done:
                done, _ = ray.wait([result], timeout=POLL_S)
                for message in ray.get(actor.look.remote()):
                    tell(message)
                if cancelled() and not stopped:
                    stopped = True
                    ray.get(actor.stop.remote())  # a late one would stop the next task
            return ray.get(result)
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause := error.cause, Exception):
                raise cause from None
            raise
        except ray.exceptions.RayError as error:
            name = handle.about.name
            raise WorkerLostError(f"Worker {name} is gone: {_reason(error)}") from error


def _sentence(error: Exception) -> str:
    """What is wrong with a worker, in a sentence."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return str(cause) if isinstance(cause, PlaygroundError) else f"{first_line(cause)}."
    if "ModuleNotFoundError" in str(error):
        return "this program is not installed on its node. Install the same version on every node."
    return _reason(error) if isinstance(error, ray.exceptions.RayError) else str(error)


def _reason(error: Exception) -> str:
    """Why a worker died, as far as Ray knows."""
    text = str(error)
    if "low on memory" in text or "memory pressure" in text:
        return "it was killed because its node ran out of memory."
    if "node" in text.lower() and "died" in text.lower() and "process" not in text.lower():
        return "its node is gone."
    return "its process died."


@contextmanager
def workers(pool: Pool, config: WorkerConfig, **more: Any) -> Iterator[Workers]:
    """Workers that have loaded the target, `more` as `Workers` takes it; stopped at the end."""
    with connected(pool.address):
        running = Workers(pool, config, **more)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def workers_of(
    host: EngineHost, job: Job, pool: Pool, workload: Workload, *, one_device: bool = False
) -> Iterator[Workers]:
    """Workers for a job of a server, which shows what they do.

    Raises ConfigError: no worker could write to the log.
    """
    url = host.log.url
    if url.database in (None, "", ":memory:"):
        raise ConfigError("Workers need a run log that they can reach. Start the server with --db.")
    dtype, log_url = workload.dtype, url.render_as_string(hide_password=False)
    config = WorkerConfig(workload.target, dtype, log_url, host.device, host.cache_dir)
    job.waiting = lambda: "starting the workers"
    with workers(pool, config, one_device=one_device, cancelled=job.cancelled) as running:
        job.waiting, job.workers, job.refused = lambda: "starting", running.rows, running.refused
        yield running
