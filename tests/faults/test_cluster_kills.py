"""kill -9 of workers and of the driver of a sweep on Ray: no trial is lost, none counted twice."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from storage import RunQuery
from tests.faults.children import Child, command
from tests.faults.conftest import Tally
from tests.faults.runs import opened
from tests.faults.test_kills import SEED, statuses_of, swept, timed

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow
DEAD_S = 60.0
MOST_RUNS = 500


def _enough(db: Path, least: int) -> bool:
    return num_completed(db) >= least and bool(at_work(db))


def test_a_sweep_on_ray_whose_workers_and_driver_are_killed(
    tiny: Path, tmp_path: Path, num_kills: dict[str, int], tally: Tally
) -> None:
    draw = random.Random(SEED)
    rest: tuple[object, ...] = (
        "--target",
        tiny,
        "--dtype",
        "float32",
        "--grid",
        "--method",
        "ngram",
    )
    rest += ("--vary", "max_draft_len=1:4", "--vary", "max_matching_ngram_size=1:3", "--suite")
    rest += ("starter", "--categories", "chat", "--max-new-tokens", 200, "--name", "s")
    ray = ("--ray", "local", "--workers", 2, "--worker-cpus", 1)
    timed(tmp_path, "sweep", "--db", tmp_path / "whole.db", *rest)
    whole = swept(tmp_path / "whole.db")
    db, num_killed = tmp_path / "runs.db", 0
    asked: tuple[object, ...] = ("sweep", "--db", db, *rest, *ray)
    while num_killed < num_kills["ray"]:
        child = Child(tmp_path, command, *asked)
        asked = ("sweep", "--db", db, "--resume", "s", *ray)
        while num_killed < num_kills["ray"]:
            answered = num_completed(db)
            enough = answered + draw.randint(1, 3)
            if not child.until(partial(_enough, db, enough)):
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
        if db.exists() and statuses_of(db) == ["completed"]:
            break
    if statuses_of(db) != ["completed"]:
        timed(tmp_path, *asked)
    with opened(db) as log:
        marks = [row.status for row in log.find(RunQuery(limit=MOST_RUNS)).rows]
        tally.wrongly_marked += sum(one not in ("completed", "interrupted") for one in marks)
        done = sum(status == "completed" for status in marks)
    expected = sum(len(answers) for _, answers in whole.values())
    print(
        f"{num_killed} kills, {len(whole)} trials: done {len(swept(db))}; {expected} answers: "
        f"repeated {done - expected}"
    )
    tally.end(num_killed, equal=swept(db) == whole)
    assert tally.wrongly_marked == 0 and tally.equal == tally.resumed, tally.line
    # a worker's death costs at most the round it was in
    assert 0 <= done - expected <= 2 * num_killed


def num_completed(db: Path) -> int:
    if not db.exists():
        return 0
    with opened(db) as log:
        return sum(row.status == "completed" for row in log.find(RunQuery(limit=MOST_RUNS)).rows)


def at_work(db: Path) -> list[str]:
    """Workers that are decoding, as `host/process`."""
    with opened(db) as log:
        return [
            row.labels["worker"]
            for row in log.find(RunQuery(limit=MOST_RUNS)).rows
            if row.status == "running"
        ]


def kill(worker: str) -> None:
    os.kill(int(worker.partition("/")[2]), signal.SIGKILL)


def await_dead(workers: list[str]) -> None:
    """Workers do not outlive their driver."""
    began_s = time.monotonic()
    while any(Path(f"/proc/{worker.partition('/')[2]}").exists() for worker in workers):
        assert time.monotonic() - began_s < DEAD_S, workers
        time.sleep(0.2)
