"""Runs as files, and the commands for them: out and in is the same run, faults are named."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.runs.transfer import (
    HEAD,
    TAIL,
    export_runs,
    import_runs,
    read_runs,
    run_line,
)
from storage import RunLog
from tests.commands import invoke
from tests.storage.conftest import finished_run, odd_run, whole

ROOT = Path(__file__).parents[2]


def document(log: RunLog, *run_ids: str) -> str:
    stream = io.StringIO()
    done = list(export_runs(log, run_ids, stream, "json"))
    assert done == list(range(1, len(run_ids) + 1))
    return stream.getvalue()


def taken_in(log: RunLog, text: str) -> None:
    list(import_runs(log, io.StringIO(text)))


@pytest.mark.parametrize("runs", [[], ["nope"]])
def test_an_export_of_nothing_is_still_a_document(log: RunLog, runs: list[str]) -> None:
    assert json.loads(document(log, *runs))["runs"] == []
    assert list(read_runs(io.StringIO(document(log, *runs)))) == []


def test_an_export_of_another_version_is_refused(log: RunLog) -> None:
    text = document(log, finished_run(log))
    for bad, words in (
        ("", "The file"),
        ('{"runs": []}', "not an export of runs"),
        (json.dumps(json.loads(text), indent=2), "one run per line"),
        (text.replace('"version": 1', '"version": 2'), "version must be 1, got 2"),
        (text.removesuffix("]}\n"), "is incomplete"),
        (text[:-80], "not valid JSON"),
    ):
        with pytest.raises(ConfigError, match=words):
            list(read_runs(io.StringIO(bad)))


BROKEN: list[tuple[str, Any]] = [
    ("id", "a/b"),
    ("status", "done"),
    ("target", "x" * 300),
    *(("tags", tags) for tags in ([""], ["x" * 129], [str(i) for i in range(51)])),
    *(("labels", labels) for labels in ({"": "x"}, {"k" * 65: "x"}, {"k": "x" * 501}, {"k": 1})),
    ("created_at", "yesterday"),
    ("method", {"decoding_type": "Medusa"}),
    ("messages", [{"content": "x"}]),
    ("prompt_ids", [-1]),
    ("num_steps", -1),
    ("steps", [{"index": 0}]),
]
BROKEN_STEPS: list[tuple[str, Any]] = [
    ("index", 3),
    ("tokens", []),
    ("parents", [-1, 0]),
    ("parents", [0, 0, 1]),
    ("accepted", [2]),
    ("accepted", [1, 1]),
    ("num_committed", 9),
    ("bonus", -4),
    ("token_texts", ["a"]),
]


@pytest.mark.parametrize(("field", "value"), BROKEN + BROKEN_STEPS, ids=str)
def test_a_malformed_run_or_step_is_named(log: RunLog, field: str, value: Any) -> None:
    raw = json.loads(run_line(whole(log, finished_run(log))))
    (raw if (field, value) in BROKEN else raw["steps"][0])[field] = value
    with pytest.raises(ConfigError, match=r"^Run .* of the file: .*\.$"):
        taken_in(log, f"{HEAD}{json.dumps(raw)}{TAIL}")
    assert log.find().total == 1


def test_a_batch_arrives_whole_or_not_at_all(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.runs.transfer.BATCH", 2)
    ids = [finished_run(log, labels={"n": str(n)}) for n in range(4)]
    lines = document(log, *ids).replace('"n": "3"', '"n": 3')
    with RunLog.open(str(tmp_path / "other.db")) as other:
        with pytest.raises(ConfigError, match=ids[3]):
            taken_in(other, lines)
        assert {row.id for row in other.find().rows} == set(ids[:2]), "the first batch is there"


def test_csv_has_a_line_per_run(log: RunLog) -> None:
    stored, plain = odd_run(log), finished_run(log)
    stream = io.StringIO(newline="")
    list(export_runs(log, [stored.run.id, plain], stream, "csv"))
    stream.seek(0)
    odd, usual = csv.DictReader(stream)
    assert odd["name"] == "'=näme", "a spreadsheet must not run it"
    assert odd["tags"] == "a;b" and json.loads(odd["labels"]) == {"turn": "0"}
    assert odd["prompt"].startswith("line\nline") and odd["mat"] == "nan"
    assert json.loads(usual["method"])["max_draft_len"] == 4


# ---- the command line of `runs`


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "log" / "runs.db")


def filled(db: str) -> list[str]:
    """Two runs, of which the second has everything that a careless format loses."""
    with RunLog.open(db) as log:
        trees = finished_run(log, prompt_text="About trees.", labels={"turn": "9"}, tags=("x",))
        return [trees, odd_run(log).run.id]


def test_list_prints_filters_and_sorts(db: str) -> None:
    trees, odd = filled(db)
    (line,) = invoke("runs", "list", "--db", db, "--search", "TREES").stdout.splitlines()
    assert trees in line and "40.0 tok/s" in line and "#x" in line
    filters = (["--filter", text] for text in ("label:turn=9", "tag = x", "status=completed"))
    for choice in (*filters, ["--status", "completed"]):
        (row,) = json.loads(invoke("runs", "list", "--db", db, "--json", *choice).stdout)
        assert row["id"] == trees and row["mat"] == 2.0, choice
    with RunLog.open(db) as log:
        log.set_deleted([odd])
    listed = invoke("runs", "list", "--status", "deleted", "--json", "--db", db)
    (gone,) = json.loads(listed.stdout)
    assert gone["id"] == odd


def test_erase_removes_deleted_runs_for_good_and_refuses_others(db: str) -> None:
    trees, odd = filled(db)
    with RunLog.open(db) as log:
        log.set_deleted([odd])
    refused = invoke("runs", "erase", odd, trees, "--db", db, code=2).stderr
    assert f"'{trees}' must be a deleted run" in refused
    for said in ("1 runs erased", "0 runs erased"):
        assert said in invoke("runs", "erase", "--db", db).stdout
    with RunLog.open(db) as log:
        assert log.get(trees) and log.get(odd) is None


def test_export_and_import_carry_whole_runs(db: str, tmp_path: Path) -> None:
    ids = filled(db)
    packed, plain = tmp_path / "out" / "runs.json.gz", tmp_path / "one.json"
    invoke("runs", "export", packed, "--db", db)
    invoke("runs", "export", plain, ids[0], "--db", db)
    whole_file = gzip.decompress(packed.read_bytes())
    assert len(json.loads(whole_file, parse_constant=pytest.fail)["runs"]) == 2, "strict JSON"
    there = str(tmp_path / "there.db")
    for file, words in ((plain, "1 runs imported, 0 were"), (packed, "1 runs imported, 1 were")):
        assert f"{words} already here" in invoke("runs", "import", file, "--db", there).stdout
    with RunLog.open(db) as first, RunLog.open(there) as second:
        for run_id in ids:
            assert repr(whole(first, run_id)) == repr(whole(second, run_id))


def test_faults_are_one_sentence_and_leave_no_file(db: str, tmp_path: Path) -> None:
    filled(db)
    file, text = tmp_path / "x.json", tmp_path / "text.json"
    text.write_text('{"format": "x"}')
    wrong: list[list[object]] = [
        ["list", "--status", "done"],
        ["list", "--sort", "speed"],
        ["list", "--filter", "label:turn"],
        ["list", "--filter", "colour=red"],
        ["export", file, "nope"],
        ["export", file, "--search", "nothing of the kind"],
        ["export", tmp_path / "log" / "runs.db" / "x.json"],
        ["import", text],
    ]
    for arguments in wrong:
        result = invoke("runs", *arguments, "--db", db, code=2)
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
