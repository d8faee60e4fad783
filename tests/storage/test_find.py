"""Filtering, sorting and paging happen in the database and use its indexes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from storage import ExperimentRow, RunLog, RunQuery, SortKey, StorageError
from tests.storage.conftest import finish, finished_run, new_run


def test_filters_combine(log: RunLog) -> None:
    finished_run(log, target="a", prompt_text="The 100% sure Fox", tags=("x",))
    marks: dict[str, Any] = {"benchmark_id": "c", "labels": {"turn": "1", "category": "qa"}}
    finished_run(log, target="b", method={"decoding_type": "Medusa"}, **marks)
    running = log.begin(new_run(target="a", prompt_text="something else"))
    assert log.find(RunQuery(target="a")).total == 2
    assert log.find(RunQuery(decoding_type="Medusa")).total == 1
    assert log.find(RunQuery(status="running")).rows[0].id == running
    assert log.find(RunQuery(text="fox")).total == 1
    assert log.find(RunQuery(text="100%")).total == 1
    assert log.find(RunQuery(text="1_0%")).total == 0, "wildcards are plain characters"
    assert log.find(RunQuery(tag="x", target="a")).total == 1
    assert log.find(RunQuery(tag="x", target="b")).total == 0
    (found,) = log.find(RunQuery(**marks)).rows
    assert {name: getattr(found, name) for name in marks} == marks
    assert log.find(RunQuery(labels={"turn": "1", "category": "1"})).total == 0


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
    in_title, in_target = finished_run(log, method_title=written), finished_run(log, target=written)
    log.annotate(in_name, name=written)
    log.annotate(in_note, note=f"y {written}")
    finished_run(log, prompt_text="nothing of the kind")
    found = {row.id for row in log.find(RunQuery(text=asked)).rows}
    assert found == {in_prompt, in_name, in_note, in_title, in_target}
    log.annotate(in_name, name="else")
    assert log.find(RunQuery(text=asked)).total == 4


def test_a_sort_key_that_does_not_exist_is_named(log: RunLog) -> None:
    odd: Any = "speed"
    with pytest.raises(StorageError, match="created_at.*got 'speed'"):
        log.find(RunQuery(sort=odd))


def test_ranges_leave_out_what_is_outside_or_no_number(log: RunLog) -> None:
    ids = {}
    for mat in (1.5, 2.5, float("nan"), float("inf"), None):
        run_id = log.begin(new_run())
        finish(log, run_id, {"mat": mat})
        ids[str(mat)] = run_id

    def found(least: float | None, most: float | None) -> set[str]:
        return {row.id for row in log.find(RunQuery(ranges={"mat": (least, most)})).rows}

    assert found(2.0, None) == {ids["2.5"]}
    assert found(None, 2.0) == {ids["1.5"]}
    assert found(None, None) == {ids["1.5"], ids["2.5"]}
    assert found(1.5, 2.5) == {ids["1.5"], ids["2.5"]}


def test_ids_and_deleted_runs_can_be_asked_for(log: RunLog) -> None:
    first, second, third = (finished_run(log) for _ in range(3))
    log.set_deleted([first, second])
    assert {row.id for row in log.find(RunQuery(deleted=True)).rows} == {first, second}
    assert [row.id for row in log.find(RunQuery(ids=(second, third))).rows] == [third]
    assert log.find(RunQuery(deleted=None)).total == 3
    log.set_deleted([first], False)
    assert log.find().total == 2
    with pytest.raises(StorageError, match="nope"):
        log.set_deleted([third, "nope"])
    assert log.find().total == 2, "all of them or none"


def test_folded_pages_show_each_experiment_once_where_its_first_run_stands(log: RunLog) -> None:
    experiments = (None, "one", "two-1", "two-2")
    for number in range(16):
        run_id = log.begin(new_run(benchmark_id=experiments[number % 4]))
        metrics = {"mat": (2.0, None, 1.5, math.nan, 3.5)[number % 5]}
        finish(log, run_id, metrics)
        if number % 6 == 5:
            log.set_deleted([run_id])
    sorts: tuple[SortKey, ...] = ("created_at", "mat", "target")
    for sort, descending in product(sorts, (True, False)):
        query = RunQuery(sort=sort, descending=descending, limit=1000)
        runs = log.find(query)
        expected = list(dict.fromkeys(run.experiment or run.id for run in runs.rows))
        pages = [log.experiments.page(replace(query, limit=2, offset=o)) for o in range(0, 8, 2)]
        found = [row for page in pages for row in page.rows]
        rows = [row.key if isinstance(row, ExperimentRow) else row.id for row in found]
        assert rows == expected
        assert {page.total for page in pages} == {len(expected)}
