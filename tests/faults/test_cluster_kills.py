"""kill -9 of workers and of the driver of a sweep on Ray: no trial is lost, none counted twice."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from storage import RunLog, RunQuery
from tests.faults.children import Child, command, words
from tests.faults.runs import check_marks, ids_of
from tests.faults.test_kills import Action, swept, timed

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
DEAD_S = 60.0


def test_a_sweep_on_ray_survives_the_death_of_a_worker_and_of_its_driver(
    tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ray"
    line = (
        "sweep --dtype float32 --grid --method ngram --vary max_draft_len=1:3 --vary "
        "max_matching_ngram_size=1:2 --suite starter --categories chat --max-new-tokens 200 "
        "--name s --target {} --db {}"
    )
    sweep, ray = Action(line, "runs.db", swept), words("--ray local --workers 2 --worker-cpus 1")
    timed(tmp_path, *sweep.words(tiny, tmp_path / "whole"))
    whole = swept(tmp_path / "whole")
    db = folder / "runs.db"
    child = Child(tmp_path, command, *sweep.words(tiny, folder), *ray)
    assert child.until(partial(_answered_and_at_work, db, 2)), child.errors
    kill(at_work(db)[0])
    assert child.until(partial(_answered_and_at_work, db, 5)), child.errors
    workers = at_work(db)
    assert child.kill(), child.errors
    await_dead(workers)
    timed(tmp_path, *sweep.words(tiny, folder), *ray)
    check_marks(db)
    assert swept(folder) == whole
    done = len(ids_of(db, "completed"))
    expected = sum(len(answers) for _, answers in whole.values())
    assert 0 <= done - expected <= 4, "a death costs at most the round that it was in"


def _answered_and_at_work(db: Path, least: int) -> bool:
    return len(ids_of(db, "completed")) >= least and bool(at_work(db))


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
