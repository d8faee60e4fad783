"""Ray: workers that keep a target loaded and do one task after another.

A task is any function of a `TaskContext`. Ray sends it to a worker, a process with a target and a
link to the log of its own, and reports a worker that dies; another one does what was lost, starting
from what the log already has.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.experiments.measurement import check_same_target
from playground.experiments.worker import About, Task, Worker, WorkerConfig, program

LOG = logging.getLogger(__name__)
LOCAL = "local"
LOOK_S = 0.3  # so often the driver asks a worker how far it is
QUEUE_S, MAX_LOST = 120.0, 3
"""Longest wait for cores that others hold, and how many workers a task may lose."""
WORK = "work"  # the actor's one thread that computes; others answer for it meanwhile
_USING = threading.Lock()
_USERS: list[str] = []
"""Addresses that are in use, once for each user: Ray is one for a process."""


class WorkerLostError(PlaygroundError):
    """Worker after worker died over a task."""


class NoWorkerError(PlaygroundError):
    """No worker is left, and none could be started; what was to be done can be resumed."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How much of a cluster is used: as many workers as there is room for unless it is said, each
    with all cores of a node, and a GPU where there is one.

    Attributes:
        address: `local` for a Ray of this machine's own, else as Ray takes it.
    """

    address: str
    workers: int | None = None
    cpus: int | None = None
    gpus: float | None = None


@contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """This process as a driver of a cluster, until the last of those who use it is done.

    Raises ConfigError: there is no Ray, no such cluster, or another one is in use."""
    if find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed. Install it: pip install 'speculative-decoding-playground[ray]'."
        )
    # Ray asks for these in the environment only: report nothing home, leave device choice to us.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token = Path.home() / ".ray" / "auth_token"
    if address != LOCAL and "ray" not in sys.modules and token.exists():
        # `ray start` asks for it where there is one, and Ray shows it to others only if told so
        # before it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    with _USING:
        if not ray.is_initialized():
            local = {"include_dashboard": False, "num_cpus": cpus} if address == LOCAL else {}
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise ConfigError(
                    f"No Ray cluster answers at {address!r:.100}: {first_line(error)}. Start one "
                    "with ray start --head, or give local."
                ) from error
        elif address not in _USERS:
            raise ConfigError(
                f"An experiment is running on Ray at {', '.join(_USERS)}. Wait until it is done: a "
                "process uses one cluster at a time."
            )
        _USERS.append(address)
    try:
        yield
    finally:
        with _USING:
            _USERS.remove(address)
            if not _USERS:
                ray.shutdown()


def worker_capacity(pool: Pool) -> tuple[float, int, int]:
    """GPUs and cores of a worker, and how many workers there are to be.

    Raises ConfigError: the cluster has no room for as many.
    """
    import ray

    here = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in here]
    cores, cards = (sum(counts) for counts in zip(*nodes, strict=True))
    gpus = pool.gpus if pool.gpus is not None else float(cards > 0)
    shares = [c // max(1, int(g // gpus)) if gpus else c for c, g in nodes if g >= gpus]
    evenly = 0 if gpus or not pool.workers else max(1, cores // pool.workers)
    cpus = pool.cpus or evenly or min(filter(None, shares), default=1)
    room = sum(int(min(c // cpus, g // gpus if gpus else c)) for c, g in nodes)
    size = pool.workers or room
    if not 0 < size <= room:
        raise ConfigError(
            f"The cluster has {cores} cores and {cards} GPUs: room for {room} workers of {cpus} "
            f"cores and {gpus:g} GPUs, not for {size}. Ask for fewer or smaller workers."
        )
    return gpus, cpus, size


class Workers:
    """The workers of one experiment, for any thread; and why others are `refused`."""

    def __init__(
        self,
        pool: Pool,
        config: WorkerConfig,
        *,
        one_device: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start them, with `one_device` only on the kind of device that the first one has.

        Raises ConfigError: no worker can be used; CancelledError: it was cancelled meanwhile.
        """
        self._config, self._one_device, self._cancelled = config, one_device, cancelled
        self._gpus, self._cpus, size = worker_capacity(pool)
        self._lock = threading.Lock()
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._actors: dict[Any, About] = {}
        self._places: dict[Any, Any] = {}
        """The cores that Ray has given to each worker."""
        self._busy: dict[str, str] = {}
        self.refused: list[str] = []
        try:
            with ThreadPoolExecutor(size) as threads:
                list(threads.map(lambda _: self._start(), range(size)))
            if cancelled():
                raise CancelledError
            if not self._actors:
                raise ConfigError(f"No worker can be used. {' '.join(self.refused)}")
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where the first worker runs."""
        return next(iter(self._actors.values())).environment

    def rows(self) -> list[tuple[str, str, str]]:
        """Every worker: name, device, what it does."""
        with self._lock:
            workers = list(self._actors.values())
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

        Raises WorkerLostError, NoWorkerError; and what the task raises.
        """
        for attempt in range(1, MAX_LOST + 1):
            actor = self._free.get()
            if actor is None:
                self._free.put(None)
                raise NoWorkerError(f"No worker is left. {' '.join(self.refused)}")
            name = self._actors[actor].name
            self._busy[name] = title
            try:
                return self._follow(actor, task, tell, cancelled)
            except WorkerLostError as error:
                LOG.warning("%s", error)
                self._dismiss(actor)
                actor = None
                self._start()
                if not self._actors:
                    self._free.put(None)
                if attempt == MAX_LOST:
                    raise
            finally:
                if actor is not None:
                    self._busy.pop(name, None)
                    self._free.put(actor)
        raise AssertionError

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

    def close(self) -> None:
        """Stop all workers."""
        for actor in list(self._actors):
            self._dismiss(actor)

    # ---- one worker

    def _start(self) -> None:
        """Start a worker; if it cannot be used, say why."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {"CPU": self._cpus} | ({"GPU": self._gpus} if self._gpus else {})
        place = ray.util.placement_group([share])
        options = {
            "num_cpus": self._cpus,
            "num_gpus": self._gpus,
            "concurrency_groups": {WORK: 1},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place),
        }
        threads = {"env_vars": {"OMP_NUM_THREADS": str(self._cpus)}}
        actor = ray.remote(runtime_env=threads, **options)(Worker).remote()
        self._places[actor] = place
        who = "A worker"
        try:
            self._await_cores(place)
            about: About = self._await(actor.about.remote())
            who = f"Worker {about.name}"
            self._check(about)
            prepare = actor.prepare.options(concurrency_group=WORK)
            environment = self._await(prepare.remote(self._config, gpu=self._gpus > 0))
            about = replace(about, environment=environment)
            with self._lock:
                self._check_like_first(about)
                self._actors[actor] = about
            self._free.put(actor)
        except CancelledError:
            self._dismiss(actor)
        except (ray.exceptions.RayError, PlaygroundError) as error:
            self.refused.append(f"{who} is not used: {_sentence(error)}")
            LOG.warning("%s", self.refused[-1])
            self._dismiss(actor)

    def _dismiss(self, actor: Any) -> None:
        import ray

        with self._lock:
            self._actors.pop(actor, None)
        with suppress(Exception):  # whatever it is, the worker is gone
            ray.kill(actor)
            ray.util.remove_placement_group(self._places.pop(actor))

    def _await_cores(self, place: Any) -> None:
        """Raises ConfigError: there are none for QUEUE_S; CancelledError: nobody waits any more.

        Only cores are waited for so long: a process that has them may take its time to start.
        """
        until = time.monotonic() + QUEUE_S
        while not place.wait(LOOK_S):
            if self._cancelled():
                raise CancelledError
            if time.monotonic() > until:
                raise ConfigError(
                    f"Ray has no cores for it within {QUEUE_S:g} s; others may hold them."
                )

    def _await(self, answer: Any) -> Any:
        """What a worker answers; raises CancelledError when nobody waits for it any more."""
        import ray

        while not ray.wait([answer], timeout=LOOK_S)[0]:
            if self._cancelled():
                raise CancelledError
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

    def _check_like_first(self, about: About) -> None:
        first = next(iter(self._actors.values()), about)
        check_same_target(first.environment, about.environment)
        if self._one_device and about.device != first.device:
            raise ConfigError(
                f"it runs on {about.device}, but {first.name} on {first.device}, and the best "
                "settings for one are not those for the other. Sweep each kind by itself."
            )

    def _follow(
        self,
        actor: Any,
        task: Task,
        tell: Callable[[Any], object],
        cancelled: Callable[[], bool],
    ) -> Any:
        """Raises WorkerLostError: the worker died."""
        import ray

        asked_to_stop = False
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
            name = self._actors[actor].name
            raise WorkerLostError(f"Worker {name} is gone: {first_line(error)}") from error


def _sentence(error: Exception) -> str:
    """What is wrong with a worker, in a sentence."""
    cause = getattr(error, "cause", error)
    if "ModuleNotFoundError" in str(error):
        return "this program is not installed on its node. Install the same version on every node."
    return str(cause) if isinstance(cause, PlaygroundError) else f"{first_line(cause)}."


@contextmanager
def workers(pool: Pool, config: WorkerConfig, **more: Any) -> Iterator[Workers]:
    """Workers that have loaded the target, `more` as `Workers` takes it; stopped at the end."""
    with connected(pool.address):
        running = Workers(pool, config, **more)
        try:
            yield running
        finally:
            running.close()
