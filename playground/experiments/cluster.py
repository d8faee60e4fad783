"""Ray: workers that keep a target loaded and measure one plan after another.

A worker is a process with its own target and its own connection to the log. When it dies, another
one measures the rest of its plan.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from engine.errors import ConfigError, PlaygroundError, first_line
from playground.experiments.measurement import Progress, Summary, check_same_target
from playground.experiments.plan import ExperimentPlan
from playground.experiments.worker import About, Worker, WorkerConfig, program

LOG = logging.getLogger(__name__)
LOCAL = "local"
POLL_S = 0.3  # between two polls of a worker for its progress
PLACEMENT_TIMEOUT_S, MAX_LOST = 120.0, 3
"""How long to wait for cores that are in use, and how many workers a plan may lose."""
WORK = "work"  # Ray's concurrency group of the one thread that measures
_RAY_LOCK = threading.Lock()
_CONNECTIONS: list[str] = []
"""An address per open `connected` block: a process has one connection to Ray."""


class WorkerLostError(PlaygroundError):
    """Every worker that measured a plan died."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How much of a cluster to use. By default as many workers as fit, each with all cores of a
    node, and a GPU where there is one.

    Attributes:
        address: `local` to start Ray on this machine, else any address that `ray.init` takes.
    """

    address: str
    workers: int | None = None
    cpus: int | None = None
    gpus: float | None = None


@contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """Connect this process to a cluster; the last block to end disconnects it.

    Raises ConfigError: Ray is not installed, there is no such cluster, or another one is in use.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed. Install it: pip install 'speculative-decoding-playground[ray]'."
        )
    # Ray asks for these in the environment only: report nothing home, leave device choice to us.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token = Path.home() / ".ray" / "auth_token"
    if address != LOCAL and "ray" not in sys.modules and token.exists():
        # A cluster started with a token requires it. Ray reads this variable when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    with _RAY_LOCK:
        if not ray.is_initialized():
            local = {"include_dashboard": False, "num_cpus": cpus} if address == LOCAL else {}
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise ConfigError(
                    f"No Ray cluster answers at {address!r:.100}: {first_line(error)}. Start one "
                    "with ray start --head, or give local."
                ) from error
        elif address not in _CONNECTIONS:
            raise ConfigError(
                f"An experiment is running on Ray at {', '.join(_CONNECTIONS)}. Wait until it is "
                "done: a process uses one cluster at a time."
            )
        _CONNECTIONS.append(address)
    try:
        yield
    finally:
        with _RAY_LOCK:
            _CONNECTIONS.remove(address)
            if not _CONNECTIONS:
                ray.shutdown()


