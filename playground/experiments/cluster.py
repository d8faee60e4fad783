"""Workers on a Ray cluster: actors that keep a target loaded and do one task after another.

    driver ── do(task) ──► a free worker: a process of its own, its target, its link to the log
       ▲                      │ the loop that measures without Ray, too; its runs go to the log
       └── what it tells ◄────┘

A task is any function of a `TaskContext`. Ray sends it to a worker, schedules it, and reports a
worker that dies; the caller repeats what was lost, starting from what the log already has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.experiments.job import Job, Progress
from playground.experiments.measurement import check_same_target
from playground.experiments.plan import Workload
from playground.experiments.pool import Pool, connected, worker_capacity
from playground.experiments.worker import About, Task, Worker, WorkerConfig, program
from playground.host.runner import EngineHost

LOG = logging.getLogger(__name__)
LOOK_S = 0.3
"""So often the driver asks a worker how far it is."""
QUEUE_S = 120.0
"""Longest wait for cores that others hold."""
MAX_LOST = 3
"""Workers that a task may lose in a row without getting any further."""
WORK = "work"
"""The actor's one thread that computes; others answer for it meanwhile."""


class WorkerLostError(PlaygroundError):
    """Worker after worker died over a task."""


class NoWorkerError(PlaygroundError):
    """All workers died, and none could take their place; what was to be done can be resumed."""


