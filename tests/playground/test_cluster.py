"""Workers on a local Ray: who is refused, what is lost with one, and what ratios do not show."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, OutOfMemoryError, PlaygroundError
from engine.model.sources import TargetSpec
from playground.experiments import cluster
from playground.experiments.cluster import PoolConfig, Workers, connected, workers
from playground.experiments.measurement import Progress, Summary
from playground.experiments.worker import Worker, WorkerConfig

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
TWO = PoolConfig("local", workers=2, cpus=1)


class Doing(Worker):
    """Does what it is told instead of measuring."""

    def measure(self, plan: Any, benchmark_id: str, trial: str) -> Any:
        return plan(self)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """One Ray for all tests here."""
    with connected("local", cpus=3), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "Worker", Doing)
        yield


@pytest.fixture(scope="module")
def worker_config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tmp_path_factory.mktemp("cluster")
    spec = TargetSpec(name="tiny", path=str(tiny_folder))
    return WorkerConfig(spec, "float32", str(folder / "runs.db"), "cpu", folder / "cache")


@pytest.fixture(scope="module")
def two(local_ray: None, worker_config: WorkerConfig) -> Iterator[Workers]:
    with workers(TWO, worker_config) as running:
        yield running


def told(workers: Workers, *tasks: Any, on_progress: Any = lambda *progress: None) -> Any:
    """What came of tasks that are done at once."""
    plans = {str(n): task for n, task in enumerate(tasks)}
    return workers.measure_all(plans, "", on_progress=on_progress)


def where(worker: Doing, number: int) -> Summary:
    worker._progress.put(Progress(number, 4, worker.about().name, None))
    notes = worker._models.build_context().target.name, str(torch.get_num_threads())
    return Summary(False, 1, 0, (), notes={str(number): notes})


def test_every_worker_keeps_a_target_and_its_own_cores(two: Workers) -> None:
    progress: list[tuple[str, Progress]] = []
    tasks = [partial(where, number=n) for n in range(4)]
    summary = told(two, *tasks, on_progress=lambda *one: progress.append(one))
    assert summary.num_new == 4
    assert summary.notes == {str(n): ("tiny", "1") for n in range(4)}
    names = {name for name, *_ in two.rows()}
    assert len(names) == 2 and {one.message for _, one in progress} <= names
    assert sorted((title, one.num_done) for title, one in progress) == [
        (str(n), n) for n in range(4)
    ]


def dies(worker: Doing) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_plan_that_kills_every_worker_is_given_up(
    two: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {name for name, *_ in two.rows()}
    monkeypatch.setattr(cluster, "MAX_LOST", 2)
    with pytest.raises(cluster.WorkerLostError, match="is gone"):
        told(two, dies)
    assert len(two.rows()) == 2 and before - {name for name, *_ in two.rows()}
    assert len([message for message in caplog.messages if " is gone: " in message]) == 2


def out_of_memory(worker: Doing) -> None:
    raise OutOfMemoryError("tiny needs 900 GiB.")


def test_what_measuring_raises_is_raised_here(two: Workers) -> None:
    with pytest.raises(OutOfMemoryError, match=r"^tiny needs 900 GiB\.$"):
        told(two, out_of_memory)
    assert told(two, partial(where, number=1)).num_new == 1


def test_a_worker_whose_node_lacks_the_program_is_refused(
    worker_config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = ModuleType("only_here")
    device = type("Device", (str,), {"__module__": "only_here"})
    vars(only_here)["Device"] = device
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with (
        pytest.raises(ConfigError, match="is not installed on its node. Install the same version"),
        workers(PoolConfig("local", 1, 1), replace(worker_config, device=device("cpu"))),
    ):
        pass


def test_more_than_the_cluster_has_is_refused_at_once(worker_config: WorkerConfig) -> None:
    for pool in (PoolConfig("local", workers=99, cpus=1), PoolConfig("local", gpus=1)):
        with (
            pytest.raises(ConfigError, match="Ask for fewer or smaller workers"),
            workers(pool, worker_config),
        ):
            pass


def test_cores_that_others_hold_are_not_waited_for_long(
    two: Workers, worker_config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    held = ray.util.placement_group([{"CPU": 1}])
    assert held.wait(60)
    monkeypatch.setattr(cluster, "PLACEMENT_TIMEOUT_S", 0.5)
    try:
        with pytest.raises(ConfigError, match=r"within 0\.5 s; others may hold them"):
            Workers(TWO, worker_config)
        with pytest.raises(CancelledError):
            Workers(TWO, worker_config, cancelled=lambda: True)
    finally:
        ray.util.remove_placement_group(held)


def test_an_experiment_without_workers_ends_and_blames_no_task(
    worker_config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(PoolConfig("local", 1, 1), worker_config) as alone:
        monkeypatch.setattr(Workers, "_start", lambda self: None)
        for _ in range(2):
            with pytest.raises(PlaygroundError, match="No worker is left"):
                told(alone, dies)