def worker_capacity(pool: PoolConfig) -> tuple[float, int, int]:
    """GPUs and cores of each worker, and the number of workers.

    Raises ConfigError: they do not fit on the cluster.
    """
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in resources]
    cores, cards = (sum(counts) for counts in zip(*nodes, strict=True))
    gpus = pool.gpus if pool.gpus is not None else float(cards > 0)
    shares = [c // max(1, int(g // gpus)) if gpus else c for c, g in nodes if g >= gpus]
    evenly = 0 if gpus or not pool.workers else max(1, cores // pool.workers)
    cpus = pool.cpus or evenly or min(filter(None, shares), default=1)
    capacity = sum(int(min(c // cpus, g // gpus if gpus else c)) for c, g in nodes)
    num_workers = pool.workers or capacity
    if not 0 < num_workers <= capacity:
        raise ConfigError(
            f"The cluster has {cores} cores and {cards} GPUs: room for {capacity} workers of "
            f"{cpus} cores and {gpus:g} GPUs, not for {num_workers}. Ask for fewer or smaller "
            "workers."
        )
    return gpus, cpus, num_workers


class Workers:
    """The workers of one experiment, for any thread; `rejections` say why others are not used."""

    def __init__(
        self,
        pool: PoolConfig,
        config: WorkerConfig,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start them, all on the same kind of device as the first.

        Raises ConfigError: no worker can be used; CancelledError: it was cancelled meanwhile.
        """
        self._config, self._cancelled = config, cancelled
        self._gpus, self._cpus, num_workers = worker_capacity(pool)
        self._lock = threading.Lock()
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._actors: dict[Any, About] = {}
        self._placement_groups: dict[Any, Any] = {}
        """The cores that Ray has reserved for each worker."""
        self._titles: dict[str, str] = {}
        """What each busy worker measures."""
        self.rejections: list[str] = []
        try:
            with ThreadPoolExecutor(num_workers) as threads:
                list(threads.map(lambda _: self._start(), range(num_workers)))
            if cancelled():
                raise CancelledError
            if not self._actors:
                raise ConfigError(f"No worker can be used. {' '.join(self.rejections)}")
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where the first worker runs."""
        return next(iter(self._actors.values())).environment

    def rows(self) -> list[tuple[str, str, str]]:
        """Name and device of every worker, and what it measures."""
        with self._lock:
            workers = list(self._actors.values())
        return [(one.name, one.device, self._titles.get(one.name, "idle")) for one in workers]

    def measure(
        self,
        plan: ExperimentPlan,
        benchmark_id: str,
        *,
        title: str,
        trial: str = "",
        on_progress: Callable[[Progress], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Summary:
        """Measure a plan on a free worker; if the worker dies, on another one.

        Raises WorkerLostError; PlaygroundError: no worker is left, and none could be started; and
        whatever measuring raises.
        """
        for attempt in range(1, MAX_LOST + 1):
            actor = self._free.get()
            if actor is None:
                self._free.put(None)
                raise PlaygroundError(f"No worker is left. {' '.join(self.rejections)}")
            name = self._actors[actor].name
            self._titles[name] = title
            try:
                measure = actor.measure.options(concurrency_group=WORK)
                done = measure.remote(plan, benchmark_id, trial)
                return self._follow(actor, done, on_progress, cancelled)
            except WorkerLostError as error:
                LOG.warning("%s", error)
                self._remove(actor)
                actor = None
                self._start()
                if not self._actors:
                    self._free.put(None)
                if attempt == MAX_LOST:
                    raise
            finally:
                if actor is not None:
                    self._titles.pop(name, None)
                    self._free.put(actor)
        raise AssertionError

    def measure_all(
        self,
        plans: Mapping[str, ExperimentPlan],
        benchmark_id: str,
        *,
        on_progress: Callable[[str, Progress], object],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Summary:
        """Measure plans, given by their titles, on free workers; one that fails stops the rest."""
        failed = threading.Event()
        stopped = lambda: cancelled() or failed.is_set()  # noqa: E731

        def measure_one(title: str) -> Summary:
            plan, forward = plans[title], partial(on_progress, title)
            try:
                return self.measure(
                    plan, benchmark_id, title=title, on_progress=forward, cancelled=stopped
                )
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(plans)) as threads:
            return Summary.of(list(threads.map(measure_one, plans)))

    def close(self) -> None:
        """Stop all workers."""
        for actor in list(self._actors):
            self._remove(actor)

    # ---- one worker

    def _start(self) -> None:
        """Start a worker; if it cannot be used, add the reason to `rejections`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = {"CPU": self._cpus} | ({"GPU": self._gpus} if self._gpus else {})
        group = ray.util.placement_group([share])
        options = {
            "num_cpus": self._cpus,
            "num_gpus": self._gpus,
            "concurrency_groups": {WORK: 1},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        threads = {"env_vars": {"OMP_NUM_THREADS": str(self._cpus)}}
        actor = ray.remote(runtime_env=threads, **options)(Worker).remote()
        self._placement_groups[actor] = group
        who = "A worker"
        try:
            self._wait_until(lambda: bool(group.wait(POLL_S)), PLACEMENT_TIMEOUT_S)
            about: About = self._result(actor.about.remote())
            who = f"Worker {about.name}"
            self._check_info(about)
            prepare = actor.prepare.options(concurrency_group=WORK)
            environment = self._result(prepare.remote(self._config, gpu=self._gpus > 0))
            about = replace(about, environment=environment)
            with self._lock:
                first = next(iter(self._actors.values()), about)
                check_same_target(first.environment, environment)
                self._actors[actor] = about
            self._free.put(actor)
        except CancelledError:
            self._remove(actor)
        except (ray.exceptions.RayError, PlaygroundError) as error:
            cause = getattr(error, "cause", error)
            why = str(cause) if isinstance(cause, PlaygroundError) else f"{first_line(cause)}."
            if "ModuleNotFoundError" in str(error):
                why = (
                    "this program is not installed on its node. Install the same version on every "
                    "node."
                )
            self.rejections.append(f"{who} is not used: {why}")
            LOG.warning("%s", self.rejections[-1])
            self._remove(actor)

    def _remove(self, actor: Any) -> None:
        import ray

        with self._lock:
            self._actors.pop(actor, None)
        with suppress(Exception):  # the worker is gone in any case
            ray.kill(actor)
            ray.util.remove_placement_group(self._placement_groups.pop(actor))

    def _wait_until(self, is_ready: Callable[[], bool], timeout_s: float = math.inf) -> None:
        """Raises CancelledError: the start was cancelled; ConfigError: the timeout has passed."""
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if self._cancelled():
                raise CancelledError
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"Ray has no cores for it within {timeout_s:g} s; others may hold them."
                )

    def _result(self, object_ref: Any) -> Any:
        """The result of a call to a worker, which may take its time to start."""
        import ray

        self._wait_until(lambda: bool(ray.wait([object_ref], timeout=POLL_S)[0]))
        return ray.get(object_ref)

    def _check_info(self, about: About) -> None:
        """Raises ConfigError: the worker has another version, or cannot reach the log."""
        import ray

        if about.program != program():
            raise ConfigError(
                f"it runs version {about.program}; this is {program()}. Install the same version "
                "on every node."
            )
        url, node = self._config.log_url or "", ray.get_runtime_context().get_node_id()
        if url.startswith("sqlite") and about.node != node:
            raise ConfigError(
                "it is on another machine, where it cannot write to a SQLite file. Give "
                "--db postgresql+psycopg://…"
            )

    def _follow(
        self,
        actor: Any,
        summary: Any,
        on_progress: Callable[[Progress], object],
        cancelled: Callable[[], bool],
    ) -> Summary:
        """The summary that a worker's call returns. Raises WorkerLostError: the worker died."""
        import ray

        stop_sent = False
        try:
            done: list[Any] = []
            while not done:
                done, _ = ray.wait([summary], timeout=POLL_S)
                for progress in ray.get(actor.take_progress.remote()):
                    on_progress(progress)
                if cancelled() and not stop_sent:
                    stop_sent = True
                    ray.get(actor.stop.remote())  # a late one would stop the next plan
            returned: Summary = ray.get(summary)
            return returned
        except ray.exceptions.RayTaskError as error:
            if isinstance(cause := error.cause, Exception):
                raise cause from None
            raise
        except ray.exceptions.RayError as error:
            name = self._actors[actor].name
            raise WorkerLostError(f"Worker {name} is gone: {first_line(error)}") from error


@contextmanager
def workers(pool: PoolConfig, config: WorkerConfig, **more: Any) -> Iterator[Workers]:
    """Workers that have loaded the target, stopped at the end; `more` is passed to `Workers`."""
    with connected(pool.address), closing(Workers(pool, config, **more)) as running:
        yield running