@dataclass(frozen=True, slots=True)
class _Handle:
    """A worker from the driver's side, in the cores that are reserved for it."""

    actor: Any
    cores: Any
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
        self._config, self._one_device = config, one_device
        self._cancelled, self._closing = cancelled, threading.Event()
        self._gpus, self._cpus, size = worker_capacity(pool)
        self._lock = threading.Lock()
        self._free: SimpleQueue[_Handle | None] = SimpleQueue()
        self._handles: list[_Handle] = []
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
            workers = [handle.about for handle in self._handles]
        return [(one.name, one.device, self._busy.get(one.name, "idle")) for one in workers]

    def do(
        self,
        task: Task,
        *,
        tell: Callable[[Any], object] = lambda message: None,
        cancelled: Callable[[], bool] = lambda: False,
        title: str = "working",
    ) -> Any:
        """Have a free worker do this, another one where it dies; returns what came of it.

        Args:
            tell: receives the task's messages.
            title: what the worker is said to do.

        Raises:
            WorkerLostError: worker after worker died, and it got no further.
            NoWorkerError: none is left.
            PlaygroundError, StorageError: as the task raised it.
        """
        num_lost = 0

        def receive(message: Any) -> None:
            nonlocal num_lost
            if not isinstance(message, Progress) or message.last is not None:
                num_lost = 0
            tell(message)

        while True:
            try:
                return self._do(task, receive, cancelled, title)
            except WorkerLostError as error:
                LOG.warning("%s", error)
                num_lost += 1
                if num_lost >= MAX_LOST:
                    raise

    def do_all(
        self,
        tasks: Mapping[str, Task],
        *,
        tell: Callable[[str, Any], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Do every task by whoever is free; results by name. One that fails ends the others."""
        failed = threading.Event()

        def one(name: str) -> Any:
            over = lambda: cancelled() or failed.is_set()  # noqa: E731
            try:
                return self.do(tasks[name], tell=partial(tell, name), cancelled=over, title=name)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(tasks)) as threads:
            return dict(zip(tasks, threads.map(one, tasks), strict=True))

    def _do(
        self,
        task: Task,
        tell: Callable[[Any], None],
        cancelled: Callable[[], bool],
        title: str,
    ) -> Any:
        """Raises WorkerLostError: the worker died; another one has taken its place."""
        worker = self._free.get()
        if worker is None:
            self._free.put(None)
            raise NoWorkerError(f"No worker is left. {' '.join(self.refused)}")
        self._busy[name := worker.about.name] = title

        def receive(message: Any) -> None:
            if isinstance(message, Progress):
                self._busy[name] = f"{title}: {message.num_done} of {message.num_planned}"
            tell(message)

        try:
            result = self._follow(worker, task, receive, cancelled)
        except WorkerLostError:
            with self._lock:
                self._handles.remove(worker)
            self._dismiss(worker.actor, worker.cores)
            self._start()
            if not self._handles:
                self._free.put(None)
            raise
        except BaseException:
            self._release(worker)
            raise
        self._release(worker)
        return result

    def _release(self, worker: _Handle) -> None:
        self._busy.pop(worker.about.name, None)
        self._free.put(worker)

    def close(self) -> None:
        """Stop all workers."""
        self._closing.set()
        with self._lock:
            handles, self._handles = self._handles, []
        for worker in handles:
            self._dismiss(worker.actor, worker.cores)

    # ---- one worker

    def _start(self) -> None:
        """Start a worker; if it cannot be used, say why."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = {"CPU": self._cpus, "GPU": self._gpus}
        cores = ray.util.placement_group([{key: n for key, n in resources.items() if n}])
        actor, who = None, "A worker"
        try:
            self._await_cores(cores)
            actor_class = ray.remote(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                concurrency_groups={WORK: 1},
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._cpus)}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(cores),
            )
            actor = actor_class(Worker).remote()
            about: About = self._await(actor.about.remote())
            who = f"Worker {about.name}"
            self._check(about)
            prepare = actor.prepare.options(concurrency_group=WORK)
            environment = self._await(prepare.remote(self._config, gpu=self._gpus > 0))
            about = replace(about, environment=environment)
            with self._lock:
                if self._handles:
                    self._check_like(about, self._handles[0].about)
                self._handles.append(worker := _Handle(actor, cores, about))
            self._free.put(worker)
        except CancelledError:
            self._dismiss(actor, cores)
        except (ray.exceptions.RayError, PlaygroundError) as error:
            self.refused.append(f"{who} is not used: {_sentence(error)}")
            LOG.warning("%s", self.refused[-1])
            self._dismiss(actor, cores)

    def _dismiss(self, actor: Any, cores: Any) -> None:
        """Stop a worker and give its cores back."""
        import ray

        with suppress(Exception):  # whatever it is, the worker is gone
            ray.kill(actor)
        with suppress(Exception):
            ray.util.remove_placement_group(cores)

    def _await(self, answer: Any) -> Any:
        """What a worker answers; raises CancelledError when nobody waits for it any more."""
        import ray

        while not ray.wait([answer], timeout=LOOK_S)[0]:
            self._check_wanted()
        return ray.get(answer)

    def _await_cores(self, cores: Any) -> None:
        until = time.monotonic() + QUEUE_S
        while not cores.wait(LOOK_S):
            self._check_wanted()
            if time.monotonic() > until:
                raise ConfigError(
                    f"Ray has no cores for it within {QUEUE_S:g} s; others may hold them."
                )

    def _check_wanted(self) -> None:
        if self._closing.is_set() or self._cancelled():
            raise CancelledError

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
        worker: _Handle,
        task: Task,
        tell: Callable[[Any], object],
        cancelled: Callable[[], bool],
    ) -> Any:
        import ray

        actor, asked_to_stop = worker.actor, False
        try:
            doing = actor.do.options(concurrency_group=WORK).remote(task)
            done: list[Any] = []
            while not done:
                done, _ = ray.wait([doing], timeout=LOOK_S)
                for message in ray.get(actor.look.remote()):
                    tell(message)
                if cancelled() and not asked_to_stop:
                    asked_to_stop = True
                    ray.get(actor.stop.remote())  # a late one would stop the next task
            return ray.get(doing)
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause := error.cause, Exception):
                raise cause from None
            raise
        except ray.exceptions.RayError as error:
            raise WorkerLostError(f"Worker {worker.about.name} is gone: {_died(error)}") from error


def _sentence(error: Exception) -> str:
    """What is wrong with a worker, in a sentence."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return str(cause) if isinstance(cause, PlaygroundError) else f"{first_line(cause)}."
    if "ModuleNotFoundError" in str(error):
        return "this program is not installed on its node. Install the same version on every node."
    return _died(error) if isinstance(error, ray.exceptions.RayError) else str(error)


def _died(error: Exception) -> str:
    """Why, as far as Ray knows."""
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
    """Workers for a job of a server, which tells what they do.

    Raises:
        ConfigError: no worker could write to the log.
    """
    url = host.log.url
    if url.database in (None, "", ":memory:"):
        raise ConfigError("Workers need a run log that they can reach. Start the server with --db.")
    dtype, where = workload.dtype, url.render_as_string(hide_password=False)
    config = WorkerConfig(workload.target, dtype, where, host.device, host.cache_dir)
    job.waiting = lambda: "starting the workers"
    with workers(pool, config, one_device=one_device, cancelled=job.cancelled) as running:
        job.waiting, job.workers, job.refused = lambda: "starting", running.rows, running.refused
        yield running
