"""Filtering, sorting and paging happen in the database and use its indexes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

from storage import (
    RunLog,
    RunQuery,
    SortKey,
    StorageError,
    UnknownRunError,
    finding,
    names_of,
)
from tests.storage.conftest import finished_run, new_run


def test_filters_combine(log: RunLog) -> None:
    finished_run(log, target="a", prompt_text="The 100% sure Fox", tags=("x",))
    finished_run(log, target="b", method={"decoding_type": "Medusa"})
    running = log.begin(new_run(target="a", prompt_text="something else"))
    assert log.find(RunQuery(target="a")).total == 2
    assert log.find(RunQuery(decoding_type="Medusa")).total == 1
    assert log.find(RunQuery(status="running")).rows[0].id == running
    assert log.find(RunQuery(text="fox")).total == 1
    assert log.find(RunQuery(text="100%")).total == 1
    assert log.find(RunQuery(text="1_0%")).total == 0, "wildcards are plain characters"
    assert log.find(RunQuery(tag="x", target="a")).total == 1
    assert log.find(RunQuery(tag="x", target="b")).total == 0


def test_text_is_found_in_name_and_note(log: RunLog) -> None:
    run_id = finished_run(log)
    log.rename(run_id, "The best one")
    log.set_note(run_id, "tuned by hand")
    log.set_tags(run_id, ["t", "t", "u"])
    assert log.find(RunQuery(text="BEST")).total == log.find(RunQuery(text="by hand")).total == 1
    assert log.find().rows[0].tags == ("t", "u")


def test_pages_cover_every_run_once_in_order(log: RunLog) -> None:
    ids = {finished_run(log) for _ in range(25)}
    pages = [log.find(RunQuery(limit=10, offset=o, sort="mat")).rows for o in (0, 10, 20)]
    assert [len(p) for p in pages] == [10, 10, 5]
    assert {row.id for page in pages for row in page} == ids
    newest = log.find(RunQuery(limit=1000)).rows
    assert [r.created_at for r in newest] == sorted((r.created_at for r in newest), reverse=True)


def test_runs_without_a_figure_come_last_either_way(log: RunLog) -> None:
    without = log.begin(new_run())
    finished_run(log)
    for descending in (True, False):
        assert log.find(RunQuery(sort="mat", descending=descending)).rows[-1].id == without


@pytest.mark.parametrize("query", [RunQuery(limit=0), RunQuery(limit=9999), RunQuery(offset=-1)])
def test_page_out_of_range_is_refused(log: RunLog, query: RunQuery) -> None:
    with pytest.raises(StorageError, match="limit in"):
        log.find(query)


def test_a_page_of_a_long_log_is_read_from_the_index_of_its_order(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "COUNTED", -1)
    plans: list[str] = []
    with RunLog.open(path) as log:

        @sa.event.listens_for(log._database.engine, "before_cursor_execute")
        def explain(connection: Any, cursor: Any, sql: str, values: Any, *_: object) -> None:
            if "LIMIT" in sql and "count(" not in sql:
                plan = cursor.connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)
                plans.extend(row[-1] for row in plan)

        asked: tuple[dict[str, Any], ...]
        asked = ({"text": "x"}, {"include_deleted": True}, {"target": "a", "status": "failed"})
        for sort, descending, more in product(names_of(SortKey), (True, False), asked):
            plans.clear()
            log.find(RunQuery(sort=sort, descending=descending, **more))
            order = [plan for plan in plans if " runs" in plan]
            assert order and all(f"INDEX ix_runs_{sort}_order" in plan for plan in order), plans
            assert not any("TEMP B-TREE" in plan for plan in plans), plans


def test_filters_that_exclude_each_other_are_told_by_an_index(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "COUNTED", 2)
    asked: list[str] = []
    with RunLog.open(path) as log:
        for target, title in (("a", "A"), ("b", "B")) * 3:
            finished_run(log, target=target, method_title=title)

        @sa.event.listens_for(log._database.engine, "before_cursor_execute")
        def explain(connection: Any, cursor: Any, sql: str, values: Any, *_: object) -> None:
            if "FROM runs" in sql and "method_title" in sql and "target" in sql:
                plan = cursor.connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)
                asked.append(" ".join(row[-1] for row in plan))

        for sort in ("created_at", "mat"):
            asked.clear()
            none = log.find(RunQuery(target="a", method_title="B", sort=sort))
            assert (none.rows, none.total, none.whole) == ((), 0, True)
            assert "COVERING INDEX ix_runs_filtered (target=?)" in asked[0]
        assert log.find(RunQuery(target="a", method_title="A", limit=2)).total == 2


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("Die ÜBUNG", "übung"),
        ("STRASSE", "straße"),
        ("Ελληνικά ΣΟΦΟΣ", "σοφος"),
        ("naïve", "NAI\u0308VE"),
        ("50% off_now", "% OFF_"),
        ("back\\slash /path", "\\SLASH /P"),
    ],
)
def test_search_folds_case_in_every_script(log: RunLog, written: str, asked: str) -> None:
    in_prompt = finished_run(log, prompt_text=f"x {written} y")
    in_name, in_note = finished_run(log), finished_run(log)
    log.rename(in_name, written)
    log.set_note(in_note, f"y {written}")
    finished_run(log, prompt_text="nothing of the kind")
    assert {row.id for row in log.find(RunQuery(text=asked)).rows} == {in_prompt, in_name, in_note}
    log.rename(in_name, "else")
    assert log.find(RunQuery(text=asked)).total == 2


def test_search_finds_methods_and_targets(log: RunLog) -> None:
    run_id = finished_run(log, target="Größe-1B", method_title="EAGLE-2")
    finished_run(log)
    for text in ("GRÖSSE", "eagle"):
        assert [row.id for row in log.find(RunQuery(text=text)).rows] == [run_id]


def test_ranges_leave_out_what_is_outside_or_no_number(log: RunLog) -> None:
    ids = {}
    for mat in (1.5, 2.5, float("nan"), float("inf"), None):
        run_id = log.begin(new_run())
        log.finish(
            run_id,
            status="completed",
            output_ids=[],
            text="",
            finish_reason=None,
            metrics={"mat": mat},
        )
        ids[str(mat)] = run_id

    def found(least: float | None, most: float | None) -> set[str]:
        return {row.id for row in log.find(RunQuery(ranges={"mat": (least, most)})).rows}

    assert found(2.0, None) == {ids["2.5"]}
    assert found(None, 2.0) == {ids["1.5"]}
    assert found(None, None) == {ids["1.5"], ids["2.5"]}
    assert found(1.5, 2.5) == {ids["1.5"], ids["2.5"]}
    with pytest.raises(StorageError, match="range must be of one of"):
        log.find(RunQuery(ranges={"created_at": (0, 1)}))  # type: ignore[dict-item]


def test_ids_and_deleted_runs_can_be_asked_for(log: RunLog) -> None:
    first, second, third = (finished_run(log) for _ in range(3))
    log.delete(first, second)
    assert {row.id for row in log.find(RunQuery(only_deleted=True)).rows} == {first, second}
    assert [row.id for row in log.find(RunQuery(ids=(second, third))).rows] == [third]
    log.restore(first)
    assert log.find().total == 2
    with pytest.raises(UnknownRunError):
        log.delete(third, "nope")
    assert log.find().total == 2, "all of them or none"


ASKED: list[dict[str, Any]] = [
    {},
    {"target": "b", "tag": "t"},
    {"labels": {"turn": "1"}, "text": "odd"},
    {"ranges": {"num_prompt_tokens": (2.5, None), "mat": (None, 3)}},
    {"only_deleted": True},
]


def test_many_runs_are_found_as_few_are(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by another way: in order, a batch at a time, until the page is full."""
    monkeypatch.setattr(finding, "BATCH", 3)
    mats = (2.0, None, 1.5, math.nan, 2.0, 3.5)
    for number in range(18):
        run_id = log.begin(
            new_run(
                target="ab"[number % 2],
                tags=("t",) if number % 3 else (),
                labels={"turn": str(number % 4 // 2)},
                prompt_text="odd" if number % 5 else "even",
                prompt_ids=(1,) * (number % 7),
                benchmark_id=(None, "one", "two-1", "two-2")[number % 4],
            )
        )
        ended: dict[str, Any] = {"status": "completed", "output_ids": [], "text": ""}
        metrics = {"mat": mats[number % len(mats)]}
        log.finish(run_id, **ended, finish_reason=None, metrics=metrics)
        if number % 6 == 5:
            log.delete(run_id)

    def pages(counted: int) -> list[tuple[list[str], int]]:
        monkeypatch.setattr(finding, "COUNTED", counted)
        queries = (
            RunQuery(**asked, sort=sort, descending=descending, limit=4, offset=offset)
            for asked in ASKED
            for sort in ("created_at", "mat", "target", "num_prompt_tokens", "finish_reason")
            for descending in (True, False)
            for offset in (0, 3, 8)
        )
        found = [page(q) for q in queries for page in (log.find, log.experiments.page)]
        ends = [one.total for one in found if one.whole]
        assert len(ends) == len(found) or counted < 0
        return [([getattr(row, "key", row.id) for row in one.rows], one.total) for one in found]

    few, many = pages(100), pages(-1)
    assert [rows for rows, _ in few] == [rows for rows, _ in many]
    assert all(least <= exact for (_, exact), (_, least) in zip(few, many, strict=True))
    assert any(least < exact for (_, exact), (_, least) in zip(few, many, strict=True))
