"""Nodes of a Ray cluster that differ: one that can measure, others that must not be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from playground.experiments.statistics import finished_requests
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
    "sys.stdin.read()\n"
    "cluster.shutdown()\n"
)
COMMAND = "from playground.cli.main import app; app()"


@contextmanager
def cluster(*nodes: Mapping[str, str]) -> Iterator[str]:
    """The address of nodes of one core, each with variables of its own."""
    command = [sys.executable, "-c", CLUSTER, json.dumps(nodes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=quiet()) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
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


def bench(
    folder: Path, variables: Mapping[str, str], *asked: object
) -> subprocess.CompletedProcess[str]:
    """`bench` from a folder without this program: Ray shows the driver's folder to workers."""
    folder.mkdir()
    always: tuple[str, ...]
    always = ("bench", "--target", MODEL, "--dtype", "float32", "--suite", "starter", "--json")
    always += ("--methods", "ngram", "--ignore-eos", "--worker-cpus", "1")
    command = [sys.executable, "-P", "-c", COMMAND, *always, *map(str, asked)]
    env = quiet(**variables)
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S
    )


def test_nodes_of_another_version_or_without_the_model_are_left_out(
    tiny_folder: Path, tmp_path: Path, postgres: Server
) -> None:
    """Three nodes, of which one can measure: it does all, and the others are named with why."""
    with_it = str(models(tmp_path / "with", tiny_folder))
    good = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": with_it}
    old = {"PYTHONPATH": str(other_version(tmp_path / "old")), "HF_HUB_CACHE": with_it}
    lacking = {**good, "HF_HUB_CACHE": str(models(tmp_path / "without", None))}
    with cluster(good, old, lacking) as address, postgres.database("empty_log") as url:
        asked = ("--db", url, "--ray", address, "--workers", 3, "--max-new-tokens", 8)
        done = bench(tmp_path / "driver", good, *asked)
        assert done.returncode == 0, done.stderr
        with RunLog.open(url) as log:
            (benchmark,) = log.benchmarks.list()
            requests = finished_requests(log, benchmark.id)
    assert benchmark.status == "completed"
    assert len(requests) == json.loads(done.stdout)["report"]["num_done"] > 0
    (worker,) = {request.worker for request in requests}
    refused = [line for line in done.stderr.splitlines() if " is not used: " in line]
    assert len(refused) == 2 and f"Worker {worker} is not used" not in done.stderr
    model, version = sorted(refused, key=lambda line: "version" in line)
    assert f"{MODEL}, and it is not in the local hub cache" in model
    mine, _, digest = program().partition(" ")
    assert f"it runs version {OTHER} (sources " in version and digest not in version.split(";")[0]
    assert f"this is {mine} {digest}. Install the same version on every node." in version
