"""Nodes of a Ray cluster that differ: one that can measure, others that must not be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from playground.experiments.finished import finished_requests, pair_requests
from playground.experiments.worker import program
from storage import RunLog
from tests.postgres import Server

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "playground", "presets", "storage")
MODEL = "tests/tiny"
REVISION = "0" * 40
OTHER = "0.0.9"
WAIT_S = 400.0
ASKED = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
"""Without the token that a local Ray may have left at home: this cluster does not ask for it."""
CLUSTER = (
    "import json, sys\n"
    "from ray.cluster_utils import Cluster\n"
    "cluster = Cluster()\n"
    "for variables in json.loads(sys.argv[1]):\n"
    "    cluster.add_node(num_cpus=1, env_vars=variables, include_dashboard=False)\n"
    "print(cluster.address, flush=True)\n"
    "for _ in sys.stdin:\n"
    "    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)\n"
    "cluster.shutdown()\n"
)
COMMAND = (
    "from playground.cli.main import app\n"
    "from playground.experiments import cluster\n"
    "cluster.PLACEMENT_TIMEOUT_S = 5.0\n"  # so long are the cores of a lost node waited for
    "app()\n"
)


class Cluster(NamedTuple):
    address: str
    lose_a_node: Callable[[], object]
    """Kills the last one, and all that runs on it."""


@contextmanager
def cluster(*nodes: Mapping[str, str]) -> Iterator[Cluster]:
    """Nodes of one core, each with variables of its own."""
    command = [sys.executable, "-c", CLUSTER, json.dumps(nodes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=quiet()
    ) as process:
        told = process.stdin
        assert told is not None and process.stdout is not None
        try:
            yield Cluster(process.stdout.readline().strip(), lambda: told.write("\n"))
        finally:
            told.close()
            process.wait(WAIT_S)


def quiet(**more: str) -> dict[str, str]:
    """The variables of this process, without a network and with these."""
    return {**os.environ, **ASKED, **more}


def other_version(folder: Path) -> Path:
    """This program as it was before a change, under its version of then."""
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            (copy := folder / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    (folder / "storage" / "changed_since.py").touch()
    (about := folder / f"speculative_decoding_playground-{OTHER}.dist-info").mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: speculative-decoding-playground\nVersion: {OTHER}\n"
    )
    return folder


def models(folder: Path, model: Path | None) -> Path:
    """Where the hub's client keeps what it has fetched: this model, or nothing."""
    kept = folder / f"models--{MODEL.replace('/', '--')}"
    if model is not None:
        shutil.copytree(model, kept / "snapshots" / REVISION)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(REVISION)
    else:
        folder.mkdir()
    return folder


class Found(NamedTuple):
    code: int
    shown: str
    said: str

    @property
    def refused(self) -> list[str]:
        return [line for line in self.said.splitlines() if " is not used: " in line]


def bench(folder: Path, variables: Mapping[str, str], *asked: object) -> subprocess.Popen[str]:
    """`bench` from a folder without this program: Ray shows the driver's folder to workers."""
    folder.mkdir()
    always: tuple[str, ...]
    always = ("bench", "--target", MODEL, "--dtype", "float32", "--suite", "starter", "--json")
    always += ("--methods", "ngram", "--ignore-eos", "--worker-cpus", "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *always, *map(str, asked)],
        cwd=folder,
        env=quiet(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Found:
    with process:
        shown, said = process.communicate(timeout=WAIT_S)
    return Found(process.returncode, shown, said)


def test_nodes_of_another_version_or_without_the_model_are_left_out(
    tiny_folder: Path, tmp_path: Path, postgres: Server
) -> None:
    """Three nodes, of which one can measure: it does all, and the others are named with why."""
    with_it = str(models(tmp_path / "with", tiny_folder))
    good = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": with_it}
    old = {"PYTHONPATH": str(other_version(tmp_path / "old")), "HF_HUB_CACHE": with_it}
    lacking = {**good, "HF_HUB_CACHE": str(models(tmp_path / "without", None))}
    with cluster(good, old, lacking) as three, postgres.database("empty_log") as url:
        asked = ("--db", url, "--ray", three.address, "--workers", 3, "--max-new-tokens", 8)
        found = ended(bench(tmp_path / "driver", good, *asked))
        assert found.code == 0, found.said
        with RunLog.open(url) as log:
            (benchmark,) = log.benchmarks.list()
            requests = finished_requests(log, benchmark.id)
    assert benchmark.status == "completed"
    assert len(requests) == json.loads(found.shown)["report"]["num_done"] > 0
    (worker,) = {request.worker for request in requests}
    assert len(found.refused) == 2 and f"Worker {worker} is not used" not in found.said
    model, version = sorted(found.refused, key=lambda line: "version" in line)
    assert f"{MODEL}, and it is not in the local hub cache" in model
    mine, _, digest = program().partition(" ")
    assert f"it runs version {OTHER} (sources " in version and digest not in version.split(";")[0]
    assert f"this is {mine} {digest}. Install the same version on every node." in version


def test_what_a_lost_node_was_doing_is_done_by_another(
    tiny_folder: Path, tmp_path: Path, postgres: Server
) -> None:
    good = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(models(tmp_path / "models", tiny_folder))}
    with cluster(good, good) as two, postgres.database("empty_log") as url:
        asked = ("--db", url, "--ray", two.address, "--workers", 2, "--max-new-tokens", 200)
        process = bench(tmp_path / "driver", good, *asked)
        with RunLog.open(url) as log:
            while len({row.labels["worker"] for row in log.find().rows}) < 2:
                assert process.poll() is None, ended(process)
                time.sleep(0.2)
            two.lose_a_node()
            found = ended(process)
            assert found.code == 0, found.said
            (benchmark,) = log.benchmarks.list()
            requests = finished_requests(log, benchmark.id)
    assert benchmark.status == "completed"
    keys = [(request.configuration, request.key) for request in requests]
    assert len(set(keys)) == len(keys) == json.loads(found.shown)["report"]["num_done"] > 0
    own = [request for request in requests if request.configuration == "ngram"]
    plain = [request for request in requests if request.configuration != "ngram"]
    assert len(pair_requests(own, plain)) == len(own) == len(plain)
    assert found.said.count(" is gone: ") == 1
