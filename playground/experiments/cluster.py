"""Workers on a Ray cluster: actors that keep a target loaded and do one task after another.

    driver ── do(task) ──► a free worker: a process of its own, its target, its door to the log
       ▲                      │ the loop that measures without Ray, too; its runs go to the log
       └── what it tells ◄────┘

A task is any function of a `Desk`. Ray brings it there, says where there is room, and notices who
dies; what is lost with a worker is for the caller to do again, from what the log has of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from queue import SimpleQueue
from typing import Any

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.experiments.measurement import check_same_target
from playground.experiments.worker import About, Duty, Task, Worker, program

LOG = logging.getLogger(__name__)
LOCAL = "local"
LOOK_S = 0.3
"""So often the driver asks a worker how far it is."""
START_S = 120.0
"""Longest wait for Ray to start an actor."""
MAX_LOST = 3
"""Workers that a task may lose in a row without getting any further."""
WORK = "work"
"""The actor's one thread that computes; others answer for it meanwhile."""


class WorkerLostError(PlaygroundError):
    """A worker died over its task, which another may do again."""


class NoWorkerError(PlaygroundError):
    """All workers died, and none could take their place; what was to be done can be resumed."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How much of a cluster is used.

    Attributes:
        address: `local` for a Ray of this machine's own, else as Ray takes it.
        workers: how many; None = as many as there is room for.
        cpus, gpus: of each worker; None = all cores of a node, and a GPU where there is one.
    """

    address: str
    workers: int | None = None
    cpus: int | None = None
    gpus: float | None = None


@dataclass(frozen=True, slots=True)
class _Hired:
    """A worker from the driver's side."""

    actor: Any
    about: About


