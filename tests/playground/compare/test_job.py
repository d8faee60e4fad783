"""A comparison on a tiny target: in turn, interleaved, every request a run of the log."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from playground.experiments.comparison import Comparison, Race
from playground.experiments.plan import BASELINE_NAME
from playground.experiments.report.report import Results, make_report
from playground.host.live import pieces
from playground.host.runner import MAX_WAITING, EngineHost, QueueFullError
from playground.web.report import cards_html, summary_html
from storage import RunDetail, RunLog, RunQuery
from storage.records import OutOfReachError
from tests.playground.asks import until
from tests.playground.bench.requests import measured, plan_of
from tests.playground.bench.test_service import on_the_engine
from tests.playground.compare.corrupted import (
    begun,
    ended,
    experiments_of,
    raced,
    section,
    stored_race,
)
from tests.playground.tiny import held_drafts


def stored(log: RunLog, comparison: Comparison) -> list[RunDetail]:
    """Its runs, in the order in which they ran."""
    query = RunQuery(experiment_id=comparison.id, descending=False, limit=500)
    details = [log.get(run.id) for run in log.find(query).rows]
    return [run for run in details if run is not None]


@pytest.fixture(scope="module")
def pair(host: EngineHost) -> Comparison:
    """Plain, scripted, and scripted with another tree, twice on each of two prompts."""
    other_tree = {"scripted_choices": "[[0], [1]]"}
    return ended(begun(host, ("scripted", {}), ("scripted", other_tree), suite="starter"))


def test_every_run_has_the_labels_that_a_link_needs(pair: Comparison, log: RunLog) -> None:
    runs = stored(log, pair)
    assert len(runs) == 3 * 2 * 2 and {run.status for run in runs} == {"completed"}
    labels = runs[-1].labels
    assert {run.kind for run in runs} == {"compare"} and labels["turn"] == "0"
    assert labels["configuration"] == runs[-1].method_title == "Scripted tree (2)"
    by_prompt = {run.labels["prompt"]: run for run in runs}
    assert by_prompt["1"].messages and by_prompt["1"].prompt_text == "Say hello."
    assert not by_prompt["2"].messages and by_prompt["2"].prompt_text == "def f(x):"


def test_of_the_repeats_the_one_in_the_middle_or_the_faster_of_two_is_raced() -> None:
    requests = tuple(
        measured("x", run_id=f"r{n}", repeat=n, decode_s=s) for n, s in enumerate((0.5, 0.2, 0.4))
    )
    runs = {("1", n, "x"): f"r{n}" for n in range(3)} | {("1", 0, "y"): "failed"}
    row: Any = None
    plan = plan_of("x", "y")
    for timed, median in ((requests, "r2"), (requests[:2], "r1")):
        race = Race(Results(row, plan, timed, make_report(plan, timed), {}), runs)
        assert race.shown == race.median_runs("1") == [median, "failed"]


def test_the_log_alone_has_the_report_and_the_race_with_its_speedups(
    pair: Comparison, host: EngineHost, log: RunLog
) -> None:
    race = raced(pair)
    drawn, report = json.loads(race.to_json()), race.results.report
    assert len(race.runs) == 12 and drawn["num_repeats"] == 2
    assert [len(runs) for _, runs in drawn["prompts"]] == [3] * len(race.prompts)
    for (_, _, name), run in race.runs.items():
        own = report.section(name)
        shown = own.overall.speedup and not own.reference and own.overall.speedup.text
        assert drawn["speedups"][run] == (shown or "")
    plain, scripted = report.configurations[:2]
    assert plain.reference and not plain.verdict_sentence
    assert "float32" in race.results.about and "greedy" in race.results.about
    assert scripted.verdict is not None and scripted.verdict.num_compared == 4
    assert scripted.verdict.identical and "4 texts, all identical" in scripted.verdict_sentence
    assert scripted.verdict_sentence.replace("'", "&#39;") in cards_html(race.results, log)
    assert "baseline" in summary_html(race.results) and "lossless" in summary_html(race.results)
    assert stored_race(host, pair.id).to_json() == race.to_json()
    state = experiments_of(host).look(pair.id)
    assert stored_race(host, pair.id).results.report == state.results.report == report
    name = state.results.benchmark.name
    assert state.status == "completed" and name.startswith("Comparison · Say hello")
    assert state.results.plan == pair.plan and report.num_done == 12


def test_a_corrupted_method_is_caught(host: EngineHost, log: RunLog) -> None:
    comparison = begun(host, ("scripted", {}), ("corrupted", {"wrong_at": "4"}))
    wrong = section(comparison, "Corrupted")
    runs = {run.labels["configuration"]: run for run in stored(log, comparison)}
    plain, own = runs[BASELINE_NAME].output_ids, runs["Corrupted"].output_ids
    steps = log.steps(runs["Corrupted"].id)
    at = 1 + sum(step.num_committed for step in steps[:4]) - 1
    assert plain[:at] == own[:at] and plain[at] != own[at]
    assert wrong.verdict is not None and wrong.verdict.divergences[0].at == at
    assert "the method is at fault" in wrong.verdict_sentence
    assert "2 of 2 texts" in wrong.verdict_sentence
    assert "float32: top-2 logit gap" in wrong.verdict.divergences[0].gap
    assert len(pieces(log, runs[BASELINE_NAME].id)) == len(plain)
    cards = cards_html(raced(comparison).results, log)
    assert "the method is at fault" in cards and "pg-parting" in cards
    assert "2 answers that differ from plain" in cards
    assert stored_race(host, comparison.id).results.report == raced(comparison).results.report


def test_a_lossy_method_is_called_lossy_whatever_it_writes(host: EngineHost) -> None:
    comparison = begun(host, ("scripted", {"note": "lossy"}), options={"repeats": "1"})
    entry = section(comparison, "Scripted tree")
    assert not entry.lossless and "lossy" in summary_html(raced(comparison).results)
    assert "identical" in entry.verdict_sentence and "Lossy" in entry.verdict_sentence


def test_sampled_texts_are_not_compared_token_by_token(host: EngineHost, log: RunLog) -> None:
    comparison = begun(host, ("scripted", {}), sampling={"temperature": "1.0", "seed": "5"})
    sampled = section(comparison, "Scripted tree")
    assert sampled.verdict is None and "same distribution" in sampled.verdict_sentence
    seeds = {(run.labels["repeat"], run.sampling["seed"]) for run in stored(log, comparison)}
    assert seeds == {("0", 5), ("1", 6)}


def test_a_configuration_that_breaks_leaves_the_others_running(
    host: EngineHost, log: RunLog
) -> None:
    comparison = begun(host, ("scripted", {"fail_at": "3"}), ("corrupted", {"wrong_at": "99"}))
    broken, fine = section(comparison, "Scripted tree"), section(comparison, "Corrupted")
    assert comparison.state == "completed"
    assert "Scripted tree" in broken.fault and broken.overall.num_requests == 0
    assert fine.verdict is not None and fine.verdict.identical
    assert len(stored(log, comparison)) == 2 * 2


def test_a_prompt_that_does_not_fit_is_one_sentence(host: EngineHost) -> None:
    comparison = ended(begun(host, prompt="word " * 400))
    assert comparison.state == "failed"
    assert comparison.error is not None and "context" in comparison.error


def test_a_comparison_that_is_refused_cancels_nothing_and_leaves_no_row(
    host: EngineHost, log: RunLog
) -> None:
    with held_drafts():
        running = begun(host, owner="refused")
        until(lambda: running.progress is not None)
        waiting = [
            host.submit(lambda run: run.end("completed"), owner=str(n)) for n in range(MAX_WAITING)
        ]
        rows = log.benchmarks.list()
        with pytest.raises(QueueFullError):
            begun(host, owner="refused")
        assert not running.cancelled() and log.benchmarks.list() == rows
        for run in waiting:
            run.cancel()
        running.cancel()
    assert ended(running).state == "cancelled"


def test_a_comparison_waits_for_a_log_that_cannot_be_read_for_a_while(
    host: EngineHost, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.RETRY_S", 0.0)
    num_read = 0

    def lose(connection: sa.Connection) -> None:
        nonlocal num_read
        if connection.get_execution_options().get("reading"):
            num_read += 1
            if num_read % 2:
                raise OutOfReachError("the server is away")

    on_the_engine(log, "begin", lose)
    comparison = begun(host, ("scripted", {}), suite="starter", owner="away")
    race = raced(comparison)
    assert comparison.state == "completed", comparison.error
    assert len(race.runs) == 2 * 2 * 2 and num_read > 8
