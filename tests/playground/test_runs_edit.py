"""Names, notes, tags, deletion: what the page asks for is checked and done."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.config import Settings
from engine.errors import ConfigError
from playground.host.stream import stored_run
from playground.runs.details import Annotation, Selection, facts, split_tags
from playground.runs.query import TableQuery
from playground.web.run_files import RunFiles
from storage import RunLog, StorageError
from tests.storage.conftest import finish, finished_run, new_run


def act(log: RunLog, ids: list[str], **changes: Any) -> None:
    Selection.parse({"ids": ids, **changes}).apply(log)


def test_changes_are_done_and_shown(log: RunLog) -> None:
    run_id = finished_run(log)
    for change in (
        {"name": "  best "},
        {"note": "tuned\nby hand"},
        {"tags": [" b", "a", "b ", ""]},
    ):
        Annotation.parse({"id": run_id, **change}).apply(log)
    now = stored_run(log, run_id)
    assert (now.name, now.note, now.tags) == ("best", "tuned\nby hand", ("a", "b"))
    assert split_tags(" b,a, b ,,") == ("a", "b")


def test_ticked_runs_are_tagged_deleted_and_restored_together(log: RunLog) -> None:
    ids = [finished_run(log, tags=("keep", "old")) for _ in range(3)]
    act(log, ids, add=["new", "new"], remove=["old"])
    assert [stored_run(log, i).tags for i in ids] == [("keep", "new")] * 3
    act(log, ids[:2], deleted=True)
    assert [row.id for row in log.find().rows] == [ids[2]] and stored_run(log, ids[0]).deleted
    act(log, ids, deleted=False)
    assert log.find().total == 3


def test_ticked_runs_are_exported_deleted_or_not(log: RunLog) -> None:
    kept, deleted, other = (log.begin(new_run()) for _ in range(3))
    act(log, [deleted, other], deleted=True)
    for shown in (True, False):  # ticks outlive a change of the filters
        files = RunFiles(log, partial(lambda shown, _: TableQuery(deleted=shown), shown))
        assert set(files.matching("json", [{"ticked": [kept, deleted]}])) == {kept, deleted}
        assert set(files.matching("json", [{}])) == ({deleted, other} if shown else {kept})


def test_an_unknown_run_among_many_changes_nothing(log: RunLog) -> None:
    run_id = finished_run(log)
    for changes in ({"deleted": True}, {"add": ["x"]}):
        with pytest.raises(StorageError, match="nope"):
            act(log, [run_id, "nope"], **changes)
    assert log.find().total == 1 and stored_run(log, run_id).tags == ()


def test_tags_cannot_add_up_to_more_than_can_be_imported(log: RunLog) -> None:
    run_id = finished_run(log)
    act(log, [run_id], add=[f"a{n}" for n in range(30)])
    with pytest.raises(StorageError, match="50 tags"):
        act(log, [run_id], add=[f"b{n}" for n in range(30)])
    assert len(stored_run(log, run_id).tags) == 30


BAD: list[tuple[type[Settings], Any]] = [
    (Annotation, None),
    (Annotation, {}),
    (Annotation, {"id": "x", "purge": True}),
    (Annotation, {"id": "x", "name": "n" * 256}),
    (Annotation, {"id": None, "name": "n"}),
    (Annotation, {"id": "x", "name": "a\x00b"}),
    (Annotation, {"id": "x", "note": 3}),
    (Annotation, {"id": "x", "note": "n" * 20_001}),
    (Annotation, {"id": "x", "tags": "a,b"}),
    (Annotation, {"id": "x", "tags": ["a"] * 51}),
    (Annotation, {"id": "x", "tags": ["x" * 129]}),
    (Selection, {"deleted": True}),
    (Selection, {"deleted": True, "ids": []}),
    (Selection, {"deleted": True, "ids": "all"}),
    (Selection, {"deleted": "yes", "ids": ["x"]}),
    (Selection, {"ids": ["x"], "add": [None]}),
]


@pytest.mark.parametrize(("model", "asked"), BAD, ids=range(len(BAD)))
def test_malformed_changes_are_one_sentence(model: type[Settings], asked: Any) -> None:
    with pytest.raises(ConfigError, match=r"^\S.*\.$"):
        model.parse(asked)


def test_facts_tell_settings_and_machine(log: RunLog) -> None:
    run_id = log.begin(new_run(environment={"versions": {"torch": "2"}, "cpu_flags": ["a", "b"]}))
    finish(log, run_id, status="failed", error="no weights")
    tables = {title: dict(rows) for title, rows in facts(stored_run(log, run_id)).items()}
    assert tables["run"]["status"] == "failed" and tables["method"]["max_draft_len"] == "4"
    assert tables["machine and versions"] == {"versions.torch": "2", "cpu_flags": "a, b"}
    with pytest.raises(ConfigError, match="nope"):
        stored_run(log, "nope")
