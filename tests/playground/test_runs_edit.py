"""Names, notes, tags, deletion: what the page asks for is checked and done."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from playground.runs.details import details
from playground.runs.edit import edit
from storage import RunLog, UnknownRunError
from tests.storage.conftest import finished_run, new_run


def shown(log: RunLog, run_id: str) -> dict[str, Any]:
    return details(log, {"id": run_id}, {})


def test_changes_are_done_and_shown(log: RunLog) -> None:
    run_id = finished_run(log)
    edit(log, {"do": "rename", "id": run_id, "name": "  best "})
    edit(log, {"do": "note", "id": run_id, "note": "tuned\nby hand"})
    edit(log, {"do": "tags", "id": run_id, "tags": [" b", "a", "b ", ""]})
    now = shown(log, run_id)
    assert (now["name"], now["note"], now["tags"]) == ("best", "tuned\nby hand", ["a", "b"])


def test_ticked_runs_are_tagged_deleted_and_restored_together(log: RunLog) -> None:
    ids = [finished_run(log, tags=("old",)) for _ in range(3)]
    edit(log, {"do": "retag", "ids": ids, "add": ["new"], "remove": ["old"]})
    assert [shown(log, i)["tags"] for i in ids] == [["new"]] * 3
    edit(log, {"do": "delete", "ids": ids[:2]})
    assert [row.id for row in log.find().rows] == [ids[2]] and shown(log, ids[0])["deleted"]
    edit(log, {"do": "restore", "ids": ids})
    assert log.find().total == 3


def test_an_unknown_run_among_many_changes_nothing(log: RunLog) -> None:
    run_id = finished_run(log)
    for do in ({"do": "delete"}, {"do": "retag", "add": ["x"]}):
        with pytest.raises(UnknownRunError, match="nope"):
            edit(log, {**do, "ids": [run_id, "nope"]})
    assert log.find().total == 1 and shown(log, run_id)["tags"] == []


BAD: list[Any] = [
    None,
    {},
    {"do": "purge"},
    {"do": ["delete"]},
    {"do": "delete"},
    {"do": "delete", "ids": []},
    {"do": "delete", "ids": "all"},
    {"do": "rename", "id": "x"},
    {"do": "rename", "id": "x", "name": "n" * 256},
    {"do": "rename", "id": None, "name": "n"},
    {"do": "note", "id": "x", "note": 3},
    {"do": "tags", "id": "x", "tags": "a,b"},
    {"do": "tags", "id": "x", "tags": ["a"] * 51},
    {"do": "tags", "id": "x", "tags": ["x" * 129]},
    {"do": "retag", "ids": ["x"], "add": [None]},
]


@pytest.mark.parametrize("asked", BAD, ids=range(len(BAD)))
def test_malformed_changes_are_one_sentence(log: RunLog, asked: Any) -> None:
    with pytest.raises(ConfigError):
        edit(log, asked)


def test_details_tell_settings_machine_and_error(log: RunLog) -> None:
    run_id = log.begin(new_run(environment={"versions": {"torch": "2"}, "cpu_flags": ["a", "b"]}))
    log.finish(
        run_id,
        status="failed",
        output_ids=[],
        text="",
        finish_reason=None,
        metrics={},
        error="no weights",
    )
    now = shown(log, run_id)
    facts = {title: dict(rows) for title, rows in now["facts"]}
    assert now["error"] == "no weights" and facts["run"]["status"] == "failed"
    assert facts["method"]["max_draft_len"] == "4"
    assert facts["machine and versions"] == {"versions.torch": "2", "cpu_flags": "a, b"}
    with pytest.raises(ConfigError, match="nope"):
        shown(log, "nope")
