"""A comparison on a tiny target: in turn, interleaved, every request a run of the log."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from playground.experiments.compare.report import (
    Comparison,
    pieces,
    plan_of_runs,
    stored_runs,
)
from playground.experiments.experiment import Experiment
from playground.experiments.plan import BASELINE_NAME
from playground.host.runner import MAX_WAITING, EngineHost, QueueFullError
from storage import RunDetail, RunLog, RunQuery
from storage.records import OutOfReachError
from storage.schema import benchmarks
from tests.playground.asks import finished, start
from tests.playground.bench.requests import measured, plan_of
from tests.playground.bench.test_service import on_the_engine
from tests.playground.compare.running import begun, ended, experiments_of, row, values_of
from tests.playground.tiny import ScriptedConfig


def stored(log: RunLog, comparison: Experiment) -> list[RunDetail]:
    """Its runs, in the order in which they ran."""
    query = RunQuery(labels={"compare": comparison.id}, descending=False, limit=500)
    details = [log.get(run.id) for run in log.find(query).rows]
    return [run for run in details if run is not None]


@pytest.fixture(scope="module")
def pair(host: EngineHost) -> Experiment:
    """Plain, scripted, and scripted with another tree, twice on each of two prompts."""
    comparison = begun(
        host,
        ("scripted", {}),
        ("scripted", {"scripted_choices": "[[0], [1]]"}),
        suite="starter",
    )
    ended(comparison)
    return comparison


def test_every_request_is_a_run_of_the_log(pair: Experiment, log: RunLog) -> None:
    runs = stored(log, pair)
    assert pair.state == "completed", pair.error
    assert len(runs) == 3 * 2 * 2
    assert {run.status for run in runs} == {"completed"}
    keys = {(r.labels["configuration"], r.labels["prompt"], r.labels["repeat"]) for r in runs}
    assert len(keys) == len(runs)
    assert {run.labels["suite"] for run in runs} == {"starter"}
    assert {run.method_title for run in runs} == {
        BASELINE_NAME,
        "Scripted tree (1)",
        "Scripted tree (2)",
    }


def test_the_race_shows_the_median_repeat_and_the_tables_speedup(
    pair: Experiment, host: EngineHost, log: RunLog
) -> None:
    report = ended(pair)
    comparison = Comparison.read(log, pair.id, host.catalog.types)
    assert list(report["medians"]) == [name for name, _ in report["prompts"]]
    for prompt, runs in report["medians"].items():
        assert runs == comparison.median_runs(prompt) and len(runs) == 3
        for name, shown in zip(comparison.names, runs, strict=True):
            timed = {
                r.run_id: r.decode_s
                for r in comparison.finished
                if (r.prompt, r.configuration) == (prompt, name)
            }
            assert len(timed) == 2 and timed[shown] == min(timed.values())
    assert report["configurations"][0]["speedup"] is None
    for own in report["configurations"][1:]:
        ratio = own["overall"]["speedup"]["ratio"]
        assert own["speedup"] == ("–" if ratio is None else f"{ratio:.2f}×")


def test_a_comparison_with_requests_missing_stays_preliminary(
    pair: Experiment, host: EngineHost, log: RunLog
) -> None:
    assert Comparison.read(log, pair.id, host.catalog.types).num_planned is None
    assert "Preliminary" not in ended(pair)["headline"]
    last = stored(log, pair)[-1].id
    log.delete(last)
    try:
        comparison = Comparison.read(log, pair.id, host.catalog.types)
        report = values_of(comparison.results(log))
    finally:
        log.restore(last)
    assert comparison.num_planned == 12 and report["fastest"] is None
    assert report["headline"].startswith("Preliminary (11 of 12 requests):")


def test_of_three_repeats_the_one_in_the_middle_is_raced() -> None:
    requests = [
        measured("x", run_id=f"r{n}", repeat=n, decode_s=s) for n, s in enumerate((0.5, 0.2, 0.4))
    ]
    runs = {("1", n, "x"): f"r{n}" for n in range(3)} | {("1", 0, "y"): "failed"}
    comparison = Comparison("c", plan_of("x", "y"), runs=runs, finished=requests)
    assert comparison.shown_prompt() == "1" and comparison.median_runs("1") == ["r2", "failed"]


def test_labels_say_all_that_a_link_needs(pair: Experiment, log: RunLog) -> None:
    assert stored(log, pair)[-1].labels == {
        "compare": pair.id,
        "place": "2",
        "configuration": "Scripted tree (2)",
        "suite": "starter",
        "category": "code",
        "group": "code",
        "prompt": "2",
        "turn": "0",
        "repeat": "1",
    }


def test_raw_prompts_of_a_suite_are_continued(pair: Experiment, log: RunLog) -> None:
    by_prompt = {run.labels["prompt"]: run for run in stored(log, pair)}
    assert by_prompt["1"].messages and by_prompt["1"].prompt_text == "Say hello."
    assert not by_prompt["2"].messages and by_prompt["2"].prompt_text == "def f(x):"


def test_the_report_has_figures_speedups_and_reasons(pair: Experiment) -> None:
    report = ended(pair)
    assert [r["badge"] for r in report["configurations"]] == ["baseline", "lossless", "lossless"]
    plain, scripted = report["configurations"][:2]
    assert plain["reference"] and plain["verdict"]["kind"] == "baseline"
    assert scripted["overall"]["num_requests"] == 4
    assert scripted["overall"]["mat"] > 1.2
    speedup = scripted["overall"]["speedup"]
    low, high = speedup["low"], speedup["high"]
    # four answers of milliseconds may scatter too much for an interval
    assert (low is None and high is None) or low <= speedup["ratio"] <= high
    rates = (one["overall"]["tok_s"] for one in (scripted, plain))
    assert speedup["doubt"] or speedup["ratio"] == pytest.approx(next(rates) / next(rates))
    why = scripted["why"]
    assert why is None or why["measured"] == pytest.approx(speedup["ratio"])
    assert {name for name, _ in scripted["by_prompt"]} <= {"1", "2"}
    assert report["num_repeats"] == 2 and len(report["runs"]) == 12
    assert "float32" in report["setup"] and "greedy" in report["setup"]


def test_greedy_texts_of_a_lossless_method_are_identical(pair: Experiment) -> None:
    verdict = row(ended(pair), "Scripted tree (1)")["verdict"]
    assert verdict["kind"] == "identical" and "80 tokens in 4 texts" in verdict["sentence"]


def test_the_log_alone_tells_the_same(pair: Experiment, host: EngineHost, log: RunLog) -> None:
    again = Comparison.read(log, pair.id, host.catalog.types)
    assert values_of(again.results(log)) == ended(pair)


def test_a_comparison_is_an_experiment_with_a_row_and_a_report(
    pair: Experiment, host: EngineHost
) -> None:
    state = experiments_of(host).look(pair.id)
    assert state.row.status == "completed" and state.row.name.startswith("Comparison · Say hello")
    assert state.results.plan == pair.plan and state.results.report.num_done == 12
    assert state.results.report.headline == ended(pair)["headline"]


def test_a_comparison_that_stored_no_plan_is_read_from_its_runs(
    pair: Experiment, host: EngineHost, log: RunLog
) -> None:
    """As those of earlier versions, which have no row of their own."""
    plan = plan_of_runs(stored_runs(log, pair.id), host.catalog.types)
    same = ("kind", "dtype", "items", "repeats", "sampling", "limits")
    assert [getattr(plan, name) for name in same] == [getattr(pair.plan, name) for name in same]
    assert [(c.name, c.config) for c in plan.configurations] == [
        (c.name, c.config) for c in pair.plan.configurations
    ]
    alone = begun(host, ("scripted", {}), owner="alone")
    report = ended(alone)
    with log._database.transaction() as connection:
        connection.execute(benchmarks.delete().where(benchmarks.c.id == alone.id))
    again = Comparison.read(log, alone.id, host.catalog.types)
    assert values_of(again.results(log)) == report


def test_a_corrupted_method_is_caught(host: EngineHost, log: RunLog) -> None:
    comparison = begun(host, ("scripted", {}), ("corrupted", {"wrong_at": "4"}))
    report = ended(comparison)
    verdict = row(report, "Corrupted")["verdict"]
    runs = {run.labels["configuration"]: run for run in stored(log, comparison)}
    plain, own = runs[BASELINE_NAME].output_ids, runs["Corrupted"].output_ids
    steps = log.steps(runs["Corrupted"].id)
    at = 1 + sum(step.num_committed for step in steps[:4]) - 1
    assert plain[:at] == own[:at] and plain[at] != own[at]
    assert verdict["kind"] == "diverged"
    assert verdict["parting"]["index"] == at
    assert verdict["near_tie"] is False
    assert "the method is at fault" in verdict["sentence"]
    assert "2 of 2 texts" in verdict["sentence"]
    assert "float32: top-2 logit gap" in verdict["gap"][0]
    said = pieces(log, runs[BASELINE_NAME].id)
    assert len(said) == len(plain)
    assert verdict["parting"]["before"] == "".join(said[:at])[-12:]
    assert verdict["parting"]["plain"] == "".join(said[at : at + 16])
    assert verdict["parting"]["own"] != verdict["parting"]["plain"]
    assert row(report, "Scripted tree")["verdict"]["kind"] == "identical"
    again = Comparison.read(log, comparison.id, host.catalog.types)
    assert values_of(again.results(log)) == report


def test_a_lossy_method_is_called_lossy_whatever_it_writes(host: EngineHost) -> None:
    report = ended(begun(host, ("scripted", {"note": "lossy"}), options={"repeats": "1"}))
    entry = row(report, "Scripted tree")
    assert entry["badge"] == "lossy" and entry["verdict"]["kind"] == "lossy"
    assert "identical here" in entry["verdict"]["sentence"]


def test_sampled_texts_are_not_compared_token_by_token(host: EngineHost, log: RunLog) -> None:
    comparison = begun(host, ("scripted", {}), sampling={"temperature": "1.0", "seed": "5"})
    verdict = row(ended(comparison), "Scripted tree")["verdict"]
    assert verdict["kind"] == "sampled" and "same distribution" in verdict["sentence"]
    seeds = {(run.labels["repeat"], run.sampling["seed"]) for run in stored(log, comparison)}
    assert seeds == {("0", 5), ("1", 6)}


def test_stop_ends_at_once_and_keeps_what_ran(host: EngineHost, log: RunLog) -> None:
    slow = {"delay_ms": "25"}
    comparison = begun(host, ("scripted", slow), owner="stopper", limits={"max_new_tokens": "400"})
    while len(stored(log, comparison)) < 2:
        time.sleep(0.02)
    asked = time.monotonic()
    comparison.cancel()
    report = ended(comparison)
    assert time.monotonic() - asked < 3
    assert comparison.state == "cancelled"
    assert not host.runs.owned_by("stopper")
    assert {run.status for run in stored(log, comparison)} <= {"completed", "cancelled"}
    assert report["configurations"][0]["overall"]["tok_s"] is not None
    assert finished(start(host)).state == "completed"


def test_a_waiting_comparison_can_be_stopped(host: EngineHost, log: RunLog) -> None:
    busy = start(host, owner="busy", settings={"delay_ms": "20"})
    comparison = begun(host, owner="waiting")
    comparison.cancel()
    finished(busy)
    ended(comparison)
    assert comparison.state == "cancelled" and not stored(log, comparison)


def test_a_configuration_that_breaks_leaves_the_others_running(
    host: EngineHost, log: RunLog
) -> None:
    comparison = begun(host, ("scripted", {"fail_at": "3"}), ("corrupted", {"wrong_at": "99"}))
    report = ended(comparison)
    assert comparison.state == "completed"
    broken = row(report, "Scripted tree")
    assert broken["fault"] and "Scripted tree" in broken["fault"]
    assert broken["overall"]["num_requests"] == 0
    assert row(report, "Corrupted")["verdict"]["kind"] == "identical"
    assert len(stored(log, comparison)) == 2 * 2


def test_a_prompt_that_does_not_fit_is_one_sentence(host: EngineHost) -> None:
    comparison = begun(host, prompt="word " * 400)
    ended(comparison)
    assert comparison.state == "failed"
    assert comparison.error is not None and "context" in comparison.error


def test_nothing_comes_between_the_runs_of_a_comparison(host: EngineHost, log: RunLog) -> None:
    comparison = begun(host, ("scripted", {"delay_ms": "5"}), owner="one")
    other = start(host, owner="two")
    ended(comparison)
    finished(other)
    runs = log.find(RunQuery(limit=5)).rows
    assert runs[0].labels == {} and {run.labels["compare"] for run in runs[1:5]} == {comparison.id}


def test_drafters_of_a_comparison_have_learned_from_nothing(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repeat gets new ones: a method that remembers earlier texts would race with itself."""
    made: list[object] = []
    build = ScriptedConfig.build
    monkeypatch.setattr(
        ScriptedConfig, "build", lambda self, bench: made.append(self) or build(self, bench)
    )
    ended(begun(host, options={"repeats": "3"}))
    assert len(made) == 3


def test_a_comparison_that_is_refused_cancels_nothing_and_leaves_no_row(
    host: EngineHost, log: RunLog
) -> None:
    running = begun(host, ("scripted", {"delay_ms": "50"}), owner="refused")
    while running.progress is None:
        time.sleep(0.01)
    waiting = [
        host.submit(lambda run: run.end("completed"), owner=str(n)) for n in range(MAX_WAITING)
    ]
    rows = log.benchmarks.list()
    with pytest.raises(QueueFullError):
        begun(host, ("scripted", {}), owner="refused")
    assert not running.cancelled() and log.benchmarks.list() == rows
    for run in waiting:
        run.cancel()
    running.cancel()
    ended(running)
    assert running.state == "cancelled"


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
    report = ended(comparison)
    assert comparison.state == "completed", comparison.error
    assert len(report["runs"]) == 2 * 2 * 2 and num_read > 8
