"""Runs as files: JSON out and in again is the same run; what is malformed is named."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.runs.transfer import (
    HEAD,
    TAIL,
    ImportCounts,
    Kind,
    export_runs,
    import_runs,
    read_runs,
    run_line,
)
from storage import RunLog
from tests.storage.conftest import finished_run, odd_run, whole


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RunLog]:
    with RunLog.open(str(tmp_path / "other.db")) as other:
        yield other


def document(log: RunLog, *run_ids: str) -> str:
    stream = io.StringIO()
    done = list(export_runs(log, run_ids, stream, "json"))
    assert done == list(range(1, len(run_ids) + 1))
    return stream.getvalue()


def taken_in(log: RunLog, text: str) -> ImportCounts:
    *_, imported = ImportCounts(), *import_runs(log, io.StringIO(text))
    return imported


def test_json_out_and_in_is_the_same_run(log: RunLog, other: RunLog) -> None:
    stored = odd_run(log)
    plain = finished_run(log)
    text = document(log, stored.run.id, plain)
    assert len(json.loads(text, parse_constant=pytest.fail)["runs"]) == 2, "strict JSON"
    assert taken_in(other, text) == ImportCounts(added=2)
    for run_id in (stored.run.id, plain):
        assert repr(whole(other, run_id)) == repr(whole(log, run_id))
    assert taken_in(other, text) == ImportCounts(present=2)


def test_a_reformatted_file_is_read_too(log: RunLog) -> None:
    stored = odd_run(log)
    loose = json.dumps(json.loads(document(log, stored.run.id)), indent=2)
    (read,) = read_runs(io.StringIO(loose))
    assert run_line(read) == run_line(stored)


@pytest.mark.parametrize("runs", [[], ["nope"]])
def test_an_export_of_nothing_is_still_a_document(log: RunLog, runs: list[str]) -> None:
    assert json.loads(document(log, *runs))["runs"] == []
    assert list(read_runs(io.StringIO(document(log, *runs)))) == []


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[]", '{"runs": []}', '{"format": "other", "version": 1, "runs": []}', "{" * 9],
)
def test_files_that_are_no_export_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="The file"):
        list(read_runs(io.StringIO(text)))


def test_a_newer_version_and_a_cut_file_are_refused(log: RunLog) -> None:
    text = document(log, finished_run(log))
    with pytest.raises(ConfigError, match="version must be 1, got 2"):
        list(read_runs(io.StringIO(text.replace('"version": 1', '"version": 2'))))
    with pytest.raises(ConfigError, match="is incomplete"):
        list(read_runs(io.StringIO(text.removesuffix("]}\n"))))
    with pytest.raises(ConfigError, match="not valid JSON"):
        list(read_runs(io.StringIO(text[:-80])))


BROKEN: list[tuple[str, Any]] = [
    ("id", "a/b"),
    ("id", 3),
    ("status", "done"),
    ("target", "x" * 300),
    *(("tags", tags) for tags in ([""], ["x" * 129], [str(i) for i in range(51)])),
    ("created_at", "yesterday"),
    ("tok_s", "fast"),
    ("method", {"decoding_type": "Medusa"}),
    ("method", []),
    ("messages", [{"content": "x"}]),
    ("prompt_ids", [-1]),
    ("output_ids", ["a"]),
    ("num_steps", -1),
    ("labels", {"a": 1}),
    ("steps", "none"),
    ("steps", [{"index": 0}]),
]
BROKEN_STEPS: list[tuple[str, Any]] = [
    ("index", 3),
    ("tokens", []),
    ("parents", [-1, 0]),
    ("parents", [-1, 2, 0]),
    ("parents", [0, 0, 1]),
    ("accepted", [2]),
    ("accepted", [7]),
    ("accepted", [1, 1]),
    ("num_committed", 9),
    ("bonus", -4),
    ("token_texts", ["a"]),
    ("draft_s", None),
]


@pytest.mark.parametrize(("field", "value"), BROKEN + BROKEN_STEPS, ids=str)
def test_a_malformed_run_or_step_is_named(log: RunLog, field: str, value: Any) -> None:
    raw = json.loads(run_line(whole(log, finished_run(log))))
    (raw if (field, value) in BROKEN else raw["steps"][0])[field] = value
    with pytest.raises(ConfigError, match=r"^Run .* of the file: .*\.$"):
        taken_in(log, f"{HEAD}{json.dumps(raw)}{TAIL}")
    assert log.find().total == 1


def test_a_batch_arrives_whole_or_not_at_all(
    log: RunLog, other: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.runs.transfer.BATCH", 2)
    ids = [finished_run(log, labels={"n": str(n)}) for n in range(4)]
    lines = document(log, *ids).replace('"n": "3"', '"n": 3')
    with pytest.raises(ConfigError, match=ids[3]):
        taken_in(other, lines)
    assert {row.id for row in other.find().rows} == set(ids[:2]), "the first batch is there"


def table(log: RunLog, kind: Kind, ids: list[str]) -> list[dict[str, str]]:
    stream = io.StringIO(newline="")
    list(export_runs(log, ids, stream, kind))
    stream.seek(0)
    return list(csv.DictReader(stream))


def test_csv_of_runs_has_a_line_per_run(log: RunLog) -> None:
    stored, plain = odd_run(log), finished_run(log)
    odd, usual = table(log, "csv", [stored.run.id, plain])
    assert odd["name"] == "'=näme", "a spreadsheet must not run it"
    assert odd["tags"] == "a;b" and json.loads(odd["labels"]) == {"turn": "0"}
    assert odd["prompt"].startswith("line\nline") and odd["mat"] == "nan"
    assert (usual["id"], usual["tok_s"], usual["mat"]) == (plain, "40.0", "2.0")
    assert json.loads(usual["method"])["max_draft_len"] == 4


def test_csv_of_steps_has_a_line_per_step(log: RunLog) -> None:
    run_id = finished_run(log)
    first, second = table(log, "steps", [run_id])
    assert (first["run_id"], first["index"], second["index"]) == (run_id, "0", "1")
    assert (first["num_drafted"], first["num_accepted"], first["verify_s"]) == ("2", "1", "0.02")
    assert first["committed_text"] == "bd"
