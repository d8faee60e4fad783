"""kill -9 of workers and of the driver of a sweep on Ray: no trial is lost, none counted twice."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from storage import RunLog, RunQuery
from tests.faults.children import Child, command, words
from tests.faults.runs import check_marks, ids_of
from tests.faults.test_kills import SEED, Action, swept, timed

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
DEAD_S = 60.0


def test_a_sweep_on_ray_whose_workers_and_driver_are_killed(
    tiny: Path, tmp_path: Path, num_kills: dict[str, int]
) -> None:
    draw, folder = random.Random(SEED), tmp_path / "ray"
    line = (
        "sweep --dtype float32 --grid --method ngram --vary max_draft_len=1:4 --vary "
        "max_matching_ngram_size=1:3 --suite starter --categories chat --max-new-tokens 200 "
        "--name s --target {} --db {}"
    )
    sweep, ray = Action(line, "runs.db", swept), words("--ray local --workers 2 --worker-cpus 1")
    timed(tmp_path, *sweep.words(tiny, tmp_path / "whole"))
    whole = swept(tmp_path / "whole")
    db, num_killed = folder / "runs.db", 0
    while num_killed < num_kills["ray"]:
        child = Child(tmp_path, command, *sweep.words(tiny, folder), *ray)
        while num_killed < num_kills["ray"]:
            enough = len(ids_of(db, "completed")) + draw.randint(1, 3)
            if not child.until(partial(_answered_and_at_work, db, enough)):
                break
            workers = at_work(db)
            num_killed += 1
            if num_killed % 2:
                kill(draw.choice(workers))
                continue
            assert child.kill(), child.errors
            await_dead(workers)
            break
        if num_killed == num_kills["ray"] or child.process.exitcode is None:
            assert child.ended() in (0, -signal.SIGKILL), child.errors
        if statuses_of(db) == ["completed"]:
            break
    if statuses_of(db) != ["completed"]:
        timed(tmp_path, *sweep.words(tiny, folder), *ray)
    check_marks(db)
    done = len(ids_of(db, "completed"))
    expected = sum(len(answers) for _, answers in whole.values())
    assert swept(folder) == whole
    # a worker's death costs at most the round it was in
    assert 0 <= done - expected <= 2 * num_killed


def _answered_and_at_work(db: Path, least: int) -> bool:
    return len(ids_of(db, "completed")) >= least and bool(at_work(db))


def statuses_of(db: Path) -> list[str]:
    """How the log's sweeps stand; none if it is not there yet."""
    if not db.exists():
        return []
    with RunLog.open(str(db)) as log:
        return [sweep.status for sweep in log.benchmarks.list(sweeps=True)]


def at_work(db: Path) -> list[str]:
    """Workers that are decoding, as `host/process`."""
    with RunLog.open(str(db)) as log:
        return [row.labels["worker"] for row in log.rows(RunQuery(status="running"))]


def kill(worker: str) -> None:
    os.kill(int(worker.partition("/")[2]), signal.SIGKILL)


def await_dead(workers: list[str]) -> None:
    """Workers do not outlive their driver."""
    began_s = time.monotonic()
    while any(Path(f"/proc/{worker.partition('/')[2]}").exists() for worker in workers):
        assert time.monotonic() - began_s < DEAD_S, workers
        time.sleep(0.2)
