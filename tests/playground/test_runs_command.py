"""The command line of `runs`, over a log in a file."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from playground.cli.main import app
from storage import RunLog
from tests.storage.conftest import finished_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "log" / "runs.db")


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["runs", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    return result


def filled(db: str) -> list[str]:
    with RunLog.open(db) as log:
        return [
            finished_run(log, prompt_text="About trees.", labels={"turn": "0"}, tags=("x",)),
            finished_run(log, prompt_text="About ships.", target="other"),
        ]


def test_list_prints_filters_and_sorts(db: str) -> None:
    trees, ships = filled(db)
    assert invoke("list", "--db", db).stdout.splitlines()[0].startswith(ships)
    (line,) = invoke("list", "--db", db, "--search", "TREES").stdout.splitlines()
    assert trees in line and "40.0 tok/s" in line and "#x" in line
    for choice in (["--label", "turn=0"], ["--tag", "x"], ["--target", "tiny"]):
        (row,) = json.loads(invoke("list", "--db", db, "--json", *choice).stdout)
        assert row["id"] == trees and row["mat"] == 2.0, choice
    with RunLog.open(db) as log:
        log.set_deleted([ships])
    (gone,) = json.loads(invoke("list", "--status", "deleted", "--json", "--db", db).stdout)
    assert gone["id"] == ships


def test_export_and_import_carry_whole_runs(db: str, tmp_path: Path) -> None:
    ids = filled(db)
    packed, plain = tmp_path / "out" / "runs.json.gz", tmp_path / "one.json"
    invoke("export", packed, "--db", db)
    invoke("export", plain, ids[0], "--db", db)
    assert len(json.loads(gzip.decompress(packed.read_bytes()))["runs"]) == 2
    there = str(tmp_path / "there.db")
    assert "1 runs imported, 0 were already here" in invoke("import", plain, "--db", there).stdout
    assert "1 runs imported, 1 were already here" in invoke("import", packed, "--db", there).stdout
    with RunLog.open(db) as first, RunLog.open(there) as second:
        for run_id in ids:
            assert repr(first.read_whole(run_id)) == repr(second.read_whole(run_id))


def test_faults_are_one_sentence_and_leave_no_file(db: str, tmp_path: Path) -> None:
    filled(db)
    file = tmp_path / "x.json"
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\x1f\x8b not gzip")
    text = tmp_path / "text.json"
    text.write_text('{"format": "x"}')
    wrong: list[list[object]] = [
        ["list", "--status", "done"],
        ["list", "--sort", "speed"],
        ["list", "--label", "turn"],
        ["export", file, "nope"],
        ["export", file, "--search", "nothing of the kind"],
        ["export", file, "--steps"],
        ["export", tmp_path / "log" / "runs.db" / "x.json"],
        ["import", broken],
        ["import", text],
    ]
    for arguments in wrong:
        result = invoke(*arguments, "--db", db, code=2)
        assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert not file.exists() and not list(tmp_path.glob(".*"))


def test_the_log_is_listed_without_torch(db: str) -> None:
    filled(db)
    script = (
        "import sys, app\n"
        f"try: app.app(['runs', 'list', '--db', {db!r}])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'gradio'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
