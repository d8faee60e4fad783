"""The speedup of an experiment is its report's wherever it stands, for any log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import formats
from engine.model.sources import TargetSpec
from playground.experiments.plan import Configuration
from playground.experiments.report.report import read_results
from playground.experiments.sweep.report import read_sweep, save_trial
from playground.experiments.sweep.trials import Outcome, Trial
from playground.export import offered_runs
from playground.host.catalog import Catalog
from playground.host.menu import MethodMenu
from playground.host.speedup import newest_speedups
from playground.runs.query import TableQuery
from playground.runs.table import RunTable
from storage import RunDetail, RunLog, Status, StoredRun, new_id
from tests.playground.bench.requests import plan_of
from tests.playground.sweeps.scripted import pair, write_run
from tests.playground.sweeps.scripted import plan as sweep_plan
from tests.storage.conftest import request

TARGET = "smollm2-135m-instruct"
CATALOG = Catalog.shipped()
METHODS = {name: CATALOG.method(name).config for name in ("plain", "ngram", "suffix")}
PLAN = plan_of(
    configurations=[Configuration(name, name, config) for name, config in METHODS.items()],
    target=TargetSpec(name=TARGET, path="."),
)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
WORKERS = ("", "node-a/1", "node-b/2")


@dataclass(frozen=True)
class Answer:
    """A run of an experiment: who ran what, how it ended, how long it took."""

    configuration: str
    prompt: int
    repeat: int
    worker: str
    status: Status
    deleted: bool
    num_new_tokens: int
    num_steps: int
    decode_s: float


@st.composite
def experiments(draw: st.DrawFn) -> list[Answer]:
    """Answers of up to three workers; some rounds are begun again, stopped, or deleted."""
    answers = []
    rounds = product(range(1, draw(st.integers(2, 3)) + 1), range(draw(st.integers(1, 2))))
    for prompt, repeat in rounds:
        for _ in range(draw(st.integers(1, 2))):
            worker = draw(st.sampled_from(WORKERS))
            for configuration in draw(st.permutations(list(METHODS))):
                tokens = draw(st.integers(1, 60))
                answer = Answer(
                    configuration,
                    prompt,
                    repeat,
                    worker,
                    status=draw(st.sampled_from((*["completed"] * 5, "failed", "cancelled"))),
                    deleted=draw(st.integers(0, 6)) == 6,
                    num_new_tokens=tokens,
                    num_steps=draw(st.integers(1, 60)),
                    decode_s=draw(st.floats(0.01, 3.0)) if tokens > 1 else 0.0,
                )
                answers.append(answer)
    return answers


def stored(number: int, one: Answer, benchmark_id: str, method: dict[str, Any]) -> StoredRun:
    """The run as the log has it; runs are a second apart, in order."""
    of = {"experiment_id": benchmark_id, "kind": "benchmark", "worker": one.worker}
    asked = request(one.configuration, str(one.prompt), repeat=one.repeat, **of)
    figures: dict[str, Any] = {name: getattr(one, name) for name in ("num_new_tokens", "num_steps")}
    metrics = {**figures, "num_prompt_tokens": 5, "num_drafted": one.num_steps, "num_accepted": 0}
    metrics |= {"ttft_s": 0.1, "decode_s": one.decode_s, "itl_ms": None, "time_split": None}
    absent: dict[str, Any] = dict.fromkeys(("mat", "tok_s", "itl_ms", "step_p50_ms", "step_p95_ms"))
    absent |= dict.fromkeys(("draft_acceptance", "draft_s", "verify_s", "accept_s", "other_s"))
    run = RunDetail(
        id=new_id(),
        created_at=BEGAN + timedelta(seconds=number),
        status=one.status,
        target=TARGET,
        method=method,
        decoding_type=method["decoding_type"],
        method_title=one.configuration,
        lossless=True,
        sampling={"temperature": 0.0},
        limits={},
        dtype="float32",
        device="cpu",
        setup_id="",
        prompt_id="",
        prompt_text=f"Prompt {one.prompt}.",
        prompt_ids=(),
        messages=(),
        environment={"device_name": "a processor", "weights": "w"},
        finish_reason="length",
        name="",
        note="",
        tags=(),
        **asked,
        deleted=False,
        first_token_id=5,
        first_text="",
        output_ids=(5,) * one.num_new_tokens,
        text="",
        metrics=metrics,
        error=None,
        num_prompt_tokens=5,
        ttft_s=0.1,
        **figures,
        **absent,
    )
    return StoredRun(run, ())


def write(log: RunLog, runs: list[StoredRun], deleted: list[bool]) -> None:
    log.write_whole(runs)
    log.set_deleted([one.run.id for one, gone in zip(runs, deleted, strict=True) if gone])


def in_table(log: RunLog) -> str:
    """The speedup in the experiment's row on the Runs page."""
    (row,) = RunTable(log).view(TableQuery(), ["speedup"])["rows"]
    (text,) = row["cells"]
    return str(text)


