"""Filters, order, pages, groups and totals, which the database makes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from statistics import harmonic_mean
from typing import Any, get_args

import pytest
import sqlalchemy as sa

from storage import (
    RunLog,
    RunQuery,
    SortKey,
    StorageError,
    dialects,
)
from storage.records import FacetKey
from tests.storage.conftest import (
    finish,
    finished_run,
    new_run,
    request,
    timed_run,
    weighted_std,
)


def test_filters_combine(log: RunLog) -> None:
    finished_run(log, target="a", prompt_text="The 100% sure Fox", tags=("x",))
    marks: dict[str, Any] = {"experiment_id": "c", "labels": {"turn": "1", "category": "qa"}}
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


def test_pages_cover_every_run_once_in_order_those_without_the_figure_last(log: RunLog) -> None:
    without = log.begin(new_run())
    ids = {without, *(finished_run(log) for _ in range(24))}
    for descending in (True, False):
        query = RunQuery(limit=10, sort="mat", descending=descending)
        pages = [log.find(replace(query, offset=o)).rows for o in (0, 10, 20)]
        assert [len(p) for p in pages] == [10, 10, 5]
        assert {row.id for page in pages for row in page} == ids
        assert pages[-1][-1].id == without
    newest = log.find(RunQuery(limit=1000)).rows
    assert [r.created_at for r in newest] == sorted((r.created_at for r in newest), reverse=True)


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


def test_ids_and_deleted_runs_can_be_asked_for(log: RunLog) -> None:
    first, second, third = (finished_run(log) for _ in range(3))
    log.set_deleted([first, second])
    assert {row.id for row in log.find(RunQuery(deleted=True)).rows} == {first, second}
    assert [row.id for row in log.find(RunQuery(ids=(second, third))).rows] == [third]
    assert log.find(RunQuery(deleted=None)).total == 3
    log.set_deleted([first], False)
    assert log.find().total == 2
    with pytest.raises(StorageError, match="is not in the log"):
        log.set_deleted([third, "nope"])
    assert log.find().total == 2, "all of them or none"


def test_folded_pages_show_each_experiment_once_where_its_first_run_stands(log: RunLog) -> None:
    experiments: tuple[dict[str, Any], ...] = (
        {},
        {"experiment_id": "one"},
        {"experiment_id": "two", "trial": "1"},
        {"experiment_id": "two", "trial": "2"},
    )
    for number in range(16):
        run_id = log.begin(new_run(**experiments[number % 4]))
        metrics = {"mat": (2.0, None, 1.5, math.nan, 3.5)[number % 5]}
        finish(log, run_id, metrics)
        if number % 6 == 5:
            log.set_deleted([run_id])
    sorts: tuple[SortKey, ...] = ("created_at", "mat", "target")
    for sort, descending in product(sorts, (True, False)):
        query = RunQuery(sort=sort, descending=descending, limit=1000)
        runs = log.find(query)
        expected = list(dict.fromkeys(run.experiment_id or run.id for run in runs.rows))
        pages = [log.experiments.page(replace(query, limit=2, offset=o)) for o in range(0, 8, 2)]
        found = [row for page in pages for row in page.rows]
        rows = [row.id for row in found]
        assert rows == expected
        assert {page.total for page in pages} == {len(expected)}


def test_details_come_in_the_order_asked_for_a_page_at_a_time(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.query.DETAILS_PAGE", 2)
    ids = [finished_run(log, tags=(str(i),)) for i in range(5)]
    asked = [ids[4], "nothing", *ids[:4]]
    assert [run.id for run in log.details(asked)] == [ids[4], *ids[:4]]
    assert list(log.details(ids)) == [log.get(run_id) for run_id in ids]


def test_a_question_ends_at_its_limit(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT max(i) FROM n"
    with monkeypatch.context() as patch:
        patch.setattr(dialects, "MAX_READING_S", 0.2)
        with pytest.raises(StorageError, match="did not answer within .* s. Ask for less"):
            with log._database.transaction(reading=True) as connection:
                connection.execute(sa.text(endless))
    assert log.find().total == 0


# ---- groups


def test_groups_count_and_average_what_the_filters_let_through(log: RunLog) -> None:
    speeds = [30.0, 31.5, 36.0]
    ids = [timed_run(log, speed, sampling={"temperature": 0.0, "seed": 1}) for speed in speeds]
    for speed in (math.nan, math.inf, None):
        timed_run(log, speed, sampling={"temperature": 0.0, "seed": 2})
    timed_run(log, 50.0, method={"decoding_type": "NGram", "max_draft_len": 9})
    log.set_deleted([timed_run(log, 99.0)])
    big, small = log.groups(RunQuery(), "setup_id")
    assert (big.num_runs, small.num_runs) == (6, 1), "the seed is no part of the setup"
    assert big.value == big.example.setup_id != small.value
    assert big.figures["tok_s"].mean == pytest.approx(harmonic_mean(speeds)), "as many tokens each"
    assert big.figures["tok_s"].std == pytest.approx(
        weighted_std(speeds, [10 / speed for speed in speeds])
    )
    assert small.figures["tok_s"].std is None and "ttft_s" not in small.figures
    (only,) = log.groups(RunQuery(ids=tuple(ids[:2])), "setup_id")
    assert only.num_runs == 2


def test_groups_by_label_and_tag_have_the_runs_without(log: RunLog) -> None:
    finished_run(log, labels={"category": "qa"}, tags=("a", "b"))
    finished_run(log, labels={"category": "qa", "turn": "1"}, tags=("a",))
    finished_run(log)
    by_label = {group.value: group.num_runs for group in log.groups(RunQuery(), "label:category")}
    by_tag = {group.value: group.num_runs for group in log.groups(RunQuery(), "tag")}
    assert by_label == {"qa": 2, None: 1}
    assert by_tag == {"a": 2, "b": 1, None: 1}


def test_distinct_values_are_listed_in_order(log: RunLog) -> None:
    finished_run(log, target="a", method_title="B", tags=("t",), labels={"turn": "1", "suite": "s"})
    finished_run(log, target="a", method_title="A", labels={"turn": "0"})
    values = {"target": ("a",), "method_title": ("A", "B"), "decoding_type": ("NGram",)}
    values |= {"tag": ("t",), "label": ("suite", "turn")}
    assert {name: log.distinct_values(name) for name in get_args(FacetKey)} == values


def test_timed_requests_are_the_completed_runs_of_an_experiment_oldest_first(log: RunLog) -> None:
    of = request("x", environment={"device_name": "a"})
    running = log.begin(new_run(**of))
    ids = [timed_run(log, speed, num=num, **of) for speed, num in ((20.0, 11), (None, 31))]
    for status in ("failed", "cancelled"):
        finish(log, log.begin(new_run(**of)), {"decode_s": 1.0}, status=status)
    log.set_deleted([timed_run(log, 99.0, **of)])
    timed_run(log, 50.0)
    assert log.experiments.newest() == ("c",)
    timed_run(log, 50.0, experiment_id="c", kind="compare")
    timed = log.experiments.timed_requests(["c", "b"])
    assert [(t.run_id, t.num_new_tokens, t.decode_s) for t in timed] == [
        (ids[0], 11, 0.5),
        (ids[1], 31, 0.0),
    ]
    assert (timed[0].configuration, timed[0].turn, timed[0].machine) == ("x", 0, ("", "a"))
    log.set_deleted([ids[0]])
    finish(log, running, {"decode_s": 2.0})
    again = log.experiments.timed_requests(["c"])
    assert [(t.run_id, t.decode_s) for t in again] == [(running, 2.0), (ids[1], 0.0)]
    log.set_deleted([ids[0]], deleted=False)
    assert [t.run_id for t in log.experiments.timed_requests(["c"])] == [running, *ids]
