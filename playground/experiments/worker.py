"""A worker of a cluster: a process that keeps a target loaded and measures plans on it."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from engine.model.sources import TargetSpec
from playground.experiments.measurement import Measurement, Progress, Summary
from playground.experiments.plan import ExperimentPlan
from playground.host.environment import environment
from playground.host.models import Models
from storage import RunLog


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The target that a worker loads, and the log that it writes to."""

    target: TargetSpec
    dtype: str
    log_url: str | None = None
    device: str = "auto"
    cache_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class About:
    """A worker's name, as `host/process`, its version, and where it runs."""

    name: str
    node: str
    program: str
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.environment.get("device_name", ""))


@functools.cache
def program() -> str:
    """This program's version, with a digest of its sources: workers must have the same."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for room in ("engine", "playground", "presets", "storage"):
        for file in sorted((root / room).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    version = metadata.version("speculative-decoding-playground")
    return f"{version} (sources {digest.hexdigest()[:8]})"


class Worker:
    """The actor. `prepare` and `measure` share a thread of their own."""

    def __init__(self) -> None:
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._progress: SimpleQueue[Progress] = SimpleQueue()
        self._stop = threading.Event()

    def about(self) -> About:
        """Called first: between versions, only this method stays as it is."""
        import ray

        return About(self._name, ray.get_runtime_context().get_node_id(), program())

    def prepare(self, config: WorkerConfig, *, gpu: bool) -> Mapping[str, Any]:
        """Load the target; returns the environment."""
        import presets
        from playground.host import paths

        device = "cpu" if config.device == "auto" and not gpu else config.device
        cache_dir = config.cache_dir or paths.cache_dir()
        self._log = RunLog.open(config.log_url)
        self._models = Models(cache_dir=cache_dir, device=device, resolve=presets.resolve)
        target = self._models.target(config.target, config.dtype, lambda words, share: None)
        return environment(target)

    def measure(self, plan: ExperimentPlan, benchmark_id: str, trial: str) -> Summary:
        """Measure whatever the log lacks of a plan."""
        self._stop.clear()
        measurement = Measurement(
            plan=plan,
            log=self._log,
            benchmark_id=benchmark_id,
            trial=trial,
            on_progress=self._progress.put,
            cancelled=self._stop.is_set,
            worker=self._name,
        )
        try:
            return measurement.run(self._models.build_context())
        finally:
            self._models.release()

    def take_progress(self) -> list[Progress]:
        """The progress of the measurement since the last call."""
        return [self._progress.get_nowait() for _ in range(self._progress.qsize())]

    def stop(self) -> None:
        self._stop.set()
