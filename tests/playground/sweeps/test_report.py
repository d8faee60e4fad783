"""What is said of a sweep: the best trial, what cannot be told from it, its file, its plots."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import escape

import presets
from engine.drafters import methods
from engine.drafters.eagle.methods import EagleConfig
from engine.errors import ConfigError
from engine.formats import DASH
from playground.experiments.plan import METHOD
from playground.experiments.report.columns import COLUMNS
from playground.experiments.report.report import make_report, stored_experiment
from playground.experiments.statistics import Pair, finished_requests
from playground.experiments.sweep.plots import MIN_FOR_IMPORTANCE, NOTES, sweep_figure
from playground.experiments.sweep.report import NO_RUNS, SHOWN, ranking, read_sweep
from playground.experiments.sweep.search import Sweep
from playground.host.methods import choose_method
from playground.host.speedup import TRIAL, Counts, differ, prompt_counts
from playground.web.sweep import card_html
from storage import RunLog
from tests.playground.sweeps.scripted import (
    NUM_PROMPTS,
    PLAIN_TOK_S,
    Scripted,
    pair,
    plan,
    resumed,
    run,
    swept,
)
from tests.storage.conftest import begun_benchmark


def test_the_best_trial_has_equals_and_is_a_method_file(log: RunLog, tmp_path: Path) -> None:
    sweep = swept(log, "max_draft_len=3:7", "lookup=transformers,pool", mode="grid")
    best, state = sweep.best, json.loads(sweep.json_text())
    assert best is not None and state["best"] == best.number
    assert best.point == {"max_draft_len": 5, "lookup": "transformers"}, "the earlier of two"
    (equal,) = sweep.ties
    assert sweep.trial(equal).point == {"max_draft_len": 5, "lookup": "pool"}
    assert ranking(sweep.trials, "mat") == (sweep.trial(1), ()), "MAT has no noise"
    assert f"As good within the noise: trial {equal}." in sweep.report.headline
    file = tmp_path / "best.yaml"
    file.write_text(sweep.preset_yaml())
    preset = presets.method_preset(yaml.safe_load(file.read_text()), where="best.yaml")
    assert choose_method(str(file)) == sweep.config() == preset.config
    assert preset.config.model_dump()["max_draft_len"] == 5 and "speedup 2" in preset.description


def counted(**ratios: float) -> dict[str, Counts]:
    """Prompts of 10 tokens, which plain decoding answers in a second each."""
    return {prompt: Counts(10, 1 / ratio, 10, 1.0) for prompt, ratio in ratios.items()}


def test_two_trials_are_compared_prompt_by_prompt() -> None:
    ours = counted(a=2.0, b=1.5, c=1.0)
    assert differ(ours, counted(a=1.8, b=1.4, c=0.9)), "what prompts have in common cancels out"
    assert not differ(ours, counted(a=2.2, b=1.4, c=1.0))
    assert not differ(ours, ours)
    assert not differ(ours, counted(a=1.0)), "one prompt shows no scatter"
    assert not differ(counted(a=2.0, b=1.5), counted(a=1.4, b=1.5)), "two that scatter"
    assert not differ({}, {}), "a sweep of a version that kept nothing by prompt"


def test_turns_and_repeats_of_a_prompt_tell_settings_no_further_apart() -> None:
    def counts(copies: int, *speeds: float) -> dict[str, Counts]:
        pairs = [pair(speed, prompt) for prompt, speed in enumerate(speeds)]
        return prompt_counts(
            [(replace(a, turn=t), replace(b, turn=t)) for a, b in pairs for t in range(copies)]
        )

    for speeds, apart in (((24.0, 18.0, 27.0), False), ((40.0, 42.0, 41.0), True)):
        for copies in (1, 6):
            assert differ(counts(copies, 20.0, 21.0, 20.5), counts(copies, *speeds)) is apart


def test_settings_that_are_equal_are_rarely_told_apart() -> None:
    """Five in a hundred, as the rule says; with its correction as few of a best of eight."""
    draw = random.Random(0)

    def timed() -> dict[str, Counts]:
        return counted(**{str(i): math.exp(draw.gauss(0.1 * i, 0.1)) for i in range(5)})

    apart = sum(differ(timed(), timed()) for _ in range(4000))
    assert 0.025 < apart / 4000 < 0.065
    wrong = 0
    for _ in range(400):
        trials = [timed() for _ in range(8)]
        best = max(
            trials,
            key=lambda t: (
                sum(c.num_tokens for c in t.values()) / sum(c.decode_s for c in t.values())
            ),
        )
        wrong += all(differ(best, t, 7) for t in trials if t is not best)
    assert wrong / 400 < 0.05


def test_a_trial_above_its_mat_has_no_number_and_is_not_the_best(log: RunLog) -> None:
    """Six draft tokens come out at 5×, at MAT 4: plain decoding was timed while it was slow."""
    speed = lambda config: 50.0 if config.max_draft_len == 6 else 20.0  # noqa: E731
    sweep = swept(log, "max_draft_len=5:6", mode="grid", measure=Scripted(speed))
    state = json.loads(sweep.json_text())
    wrong = next(row for row in state["trials"] if row["point"]["max_draft_len"] == 6)
    speedup = sweep.report.section(wrong["name"]).overall.speedup
    assert speedup is not None and speedup.ratio is None and speedup.doubt == "cheap step"
    assert wrong["reason"].startswith("No speedup")
    assert state["best"] != wrong["number"] and wrong["number"] not in state["as_good"]
    told = [trial.told("speedup") for trial in sweep.trials]
    assert sorted(filter(None, told)) == pytest.approx([2.3, 4.0], rel=0.1), "bounded by MAT"
    mats = swept(log, "max_draft_len=5:6", mode="grid", measure=Scripted(speed), objective="mat")
    assert [trial.value("mat") for trial in mats.trials] == [4.0, 4.0]


def test_the_verdict_says_what_was_gained_and_whether_texts_differ(log: RunLog) -> None:
    class Wrong(Scripted):
        def pair(self, config: Any, prompt: int) -> Pair:
            method, plain = super().pair(config, prompt)
            return (method, plain) if prompt else (replace(method, output_ids=(0,)), plain)

    fast = swept(log, "max_draft_len=1:20", trials=12)
    assert "× that of the settings it began from" in fast.report.headline
    assert "Exploratory: picked from 12 trials" in fast.report.headline
    slow = swept(log, "max_draft_len=9:11", mode="grid", measure=Scripted(lambda config: 8.0))
    assert "Plain decoding is faster: the speedup is 0.9" in slow.report.headline
    single = swept(log, "max_draft_len=5", mode="grid", measure=Wrong())
    assert "Exploratory" not in single.report.headline
    assert f"1 of {NUM_PROMPTS} answers differ from plain decoding's." in single.report.headline


@pytest.mark.parametrize("kind", NOTES)
def test_every_plot_is_plain_json_and_shows_every_measured_trial(log: RunLog, kind: str) -> None:
    base = EagleConfig(use_dynamic_tree=True)
    sweep = swept(
        log,
        "max_draft_len=2:6",
        "dynamic_tree_max_topK=4,10",
        "drafting=auto,as set",
        base=base,
        mode="grid",
    )
    measured = [t for t in sweep.trials if t.outcome == "measured"]
    assert MIN_FOR_IMPORTANCE <= len(measured) < 20, "some are refused"
    figure = json.loads(sweep_figure(sweep, kind).to_json())
    assert NOTES[kind]
    traces = figure["data"]
    if kind == "parallel":
        lines = [t for t in traces if t["mode"] == "lines"]
        assert len(lines) == len(measured)
        axes = figure["layout"]["xaxis"]["ticktext"]
        assert axes == ["speedup", "drafting", "dynamic_tree_max_topK", "max_draft_len"]
        assert sum(t["line"]["color"] == "rgb(217, 119, 6)" for t in lines) == 4, "equals"
    elif kind == "importance":
        assert set(traces[0]["y"]) == {"max_draft_len", "dynamic_tree_max_topK", "drafting"}
        assert traces[0]["y"][-1] == "max_draft_len", "only it decides"
    else:
        assert len(traces[0]["x"]) == len(measured)
        assert figure["layout"]["yaxis"]["rangemode"] == "tozero", "a thousandth is no cliff"
        shown = traces[0]["x"] if kind == "history" else traces[0]["marker"]["color"]
        assert sorted(shown) == [trial.number for trial in measured], "not as Optuna counts"


def test_a_sweep_that_was_stopped_in_its_first_trial_has_all_plots(log: RunLog) -> None:
    sweep = Sweep(log, plan("max_draft_len=1:6", mode="grid"))
    sweep.begin()
    looks = iter(range(6))
    sweep.interrupted = lambda: next(looks, None) is None
    assert run(sweep).cancelled
    done = resumed(log, sweep.id)
    for kind in NOTES:
        figure = json.loads(sweep_figure(done, kind).to_json())
        if kind == "history":
            assert [trace["x"] for trace in figure["data"]] == [[1, 2, 3, 4, 5, 6]] * 2


def test_reports_and_plots_say_what_is_missing(log: RunLog) -> None:
    begun = Sweep(log, plan())
    begun.begin()
    empty = read_sweep(log, begun.id)
    assert json.loads(empty.json_text())["best"] is None
    with pytest.raises(ConfigError, match="measured nothing yet"):
        empty.config()
    with pytest.raises(ConfigError, match="no trial 7"):
        empty.config(7)
    with pytest.raises(ConfigError, match="Nothing has been measured"):
        sweep_figure(empty, "history")
    sweep = swept(log, "max_draft_len=1:8", trials=2)
    assert sweep.trial("2") is sweep.trial(2) is sweep.trials[1], "as the page sends it"
    for wrong in ("3", "", "x", [1], None):
        with pytest.raises(ConfigError, match="has no trial"):
            sweep.config(wrong)
    with pytest.raises(ConfigError, match="needs 6 measured trials; there are 2"):
        sweep_figure(sweep, "importance")
    with pytest.raises(ConfigError, match="plot must be one of"):
        sweep_figure(sweep, "pie")
    flat = swept(log, "max_draft_len=1:8", mode="grid", measure=Scripted(lambda config: 9.0))
    with pytest.raises(ConfigError, match="came out equal"):
        sweep_figure(flat, "importance")


def test_a_trial_has_the_figures_of_a_benchmark_of_its_runs(log: RunLog) -> None:
    """To the last digit: in the table, on the card, in the export and for Optuna."""
    slower = Scripted(drift=lambda trial: 0.5**trial)
    sweep = swept(log, "max_draft_len=3:6", mode="grid", measure=slower)
    heads, rows = sweep.table()
    for trial, row in zip(sweep.trials, rows, strict=True):
        requests = finished_requests(log, sweep.benchmark.id, trial=trial.id)
        one = make_report(sweep.plan.trial(sweep.config(trial.number)), requests).section(METHOD)
        own = sweep.report.section(trial.name)
        assert own.overall == one.overall and own.overall.num_requests == NUM_PROMPTS
        assert (own.latency, own.groups, own.why) == (one.latency, one.groups, one.why)
        assert trial.told("speedup") == one.ratio > 1
        cells = {column.title: column.cell(one, one.overall) for column in COLUMNS.values()}
        shown = {COLUMNS[name].title for name in SHOWN}
        table = {head: cell for head, cell in zip(heads, row, strict=True) if head in shown}
        assert table == {title: cells[title] for title in shown}
        card = card_html(sweep, trial)
        assert all(f">{escape(cell.line)}</b>" in card for cell in cells.values())
    assert cells["speedup"].line == "1.90× (1.59 … 2.27×)" and cells["answers"].text == "identical"
    (plain, *_), done = sweep.report.configurations, sweep.requests
    assert plain.overall.num_requests == 4 * NUM_PROMPTS == len(done) / 2
    assert plain.overall.tok_s == pytest.approx(PLAIN_TOK_S * 4 / (1 + 2 + 4 + 8))
    assert plain.ratio == 1.0, "paired with itself, not with another trial's"


def test_runs_that_were_deleted_leave_dashes_and_a_sentence(log: RunLog) -> None:
    sweep = swept(log, "max_draft_len=4:5", mode="grid")
    of_best = sweep.trial().id
    log.set_deleted([run.run_id for run in sweep.requests if run.trial == of_best])
    left = read_sweep(log, sweep.benchmark.id)
    assert sweep.trial().number == 2 and left.trial().number == 1
    assert {cell.text for cell in left.table()[1][1][3:]} == {DASH}
    assert left.reason(left.trials[1]) == NO_RUNS and NO_RUNS in card_html(left, left.trials[1])
    assert left.report.headline.endswith(
        "1 trial without figures: the log no longer has their runs."
    )
    log.set_deleted([run.run_id for run in sweep.requests])
    nothing = read_sweep(log, sweep.benchmark.id)
    assert nothing.best is None and nothing.num_done == 2
    assert nothing.report.headline.startswith("2 trials without figures:")
    with pytest.raises(ConfigError, match="Nothing has been measured"):
        sweep_figure(nothing, "history")


def test_a_search_goes_on_without_the_runs_of_its_first_trials(log: RunLog) -> None:
    sweep = swept(log, "max_draft_len=1:8", trials=3)
    log.set_deleted([run.run_id for run in sweep.requests])
    later = Sweep(log, plan("max_draft_len=1:8", trials=5), benchmark_id=sweep.benchmark.id)
    later.resume()
    run(later)
    outcomes = [trial.section is not None for trial in read_sweep(log, sweep.benchmark.id).trials]
    assert outcomes == [False, False, False, True, True]


def test_a_sweep_of_an_older_version_has_the_figures_of_its_runs(log: RunLog) -> None:
    """Its artifacts have figures of their own and settings that no longer exist."""
    sweep = swept(log, "max_draft_len=4:5", mode="grid")
    figures = {"tok_s": 1.0, "plain_tok_s": 1.0, "speedup": 9.0, "mat": 9.0, "num_same": 1}
    for trial in sweep.trials:
        meta = {"number": trial.number, "point": trial.point, "outcome": trial.outcome}
        meta |= {"reason": "", "seconds": 1.0, "figures": figures, "worker": "a", "bounds": [1.0]}
        key, sweep_id = {"number": trial.number}, sweep.benchmark.id
        log.artifacts.put(TRIAL, key, meta=meta, payload=b"", benchmark_id=sweep_id)
    again = read_sweep(log, sweep.benchmark.id)
    assert again.report == sweep.report and again.table() == sweep.table()


# ---- in the log


def test_sweeps_are_no_benchmarks(log: RunLog) -> None:
    sweep_id = swept(log, trials=1, name="s").benchmark.id
    with pytest.raises(ConfigError, match="No experiment"):
        stored_experiment(log, sweep_id)
    benchmark_id = begun_benchmark(log, "b", {"kind": "benchmark", "text": '"kind":"sweep"'})
    assert [head.id for head in log.benchmarks.list()] == [benchmark_id]
    assert [head.name for head in log.benchmarks.list(9, sweeps=True)] == ["s"]
    with pytest.raises(ConfigError, match="No experiment"):
        read_sweep(log, benchmark_id)


def test_a_sweep_over_a_method_that_is_gone_says_so(log: RunLog) -> None:
    sweep_id = swept(log, trials=1).benchmark.id
    types = {name: cls for name, cls in methods().items() if name != "NGram"}
    with pytest.raises(ConfigError, match="There is no method 'NGram' here"):
        read_sweep(log, sweep_id, types)
