"""The table's questions: what comes in is checked, what goes out is plain and complete."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.drafters import methods
from engine.errors import ConfigError
from playground.runs.link import read_link
from playground.runs.listing import RunList
from playground.runs.query import PAGE_SIZE, read_group, read_query
from storage import RunLog
from tests.storage.conftest import finished_run, new_run

PLAIN = {"decoding_type": "Autoregressive"}


def timed(log: RunLog, tok_s: float, **changes: Any) -> str:
    run_id = log.begin(new_run(**changes))
    log.finish(
        run_id,
        status="completed",
        output_ids=[],
        text="",
        finish_reason="eos",
        metrics={"tok_s": tok_s},
    )
    return run_id


def test_a_page_is_plain_json_with_every_column(log: RunLog) -> None:
    finished_run(log, labels={"turn": "1"}, tags=("t",), sampling={"temperature": 0.5, "seed": 3})
    page = RunList(log, methods()).page({})
    (row,) = json.loads(json.dumps(page))["rows"]
    assert page["total"] == 1 and page["page_size"] == PAGE_SIZE
    assert (row["tags"], row["labels"], row["seed"]) == (["t"], {"turn": "1"}, 3)
    assert row["settings"] == "max_draft_len 4 · temperature 0.5", "defaults are not shown"
    assert row["tok_s"] == 40.0 and row["speedup"] is None


def test_filters_reach_the_database(log: RunLog) -> None:
    here = finished_run(log, target="a", labels={"category": "qa"}, tags=("x",), dtype="float32")
    finished_run(log, target="b")
    runs = RunList(log)
    asked: list[dict[str, Any]] = [
        {"target": "a"},
        {"labels": {"category": "qa"}},
        {"tag": "x"},
        {"dtype": "float32"},
        {"ids": [here]},
        {"text": "HELLO", "target": "a", "status": "completed", "ranges": {"mat": [1, 3]}},
    ]
    for question in asked:
        assert [row["id"] for row in runs.page(question)["rows"]] == [here], question
    assert runs.page({"target": "", "labels": {}, "ranges": {}})["total"] == 2
    assert runs.page({"deleted": True})["total"] == 0


def test_speedup_divides_by_plain_decoding_on_the_same_prompt(log: RunLog) -> None:
    timed(log, 20.0, method=PLAIN, prompt_text="p")
    timed(log, 30.0, method=PLAIN, prompt_text="p")
    timed(log, 99.0, method=PLAIN, prompt_text="p", dtype="float32")
    fast = timed(log, 50.0, prompt_text="p")
    alone = timed(log, 50.0, prompt_text="q")
    rows = {row["id"]: row for row in RunList(log).page({})["rows"]}
    assert rows[fast]["speedup"] == pytest.approx(2.0)
    assert rows[alone]["speedup"] is None


def test_speedup_divides_by_the_pinned_setup(log: RunLog) -> None:
    base = timed(log, 25.0, prompt_text="p")
    fast = timed(log, 50.0, prompt_text="p", method={"decoding_type": "NGram", "max_draft_len": 9})
    run = log.get(base)
    assert run is not None
    rows = {row["id"]: row for row in RunList(log).page({"baseline": run.setup_id})["rows"]}
    assert rows[fast]["speedup"] == pytest.approx(2.0)
    assert rows[base]["speedup"] == pytest.approx(1.0)


def test_groups_are_plain_json(log: RunLog) -> None:
    for _ in range(3):
        finished_run(log)
    (group,) = RunList(log).groups({"group": "method_title"})["groups"]
    assert json.loads(json.dumps(group))["figures"]["tok_s"] == {
        "mean": 40.0,
        "std": 0.0,
        "num_runs": 3,
    }
    assert group["value"] == "N-gram" and group["example"]["target"] == "tiny"


def test_facets_are_plain_json(log: RunLog) -> None:
    finished_run(log, tags=("x",), labels={"turn": "0"})
    facets = json.loads(json.dumps(RunList(log).facets()))
    assert facets["targets"] == ["tiny"] and facets["labels"] == {"turn": ["0"]}


BAD: list[Any] = [
    None,
    [],
    "text",
    {"text": 3},
    {"text": "x" * 201},
    {"text": "a\x00b"},
    {"text": "\udcff"},
    {"status": "done"},
    {"status": ["failed"]},
    {"sort": "prompt_text"},
    {"sort": None},
    {"descending": 1},
    {"deleted": "yes"},
    {"page": -1},
    {"page": 1.5},
    {"page": True},
    {"page": 10**9},
    {"target": {"a": 1}},
    {"tag": "x" * 700},
    {"labels": [["a", "b"]]},
    {"labels": {"a": 1}},
    {"labels": {str(i): "x" for i in range(20)}},
    {"ranges": {"prompt": [0, 1]}},
    {"ranges": {"mat": 3}},
    {"ranges": {"mat": [1, 2, 3]}},
    {"ranges": {"mat": ["1", None]}},
    {"ranges": {"mat": [math.nan, None]}},
    {"ids": "abc"},
    {"ids": ["a"] * 501},
    {"ids": [3]},
    {"ids": ["; DROP TABLE runs\n"]},
    {"limit": 10},
]


@pytest.mark.parametrize("asked", BAD, ids=range(len(BAD)))
def test_malformed_questions_are_one_sentence(asked: Any) -> None:
    with pytest.raises(ConfigError, match=r"^\S.*\.$") as refused:
        read_query(asked)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("group", ["", None, "prompt_text", 3, "label:" + "x" * 700])
def test_groups_that_there_are_not_are_refused(group: Any) -> None:
    with pytest.raises(ConfigError):
        read_group(group)


def test_a_link_restores_a_query() -> None:
    query = {
        "text": "trees",
        "labels": {"turn": "1"},
        "ranges": {"mat": [1.5, None]},
        "group": "label:turn",
        "compare": ["a1", "b2"],
        "baseline": {"setup_id": "c3", "title": "N-gram"},
    }
    assert read_link(json.dumps(query)) == query


@pytest.mark.parametrize(
    "link",
    [
        "",
        "{",
        "[]",
        "[" * 9000,
        "x" * 30_000,
        '{"sort":"x"}',
        '{"group":"x"}',
        '{"compare":"all"}',
        '{"baseline":{"setup_id":1,"title":"x"}}',
        '{"anything":1}',
    ],
)
def test_damaged_links_are_one_sentence(link: str) -> None:
    with pytest.raises(ConfigError):
        read_link(link)