class Workers:
    """The workers of one experiment; any thread may have a task done.

    Attributes:
        refused: why workers are not used, a sentence each.
    """

    def __init__(self, pool: Pool, duty: Duty, *, one_device: bool) -> None:
        """`one_device`: use only workers on the kind of device that the first one has."""
        self._duty, self._one_device = duty, one_device
        self._gpus, self._cpus, size = room_of(pool)
        self._lock = threading.Lock()
        self._free: SimpleQueue[_Hired | None] = SimpleQueue()
        self._hired: list[_Hired] = []
        self._busy: dict[str, object] = {}
        self.refused: list[str] = []
        try:
            with ThreadPoolExecutor(size) as threads:
                list(threads.map(lambda _: self._hire(), range(size)))
            if not self._hired:
                raise ConfigError(f"No worker can be used. {' '.join(self.refused)}")
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._hired)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where the first worker runs."""
        return self._hired[0].about.environment

    def rows(self) -> list[tuple[str, str, str]]:
        """Every worker: name, device, what it does."""
        with self._lock:
            hired = list(self._hired)
        return [
            (one.about.name, one.about.device, str(self._busy.get(one.about.name, "idle")))
            for one in hired
        ]

    def do(
        self,
        task: Task,
        *,
        taken: Callable[[About], object] = lambda about: None,
        tell: Callable[[Any], object] = lambda message: None,
        cancelled: Callable[[], bool] = lambda: False,
        title: str = "working",
    ) -> Any:
        """Have a free worker do this; returns what came of it.

        Args:
            taken: told which worker does it.
            title: what the worker is said to do.

        Raises:
            WorkerLostError: it died; another worker has taken its place.
            NoWorkerError: none is left.
            PlaygroundError, StorageError: as the task raised it.
        """
        worker = self._free.get()
        if worker is None:
            self._free.put(None)
            raise NoWorkerError(f"No worker is left. {' '.join(self.refused)}")
        self._busy[worker.about.name] = title
        try:
            taken(worker.about)
            return self._followed(worker, task, tell, cancelled)
        except WorkerLostError as error:
            LOG.warning("%s", error)
            with self._lock:
                self._hired.remove(worker)
            worker = None
            self._hire()
            raise
        finally:
            if worker is not None:
                self._busy.pop(worker.about.name, None)
                self._free.put(worker)
            elif not self._hired:
                self._free.put(None)

    def do_all(
        self,
        tasks: Mapping[str, Task],
        *,
        tell: Callable[[str, Any], bool],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Do every task by whoever is free, again where a worker was lost; results by name.

        Args:
            tell: whether what it is told shows that the task gets on.
        """
        failed = threading.Event()

        def one(name: str) -> Any:
            num_lost = 0

            def heard(message: Any) -> None:
                nonlocal num_lost
                if tell(name, message):
                    num_lost = 0

            while True:
                try:
                    over = lambda: cancelled() or failed.is_set()  # noqa: E731
                    return self.do(tasks[name], tell=heard, cancelled=over, title=name)
                except WorkerLostError:
                    num_lost += 1
                    if num_lost >= MAX_LOST:
                        raise

        def guarded(name: str) -> Any:
            try:
                return one(name)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(tasks)) as threads:
            return dict(zip(tasks, threads.map(guarded, tasks), strict=True))

    def close(self) -> None:
        """Let all workers go."""
        import ray

        with self._lock:
            hired, self._hired = self._hired, []
        for worker in hired:
            with suppress(Exception):  # whatever it is, the worker is gone
                ray.kill(worker.actor)

    # ---- one worker

    def _hire(self) -> None:
        """Start a worker; if it cannot be used, say why."""
        import ray

        threads = {"OMP_NUM_THREADS": str(self._cpus)}
        hire = ray.remote(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            concurrency_groups={WORK: 1},
            runtime_env={"env_vars": threads},
        )
        actor = hire(Worker).remote()
        who = "A worker"
        try:
            about: About = ray.get(actor.about.remote(), timeout=START_S)
            who = f"Worker {about.name}"
            self._check(about)
            ready = actor.prepare.options(concurrency_group=WORK)
            found = ray.get(ready.remote(self._duty, gpu=self._gpus > 0))
            about = About(about.name, about.node, about.program, found)
            with self._lock:
                if self._hired:
                    self._check_like(about, self._hired[0].about)
                self._hired.append(worker := _Hired(actor, about))
            self._free.put(worker)
        except (ray.exceptions.RayError, PlaygroundError) as error:
            self.refused.append(f"{who} is not used: {_sentence(error)}")
            LOG.warning("%s", self.refused[-1])
            ray.kill(actor)

    def _check(self, about: About) -> None:
        """Raises ConfigError: it has another version, or cannot reach the log."""
        import ray

        if about.program != program():
            raise ConfigError(
                f"it runs version {about.program}, this is {program()}. Install the same version "
                "on every node."
            )
        url, here = self._duty.log_url or "", ray.get_runtime_context().get_node_id()
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

    def _followed(
        self,
        worker: _Hired,
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
                    actor.stop.remote()
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
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return f"Ray has not started it within {START_S:g} s; others may hold its cores."
    if "ModuleNotFoundError" in str(error):
        return "this program is not installed on its node. Install the same version on every node."
    return _died(error) if isinstance(error, ray.exceptions.RayError) else str(error)


def _died(error: Exception) -> str:
    """Why, as far as Ray knows."""
    text = str(error)
    if "low on memory" in text or "memory pressure" in text:
        return "it was killed because its node had run out of memory."
    if "node" in text.lower() and "died" in text.lower() and "process" not in text.lower():
        return "its node is gone."
    return "its process died."


# ---- Ray itself


def room_of(pool: Pool) -> tuple[float, int, int]:
    """GPUs and cores of a worker, and how many workers there is room for.

    Raises:
        ConfigError: the cluster has no room for what is asked.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, cards = ([int(n.get(kind, 0)) for n in nodes] for kind in ("CPU", "GPU"))
    gpus = pool.gpus if pool.gpus is not None else float(any(cards))
    cpus = pool.cpus
    if cpus is None:
        used = [
            c // max(1, int(g // gpus)) if gpus else c for c, g in zip(cores, cards, strict=True)
        ]
        fit = [c for c, g in zip(used, cards, strict=True) if c and g >= gpus]
        cpus = min(fit, default=1)
        if pool.workers is not None and not gpus:
            cpus = max(1, sum(cores) // pool.workers)
    room = sum(
        int(min(c // cpus, g // gpus if gpus else c)) for c, g in zip(cores, cards, strict=True)
    )
    wanted = room if pool.workers is None else pool.workers
    if not 0 < wanted <= room:
        raise ConfigError(
            f"The cluster has {sum(cores)} cores and {sum(cards)} GPUs: room for {room} workers "
            f"of {cpus} cores and {gpus:g} GPUs, not for {wanted}. Ask for fewer or smaller ones."
        )
    return gpus, cpus, wanted


def check_installed() -> None:
    """Raises ConfigError: Ray is not there."""
    try:
        metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        raise ConfigError("--ray needs Ray. Install it: pip install 'ray>=2.50,<3'.") from error


@contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """This process as a driver of a cluster; one that is connected already stays so.

    Args:
        cpus: cores that a local one counts with; by default all.

    Raises:
        ConfigError: there is no Ray, or no cluster at the address.
    """
    check_installed()
    # Ray asks for these in the environment only: report nothing home, leave device choice to us.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        quiet |= {"include_dashboard": False, "num_cpus": cpus}
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"There is no Ray cluster at {address!r:.100}: {first_line(error)}. Start one with "
            "ray start --head, or give local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def workers(pool: Pool, duty: Duty, *, one_device: bool = False) -> Iterator[Workers]:
    """Workers that hold the target ready; let go in the end."""
    with connected(pool.address):
        hired = Workers(pool, duty, one_device=one_device)
        try:
            yield hired
        finally:
            hired.close()
