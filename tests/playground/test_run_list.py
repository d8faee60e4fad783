"""The table of runs: what comes in is checked, what goes out is plain, changes are done."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import Settings
from engine.drafters import methods
from engine.errors import ConfigError
from engine.figures import FIGURES, FORMULAS
from playground.runs import columns
from playground.runs.compare import compare_runs
from playground.runs.details import Annotation, Selection, facts, split_tags
from playground.runs.query import TableQuery, filter_texts, read_filters, read_link
from playground.runs.reading import stored_run
from playground.runs.table import RunTable
from playground.web import run_files
from playground.web.run_files import RunFiles
from playground.web.runs import TABLE
from storage import RunLog, RunQuery, StorageError
from tests.playground.test_result import PLAIN as STEADY
from tests.playground.test_result import metrics
from tests.storage.conftest import (
    NUM_THREADS,
    begun_benchmark,
    errors_at_once,
    finish,
    finished_run,
    new_run,
    request,
    timed_run,
)

PLAIN = {"decoding_type": "Autoregressive"}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}


SURE = {**metrics(2.6, 0.002, 0.0094, 0.001), "plain": asdict(STEADY)}


def test_a_run_has_the_speedup_of_its_own_sentence(log: RunLog) -> None:
    own, doubtful = timed_run(log, 200.0, num=8), timed_run(log, 200.0, num=8)
    finish(log, own, SURE)
    finish(log, doubtful, {**SURE, "plain": asdict(replace(STEADY, drift=2.0))})
    speedups = {row["id"]: row["speedup"] for row in cells(log, {})}
    assert speedups == {own: "2.10×", doubtful: "–"}
    (compared,) = compare_runs(log, [own, doubtful], {}).configurations
    assert columns.spread_text(FIGURES["speedup"], compared.spreads["speedup"]) == "2.10×"


def test_plain_decoding_and_requests_of_experiments_have_no_speedup_of_their_own(
    log: RunLog,
) -> None:
    changes: tuple[dict[str, Any], ...] = ({"method": PLAIN}, {"experiment_id": "c"})
    for change in changes:
        finish(log, timed_run(log, 200.0, num=8, **change), SURE)
    assert [row["speedup"] for row in cells(log, {"group": "run"})] == ["–", "–"]


COLUMNS = [column.key for column in columns.COLUMNS]


def cells(log: RunLog, asked: dict[str, Any], *, shown: list[str] = COLUMNS) -> list[Any]:
    """The table's rows, each as its cells by column."""
    view = json.loads(json.dumps(RunTable(log, methods()).view(TableQuery.parse(asked), shown)))
    keys = [head["key"] for head in view["heads"]]
    return [{"id": row["id"], **dict(zip(keys, row["cells"], strict=True))} for row in view["rows"]]


def test_a_page_is_plain_json_with_every_column(log: RunLog) -> None:
    finished_run(log, labels={"turn": "1"}, tags=("t",), sampling={"temperature": 0.5, "seed": 3})
    (row,) = cells(log, {})
    assert list(row) == ["id", *COLUMNS]
    assert (row["tags"], row["labels"], row["seed"]) == (["t"], "turn 1", 3)
    assert row["settings"] == "max_draft_len 4 · temperature 0.5", "defaults are not shown"


def test_the_rows_are_text(log: RunLog) -> None:
    hostile = "<img src=x>\"'"
    run = finished_run(log, method_title=hostile, prompt_text=hostile, tags=(hostile,))
    Annotation(id=run, name=hostile, note=hostile).apply(log)
    rows = TABLE.render(RunTable(log).view(TableQuery(), COLUMNS))
    assert "<img" not in rows and rows.count("&lt;img") >= 5 and hostile[-3:] not in rows
    groups = TABLE.render(RunTable(log).view(TableQuery(group="method_title")))
    assert "<img" not in groups and 'data-group="&lt;img' in groups


