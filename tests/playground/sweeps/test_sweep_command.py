"""`app.py sweep`: finds, prints, writes, and goes on after it was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from playground.experiments.plan import METHOD
from playground.experiments.report.columns import COLUMNS
from playground.experiments.report.report import make_report
from playground.experiments.statistics import finished_requests
from playground.experiments.sweep.report import SHOWN, read_sweep
from playground.host.methods import choose_method
from storage import RunLog
from tests.commands import invoke, refused
from tests.models import save_tiny

SHORT = ("--suite", "starter", "--categories", "chat", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_id=None)


def arguments(folder: Path, db: Path, *more: object) -> list[str]:
    common = ["sweep", "--target", folder, "--dtype", "float32", "--db", db, "--method", "ngram"]
    return [str(a) for a in (*common, *SHORT, *more)]


def test_a_grid_is_measured_printed_and_written(folder: Path, tmp_path: Path) -> None:
    best = tmp_path / "out" / "best.yaml"
    out = invoke(
        *arguments(folder, tmp_path / "runs.db", "--grid", "--vary", "max_draft_len=1:4:3"),
        *("--vary", "lookup=pool,transformers", "--objective", "mat", "--name", "one"),
        *("--output", best),
    )
    lines = [line.split() for line in out.stdout.splitlines()]
    rows = [line for line in lines if line and line[0] in ("1", "2", "3", "4")]
    assert sorted((int(row[1]), row[2]) for row in rows) == [
        *((n, how) for n in (1, 4) for how in ("pool", "transformers"))
    ]
    mats = [float(row[3]) for row in rows]
    assert mats == sorted(mats, reverse=True), "the best comes first"
    assert "Best so far: max_draft_len" in out.stdout
    with RunLog.open(str(tmp_path / "runs.db")) as log:
        (head,) = log.benchmarks.list(sweeps=True)
        sweep = read_sweep(log, head.id)
        for trial in sweep.trials:
            requests = finished_requests(log, head.id, trial=trial.id)
            report = make_report(sweep.plan.trial(sweep.config(trial.number)), requests)
            section = report.section(METHOD)
            (line,) = (line for line in out.stdout.splitlines() if f" {trial.number} " in line[:5])
            cells = [COLUMNS[name].cell(section, section.overall) for name in SHOWN]
            assert all(f" {cell.text} " in line for cell in cells), "as a benchmark reports them"
    config = choose_method(str(best)).model_dump()
    assert (str(config["max_draft_len"]), config["lookup"]) == tuple(rows[0][1:3])


@pytest.mark.slow
def test_json_has_all_and_a_finished_sweep_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    asked = arguments(folder, db, "--vary", "max_draft_len=1:9", "--trials", 2, "--name", "two")
    first = json.loads(invoke(*asked, "--json").stdout)
    assert [row["outcome"] for row in first["trials"]] == ["measured"] * 2
    assert first["chooser"]["objective"] == "speedup"
    with RunLog.open(str(db)) as log:
        (sweep,) = log.benchmarks.list(sweeps=True)
    again = invoke("sweep", "--db", db, "--resume", sweep.id, "--json")
    assert f"sweep {sweep.id}" in again.stderr
    assert json.loads(again.stdout)["trials"] == first["trials"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], "Say what to sweep"),
        (["--method", "ngram"], "Say what to sweep"),
        (["--resume", "none"], "No experiment 'none'"),
        (["--resume", "none", "--trials", "4"], "takes no --trials"),
        (["--vary", "max_draft_len=1:3", "--grid", "--trials", "4"], "Drop one"),
        (["--vary", "max_draft_len=1:3", "--objective", "joy"], "objective must be"),
        (["--vary", "max_draft_len=1:3", "--suite", "nosuch"], "--suite must be one of"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, asked: list[str], words: str) -> None:
    method = [] if not asked or asked[0] in ("--method", "--resume") else ["--method", "ngram"]
    assert words in refused("sweep", "--db", folder / "bad.db", *method, *asked)


def test_a_target_that_is_not_there_leaves_no_sweep_behind(tmp_path: Path) -> None:
    refused(*arguments(tmp_path, tmp_path / "runs.db", "--vary", "max_draft_len=1:3"))
    with RunLog.open(str(tmp_path / "runs.db")) as log:
        assert log.benchmarks.list(9, sweeps=True) == ()
