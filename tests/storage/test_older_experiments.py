"""Experiments whose runs named their requests in labels: a benchmark, a comparison, a search, a
sweep that was stopped, and a replay, with the figures that the version which wrote them showed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from playground.experiments.experiment import Experiment
from playground.experiments.report.export import json_text
from playground.experiments.report.report import read_results
from playground.experiments.sweep.report import read_sweep, stored_trials
from playground.host.speedup import newest_speedups
from playground.runs.query import TableQuery, read_filters
from playground.runs.table import RunTable
from playground.runs.transfer import import_runs, read_lines
from storage import RunLog, RunQuery, copy_log
from tests.playground.sweeps.scripted import Scripted, resumed

ASSETS = Path(__file__).parent / "assets"
SHOWN = ("method_title", "settings", "prompt", "speedup", "status")


def unpacked(name: str) -> bytes:
    return gzip.decompress((ASSETS / f"{name}.gz").read_bytes())


@pytest.fixture(scope="module")
def then() -> dict[str, Any]:
    """What schema 0008's last version showed of the log."""
    shown: dict[str, Any] = json.loads(unpacked("experiments-0008.json"))
    return shown


def copy_tables(file: Path, url: str) -> None:
    """Write the tables of a SQLite file, as they are, into the empty database of a server."""
    old, new, tables = sa.create_engine(f"sqlite:///{file}"), sa.create_engine(url), sa.MetaData()

    @sa.event.listens_for(tables, "column_reflect")
    def in_any_database(inspector: object, table: object, column: dict[str, Any]) -> None:
        column["type"] = column["type"].as_generic()

    tables.reflect(old)
    tables.create_all(new)
    with old.connect() as source, new.begin() as into:
        for table in tables.sorted_tables:
            if rows := [dict(row._mapping) for row in source.execute(sa.select(table))]:
                into.execute(table.insert(), rows)
    old.dispose()
    new.dispose()


@pytest.fixture(params=["updated", "updated on a server", "copied to a server", "imported"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunLog]:
    """The log after its update, or a new one with the runs of its export."""
    (file := tmp_path / "old.sqlite3").write_bytes(unpacked("experiments-0008.sqlite3"))
    with ExitStack() as stack:
        if request.param == "updated on a server":
            url = stack.enter_context(request.getfixturevalue("postgres").database())
            copy_tables(file, url)
            yield stack.enter_context(RunLog.open(url))
            return
        log = stack.enter_context(RunLog.open(str(file)))
        if request.param == "imported":  # the rows of its experiments stay, all runs go
            ids = log.ids(RunQuery(deleted=None))
            log.set_deleted(ids)
            assert log.erase(ids) == len(ids)
            list(import_runs(log, read_lines(ASSETS / "runs-0008.json.gz")))
        elif request.param != "updated":
            server = request.getfixturevalue("postgres")
            url = stack.enter_context(server.database("empty_log"))
            server_log = stack.enter_context(RunLog.open(url))
            list(copy_log(log, server_log))
            log = server_log
        yield log


def test_every_figure_is_as_the_older_version_showed_it(log: RunLog, then: dict[str, Any]) -> None:
    for benchmark_id, report in then["reports"].items():
        assert json.loads(json_text(read_results(log, benchmark_id)))["report"] == report
    sweep = json.loads(read_sweep(log, then["ids"]["sweep"]).json_text())
    assert sweep["report"] == then["sweep"]
    assert [{name: t[name] for name in then["trials"][0]} for t in sweep["trials"]] == then[
        "trials"
    ]
    rows = RunTable(log).view(TableQuery(), SHOWN)["rows"]
    assert [row["cells"] for row in rows] == then["table"]
    assert {run.id: ratio for ratio, run in newest_speedups(log)} == then["speedups"]


def test_links_of_an_older_version_open_the_same_runs(log: RunLog, then: dict[str, Any]) -> None:
    ids, trial = then["ids"], stored_trials(log, then["ids"]["sweep"])[0]
    links: list[tuple[dict[str, Any], int]] = [
        ({"experiment": f"compare:{ids['compare']}"}, 18),
        ({"benchmark_id": ids["benchmark"]}, 18),
        ({"experiment": f"sweep:{ids['sweep']}"}, 32),
        ({"benchmark_id": f"{ids['sweep']}-{trial.id}"}, 8),
        ({"experiment": "replay:0123456789abcdef", "sort": "benchmark_id"}, 2),
        (read_filters([f"benchmark_id = {ids['fastest']}", "label:turn = 0"]), 18),
    ]
    for link, num_runs in links:
        assert log.find(TableQuery.parse(link).run_query()).total == num_runs
    assert TableQuery.parse({"group": "benchmark_id"}).group == "experiment_id"


def test_runs_name_their_requests_and_keep_their_labels(log: RunLog, then: dict[str, Any]) -> None:
    first = log.rows(RunQuery(experiment_id=then["ids"]["benchmark"], descending=False))[0]
    assert first.key == ("s", "1", 0, 0, "plain") and first.worker == "node/1"
    assert first.labels["repeat"] == "0" and first.labels["category"] == "writing"
    odd = log.rows(RunQuery(labels={"turn": "first"}))
    assert [(run.configuration, run.key[2]) for run in odd] == [("", 0)] * 2, "no requests"
    assert {run.experiment_id for run in odd} == {None, "0123456789abcde0"}


def test_what_was_stopped_is_resumed(log: RunLog, then: dict[str, Any]) -> None:
    sweep_id, measure = then["ids"]["sweep"], Scripted()
    log.benchmarks.finish(sweep_id, "cancelled", {})
    sweep = resumed(log, sweep_id, measure)
    assert measure.groups == [stored_trials(log, sweep_id)[-1].id], "the trial that was running"
    assert [trial.outcome for trial in sweep.trials] == ["measured"] * 4
    benchmark_id = then["ids"]["benchmark"]
    plan = read_results(log, benchmark_id).plan
    assert len(Experiment(log, plan, benchmark_id=benchmark_id).requests) == 18