def test_pages_and_heads_are_told(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("query", "table"):
        monkeypatch.setattr(f"playground.runs.{module}.PAGE_SIZE", 2)
    for _ in range(3):
        log.begin(new_run())
    view = RunTable(log).view(TableQuery(page=1, sort="mat", descending=False))
    assert view["count"] == "3–3 of 3" and view["pages"] == [1, 2]
    (mat,) = [head for head in view["heads"] if head["sorted"] == "ascending"]
    assert (mat["key"], mat["help"]) == ("mat", FORMULAS["mat"])


def test_a_column_sorts_by_its_own_figure_or_not_at_all() -> None:
    sorts = {one.key: one.sort for one in columns.COLUMNS if one.sort and one.kind == "number"}
    assert sorts == {name: name for name in columns.RUN_FIGURES if name != "speedup"}


def test_the_requests_of_an_experiment_are_one_row(log: RunLog) -> None:
    benchmark = begun_benchmark(log, "mine")
    first = timed_run(log, 20.0)
    methods = {"plain": (20.0, PLAIN), "few": (30.0, NGRAM)}
    methods |= {"many": (50.0, {**NGRAM, "max_draft_len": 9})}
    for name, (tok_s, method) in methods.items():
        for prompt in "pq":
            of = request(name, prompt, experiment_id=benchmark, kind="benchmark")
            timed_run(log, tok_s, num=11, method=method, prompt_text=prompt, **of)
    for number, tok_s in enumerate((20.0, 25.0)):
        trial: dict[str, Any] = {"experiment_id": "e" * 16, "kind": "sweep", "trial": f"{number}"}
        timed_run(log, 20.0, method=PLAIN, **request("plain", **trial))
        timed_run(log, tok_s, **request("ngram", **trial))
    timed_run(log, 20.0, num=11, method=PLAIN, **request("plain"))
    failed = log.begin(new_run(**request("ngram")))
    finish(log, failed, status="failed")
    last = timed_run(log, 20.0)

    rows = cells(log, {})
    assert [row["id"] for row in rows] == [*(last, "c", "e" * 16, benchmark, first)]
    compared, swept, measured = rows[1:4]
    assert measured["prompt"] == ["mine", ""]
    assert (measured["settings"], measured["speedup"]) == ("6 requests", "1.50 … 2.50×")
    assert (swept["settings"], swept["speedup"]) == ("4 requests", "1.00 … 1.25×")
    assert (compared["settings"], compared["status"]) == ("2 requests, 1 completed", "partial")
    assert compared["speedup"] == "–", "a request that failed is not compared"

    links = [row.get("experiment") for row in RunTable(log).view(TableQuery())["rows"]]
    assert links == [None, "?compare=c", "", f"?benchmark={benchmark}", None]
    inside = RunTable(log).view(TableQuery().in_group("c"))["rows"]
    assert len(inside) == 2 and inside[0]["id"] == failed
    assert len(cells(log, {"group": "run"})) == 14
    assert len(cells(log, {"method_title": "N-gram"})) == 5, "an experiment counts what matches"


def test_groups_are_averaged_and_ordered(log: RunLog) -> None:
    for _ in range(3):
        finished_run(log)
    timed_run(log, 90.0, method_title="Faster")
    view = RunTable(log).view(TableQuery(group="method_title", sort="num_runs"))
    assert view["grouped"] and view["count"] == "2 groups"
    ngram, faster = json.loads(json.dumps(view["rows"]))
    assert ngram["id"] == "N-gram" and ngram["cells"][:3] == [["N-gram", ""], 3, "40.0 ± 0.0"]
    assert faster["cells"][:3] == [["Faster", ""], 1, "90.0"]
    for sort, descending, ids in (
        ("tok_s", True, ["Faster", "N-gram"]),
        ("mat", False, ["N-gram", "Faster"]),  # without the figure last
    ):
        query = TableQuery.parse({"group": "method_title", "sort": sort, "descending": descending})
        assert [row["id"] for row in RunTable(log).view(query)["rows"]] == ids


BAD: dict[str, tuple[Any, ...]] = {
    "text": ("x" * 201, "a\x00b", "\udcff"),
    "sort": ("prompt_text",),
    "page": (-1, 10**9),
    "labels": ({str(i): "x" for i in range(20)}, {"a": "x" * 700}),
    "ids": ("abc", ["a"] * 501, ["; DROP TABLE runs\n"]),
    "limit": (10,),
    "group": ("", "prompt_text", "label:" + "x" * 700),
}
"""Values that fields of a question must not have."""
BAD_QUESTIONS = [None, *({name: value} for name, values in BAD.items() for value in values)]


@pytest.mark.parametrize("asked", BAD_QUESTIONS, ids=range(len(BAD_QUESTIONS)))
def test_malformed_questions_are_one_sentence(asked: Any) -> None:
    with pytest.raises(ConfigError, match=r"^\S.*\.$") as refused:
        TableQuery.parse(asked)
    assert len(str(refused.value)) < 400


def test_filters_are_written_and_read_as_short_texts() -> None:
    values: dict[str, Any] = {
        "tag": "keep",
        "device": "cpu",
        "labels": {"turn": "1"},
        "ids": ["a1", "b2"],
    }
    query = TableQuery.parse(values)
    texts = filter_texts(query)
    assert {"tag = keep", "label:turn = 1", "ids = a1,b2"} < set(texts)
    assert TableQuery.parse(read_filters(texts)) == query


@pytest.mark.parametrize("text", ["fast", "turn = 1", "tok_s >= 90"])
def test_an_invalid_filter_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^\S.*\.$"):
        read_filters([text])


def test_a_link_restores_a_query() -> None:
    query = {
        "text": "trees",
        "labels": {"turn": "1"},
        "group": "label:turn",
        "compare": ["a1", "b2"],
    }
    assert json.loads(json.dumps(read_link(json.dumps(query)).link_values)) == query


@pytest.mark.parametrize("link", ["{", "[]", "x" * 30_000, '{"compare":"all"}'])
def test_damaged_links_are_one_sentence(link: str) -> None:
    with pytest.raises(ConfigError):
        read_link(link)


# ---- names, notes, tags, deletion


def act(log: RunLog, ids: list[str], **changes: Any) -> None:
    Selection.parse({"ids": ids, **changes}).apply(log)


def test_changes_are_done_and_shown(log: RunLog) -> None:
    run_id = finished_run(log)
    changes = {"name": "  best ", "note": "tuned\nby hand", "tags": [" b", "a", "b ", ""]}
    for name, value in changes.items():
        Annotation.parse({"id": run_id, name: value}).apply(log)
    now = stored_run(log, run_id)
    assert (now.name, now.note, now.tags) == ("best", "tuned\nby hand", ("a", "b"))
    assert split_tags(" b,a, b ,,") == ("a", "b")


def test_benchmarks_are_listed_by_their_names(log: RunLog) -> None:
    benchmark_id = begun_benchmark(log, "nightly")
    finished_run(log, experiment_id=benchmark_id)
    menu = RunTable(log).menus([])["filters"]
    assert ("benchmark nightly", f"experiment_id = {benchmark_id}") in menu
    (row,) = cells(log, {"group": "run"})
    assert row["benchmark_id"] == "nightly"


def test_ticked_runs_are_tagged_together_or_not_at_all(log: RunLog) -> None:
    ids = [finished_run(log, tags=("keep", "old")) for _ in range(3)]
    few = finished_run(log)
    act(log, ids, add=["new", "new"], remove=["old"])
    act(log, ids[:1], deleted=True)
    with pytest.raises(StorageError, match="tags .* at most 50"):  # no more could be imported
        act(log, [few, *ids], add=[f"a{n}" for n in range(49)])
    act(log, [few, *ids, "nope"], add=["x"])
    tags = [stored_run(log, i).tags for i in (*ids, few)]
    assert tags == [("keep", "new", "x")] * 3 + [("x",)]


def test_tags_that_several_tabs_add_at_once_are_all_kept(log: RunLog) -> None:
    ids = [finished_run(log, tags=("old",)) for _ in range(3)]
    errors = errors_at_once(lambda n: act(log, ids, add=[f"tab {n}"], remove=["old"]))
    assert errors == []
    every = tuple(f"tab {n}" for n in range(NUM_THREADS))
    assert [stored_run(log, run_id).tags for run_id in ids] == [every] * 3


def test_ticked_runs_are_exported_deleted_or_not(log: RunLog) -> None:
    kept, deleted, other = (log.begin(new_run()) for _ in range(3))
    act(log, [deleted, other], deleted=True)
    for shown in (True, False):  # ticks outlive a change of the filters
        files = RunFiles(log, partial(lambda shown, _: TableQuery(deleted=shown), shown))
        assert set(files.matching("json", [{"ticked": [kept, deleted]}])) == {kept, deleted}
        assert set(files.matching("json", [{}])) == ({deleted, other} if shown else {kept})


def exported(files: RunFiles, kind: Any) -> tuple[str, Path]:
    """What the page says after an export, and the file."""
    *_, (said, _, file) = files.export_file(kind, {})
    return said, Path(file)


def test_an_export_that_is_too_large_to_import_says_so_and_gzip_is_not(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [finished_run(log, prompt_text="Say it again. " * 3000) for _ in range(3)]
    monkeypatch.setattr(run_files, "MAX_UPLOAD_BYTES", 100_000)
    files = RunFiles(log, lambda _: TableQuery())
    said, plain = exported(files, "json")
    assert "imports files of up to 0.1 MB: export it as gzip" in said
    said, packed = exported(files, "json.gz")
    assert said.count("Exported 3 runs.") == 1 and "imports" not in said
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    with RunLog.open(str(tmp_path / "there.db")) as there:
        other = RunFiles(there, lambda _: TableQuery())
        monkeypatch.setattr(run_files, "MAX_UNPACKED_CHARS", 60_000)
        *_, (said, _) = other.import_file(str(packed))
        assert "more than 60,000 characters when unpacked" in said and there.ids(RunQuery()) == ()
        monkeypatch.undo()
        *_, (said, _) = other.import_file(str(packed))
        assert "Imported 3 runs." in said and set(there.ids(RunQuery())) == {*ids}


BAD_CHANGES: list[tuple[type[Settings], Any]] = [
    (Annotation, {"id": "x", "purge": True}),
    (Annotation, {"id": "x", "name": "n" * 256}),
    (Annotation, {"id": "x", "name": "a\x00b"}),
    (Annotation, {"id": "x", "note": "n" * 20_001}),
    (Annotation, {"id": "x", "tags": ["a"] * 51}),
    (Annotation, {"id": "x", "tags": ["x" * 129]}),
    (Selection, {"deleted": True, "ids": []}),
    (Selection, {"deleted": "yes", "ids": ["x"]}),
]


@pytest.mark.parametrize(("model", "asked"), BAD_CHANGES, ids=range(len(BAD_CHANGES)))
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