def in_deploy(log: RunLog) -> dict[str, str]:
    """The speedups beside the runs that Deploy offers, by configuration."""
    offered = [title.split(" · ") for title, key in offered_runs(log)]
    return {parts[0]: parts[1].removesuffix(" plain") for parts in offered if "×" in parts[1]}


def in_menu(log: RunLog) -> dict[str, str]:
    """The speedups in the menu of methods, by key."""
    labels = {key: label for label, key in MethodMenu(CATALOG, log).choices(TARGET)}
    parts = {name: labels[name].split(" · ") for name in METHODS}
    return {n: part for n, own in parts.items() for part in own if part.endswith("×")}


def ranges(ratios: list[float]) -> str:
    if not ratios:
        return formats.DASH
    low, high = min(ratios), max(ratios)
    same = formats.speedup(low) == formats.speedup(high)
    return formats.speedup(high) if same else formats.interval(low, high)


@settings(deadline=None, max_examples=25)
@given(runs=experiments())
def test_an_experiment_has_its_reports_speedup_on_every_page(
    runs: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with RunLog.open(str(tmp_path_factory.mktemp("log") / "runs.sqlite3")) as log:
        benchmark_id = new_id()
        log.benchmarks.begin(benchmark_id, "a benchmark", PLAN.to_dict())
        methods = {name: config.model_dump(mode="json") for name, config in METHODS.items()}
        written = [
            stored(number, one, benchmark_id, methods[one.configuration])
            for number, one in enumerate(runs)
        ]
        write(log, written, [one.deleted for one in runs])
        if all(one.deleted for one in runs):
            return
        report = read_results(log, benchmark_id).report
        ratios = {s.name: s.ratio for s in report.configurations if s.ratio and not s.reference}
        texts = {name: formats.speedup(ratio) for name, ratio in ratios.items()}
        exact = {run.method_title: ratio for ratio, run in newest_speedups(log) if ratio}
        assert exact == ratios, "to the last digit"
        assert in_table(log) == ranges([*ratios.values()])
        assert in_deploy(log) == texts
        if any(one.status == "completed" and not one.deleted for one in runs):
            assert in_menu(log) == texts


def test_a_trial_that_was_stopped_counts_neither_in_the_report_nor_in_the_table(
    log: RunLog,
) -> None:
    sweep_id, plan = new_id(), sweep_plan()
    log.benchmarks.begin(sweep_id, "a sweep", plan.to_dict())
    trials: dict[Outcome, float] = {"measured": 15.0, "running": 25.0, "failed": 30.0}
    for number, (outcome, speed) in enumerate(trials.items(), start=1):
        point: dict[str, Any] = {"max_draft_len": number}
        save_trial(log, sweep_id, trial := Trial(number, point, outcome))
        for answer in pair(speed):
            write_run(log, sweep_id, trial.id, answer)
    report = read_sweep(log, sweep_id).report
    assert [one.ratio for one in report.configurations[1:]] == [1.5]
    assert in_table(log) == "1.50×"
