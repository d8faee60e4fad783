"""`app.py bench --ray`: the same answers as in one process, every one by a named worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from playground.cli.main import app
from playground.experiments.finished import finished_requests, in_pairs
from storage import RunLog

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow


def bench(tiny_folder: Path, db: Path, *more: object, code: int = 0) -> Any:
    asked = ("bench", "--target", tiny_folder, "--dtype", "float32", "--db", db, "--json")
    asked += ("--suite", "starter", "--methods", "ngram", "--max-new-tokens", 8, "--ignore-eos")
    result = CliRunner().invoke(app, [str(value) for value in (*asked, *more)])
    assert result.exit_code == code, result.output
    return result


def test_a_benchmark_on_ray_measures_what_one_process_measures(
    tiny_folder: Path, tmp_path: Path
) -> None:
    answers = []
    for name, more in (
        ("one", ()),
        ("ray", ("--ray", "local", "--workers", 2, "--worker-cpus", 1)),
    ):
        db = tmp_path / f"{name}.db"
        report = json.loads(bench(tiny_folder, db, *more).stdout)
        with RunLog.open(str(db)) as log:
            (benchmark,) = log.benchmarks.list()
            found = finished_requests(log, benchmark.id)
        answers.append({request.key: request.output_ids for request in found})
        assert benchmark.status == "completed" and report["report"]["num_done"] == len(found)
    assert answers[0] == answers[1] and answers[0]
    own = [request for request in found if request.configuration == "ngram"]
    plain = [request for request in found if request.configuration != "ngram"]
    assert len(in_pairs(own, plain)) == len(own)  # each was timed against the same worker
    assert len({request.worker for request in found} - {""}) == 2


def test_what_workers_could_not_write_to_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    result = bench(tiny_folder, tmp_path / "a.db", "--ray", "local", "--no-save", code=2)
    assert "--ray needs a run log that its workers reach" in result.output
    result = bench(tiny_folder, tmp_path / "a.db", "--workers", "2", code=2)
    assert "need --ray ADDRESS" in result.output
