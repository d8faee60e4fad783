"""Plans on a tiny target: what is logged, what a cancel keeps, what a resume does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest

from engine.drafters.base import BuildContext
from engine.drafters.lookup.ngram import NGramConfig
from engine.errors import ConfigError
from engine.tuning.experience import ExperienceStore
from playground.experiments.experiment import Experiment
from playground.experiments.measurement import Measurement, Progress, check_same_target
from playground.experiments.plan import BASELINE_NAME, Configuration, ExperimentPlan
from playground.experiments.report.report import read_results
from playground.experiments.report.verdict import audit_divergences, audits_of
from playground.experiments.statistics import PARTS, finished_requests, plain_pairs
from playground.host.task import time_left
from storage import RunLog
from tests.engine.test_rotary import LONG, SHORT, longrope
from tests.models import build_context, tiny_target
from tests.playground.bench.requests import item, runs_of, scripted, tiny_plan
from tests.playground.compare.corrupted import CorruptedConfig
from tests.playground.tiny import ScriptedDrafter


def run(
    plan: ExperimentPlan, bench: BuildContext, log: RunLog, benchmark_id: str = "", **options: Any
) -> tuple[str, Any]:
    """Measure a plan, or what is left of it; its id, and how it went."""
    experiment = Experiment(log, plan, benchmark_id=benchmark_id or None)
    if not benchmark_id:
        experiment.begin()
    measurement = Measurement(plan=plan, log=log, benchmark_id=experiment.id, **options)
    return experiment.id, experiment.run(lambda: measurement.run(bench))


class Done(NamedTuple):
    """A plan of two repeats that was measured to its end."""

    log: RunLog
    id: str
    plan: ExperimentPlan
    summary: Any
    told: list[Progress]


@pytest.fixture(scope="module")
def done(bench: BuildContext) -> Iterator[Done]:
    plan, told = tiny_plan(repeats=2), list[Progress]()
    with RunLog.open() as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedDrafter, "KNOWN", 10)
        patch.setattr(ScriptedDrafter, "notes", ("Made for float32.",), raising=False)
        benchmark_id, summary = run(plan, bench, log, on_progress=told.append)
        yield Done(log, benchmark_id, plan, summary, told)


@pytest.mark.parametrize("name", [" ", "x" * 81, "a\nb"])
def test_experiments_have_names_of_a_line(log: RunLog, name: str) -> None:
    with pytest.raises(ConfigError, match="name must have"):
        Experiment(log, tiny_plan()).begin(name)
    assert log.benchmarks.list() == ()


def test_every_request_is_a_run_with_steps_and_labels(done: Done) -> None:
    log, plan, runs = done.log, done.plan, list(runs_of(done.log, done.id))
    assert done.summary.status == "completed"
    assert done.summary.num_new == len(runs) == plan.num_requests
    wanted = [request.key for requests in plan.rounds() for request in requests]
    assert [run.key for run in runs] == wanted
    assert all(run.experiment_id == done.id and run.status == "completed" for run in runs)
    assert all(len(log.steps(run.id)) == run.num_steps > 0 for run in runs)
    stored = log.benchmarks.get(done.id)
    assert stored is not None and stored.status == "completed"
    assert read_results(log, done.id).environment["dtype"] == "float32"
    assert done.summary.notes == {"scripted": ("Made for float32.",)}


def test_measured_figures_are_those_of_the_steps(done: Done) -> None:
    for request in finished_requests(done.log, done.id):
        steps = done.log.steps(request.run_id)
        assert request.num_steps == len(steps)
        assert request.num_accepted == sum(len(step.accepted) for step in steps)
        assert request.latency_s == pytest.approx(steps[-1].at_s)
        assert request.decode_s == pytest.approx(steps[-1].at_s - request.ttft_s)
        lengths = [len(step.accepted) for step in steps]
        deepest = range(1, max(lengths) + 1)
        assert request.at_least == tuple(sum(n >= i for n in lengths) for i in deepest)
        parts = [sum(getattr(step, name) for step in steps) for name in PARTS]
        assert request.split_s == pytest.approx(parts)
        if request.configuration == BASELINE_NAME:
            assert (request.num_steps, request.num_new_tokens, request.mat) == (7, 8, 1)
    report = read_results(done.log, done.id).report
    scripted, own = report.section("scripted"), report.section(BASELINE_NAME).overall.speedup
    assert (scripted.overall.mat or 0) > 1.3
    assert scripted.verdict is not None and scripted.verdict.identical
    assert scripted.verdict.num_compared == 6
    assert own is not None and (own.low, own.ratio, own.high) == pytest.approx((1, 1, 1))


def test_a_second_turn_follows_on_plain_decodings_answer(done: Done) -> None:
    runs = [run for one in runs_of(done.log, done.id) if (run := done.log.get(one.id))]
    first, second = (
        [r for r in runs if (r.labels["prompt"], r.labels["turn"]) == ("b", turn)] for turn in "01"
    )
    plain = next(r for r in first if r.labels["configuration"] == BASELINE_NAME)
    expected = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": plain.text},
        {"role": "user", "content": "Two?"},
    ]
    assert len(second) == 4
    assert all([dict(m) for m in r.messages] == expected for r in second)
    assert len({r.prompt_ids for r in second}) == 1


def test_progress_counts_up_to_all_and_tells_the_time_left(done: Done) -> None:
    told, num_done = done.told, [p.num_done for p in done.told]
    assert num_done == sorted(num_done)
    assert told[-1].num_done == told[-1].num_planned == 12
    assert told[0].eta_s is None and told[-1].eta_s == 0
    assert any(p.message == "warming up · scripted" for p in told)
    assert [p.last.configuration for p in told if p.last][:6] == [
        *(BASELINE_NAME, "scripted", "scripted", BASELINE_NAME, BASELINE_NAME, "scripted")
    ]


def test_a_prompt_that_does_not_fit_is_left_out_and_said(bench: BuildContext, log: RunLog) -> None:
    plan = tiny_plan(items=(item("long", "x" * 600, "And then?"), item("short")))
    benchmark_id, outcome = run(plan, bench, log)
    assert outcome.status == "completed" and outcome.num_new == 2
    assert [(skip.prompt, skip.turn) for skip in outcome.skipped] == [("long", 0), ("long", 1)]
    assert "context holds 512 tokens" in outcome.skipped[0].reason
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.summary["skipped"][0] == asdict(outcome.skipped[0])


def test_a_corrupted_method_is_found_out_and_audited_once(bench: BuildContext, log: RunLog) -> None:
    bad_config = Configuration("bad", "Corrupted", CorruptedConfig(wrong_at=1))
    benchmark_id, _ = run(plan := tiny_plan(scripted("good"), bad_config), bench, log)
    report, requests = read_results(log, benchmark_id).report, finished_requests(log, benchmark_id)
    good, bad = report.section("good").verdict, report.section("bad").verdict
    assert good is not None and good.identical and good.cause is None
    assert bad is not None and bad.num_identical == 0
    assert bad.cause == "fault" and all(one.gap for one in bad.divergences)
    assert len(audits_of(log, benchmark_id)) == len(bad.divergences)
    pairs, again = plain_pairs(requests, "bad", plan), lambda: pytest.fail("audited again")
    audit_divergences(bench.target, log, pairs, benchmark_id=benchmark_id, most=8, on_audit=again)


def test_a_text_is_audited_with_the_factors_that_it_was_written_with(log: RunLog) -> None:
    """LongRoPE's long ones, where the text may leave the original context later."""
    prompt_len = len(tiny_target().encode_chat([{"role": "user", "content": "abc" * 5}]))
    settings = longrope(SHORT, LONG, original=prompt_len + 7)
    target = tiny_target("phi3", eos_token_id=None, **settings)
    bad = Configuration("bad", "Corrupted", CorruptedConfig(wrong_at=1))
    plan = tiny_plan(bad, items=(item("a", "abc" * 5),))
    benchmark_id, _ = run(plan, build_context(target), log)
    (audit,) = audits_of(log, benchmark_id).values()
    assert audit.view.best == audit.plain_token


def test_repeats_start_from_drafters_that_know_nothing(bench: BuildContext, log: RunLog) -> None:
    """N-gram's public pool outlives a text: a second repeat must not copy from the first."""
    ngram = Configuration("ngram", "N-gram", NGramConfig(max_draft_len=4))
    benchmark_id, _ = run(tiny_plan(ngram, repeats=3), bench, log)
    own = [r for r in finished_requests(log, benchmark_id) if r.configuration == "ngram"]
    assert len({(r.prompt, r.turn) for r in own}) == 3
    assert len({(r.prompt, r.turn, r.num_steps) for r in own}) == 3


@pytest.mark.usefixtures("auto_drafting")
def test_what_was_learnt_is_kept_with_the_models(bench: BuildContext, log: RunLog) -> None:
    """In the folder given by --cache-dir, from which Generate predicts."""
    ngram = Configuration("ngram", "N-gram", NGramConfig(max_draft_len=5))
    run(tiny_plan(ngram), bench, log)
    assert bench.experience_dir is not None
    experience = ExperienceStore(bench.experience_dir).find("tiny", ngram.config)
    assert experience is not None and experience.costs.plain_ms


def test_other_weights_are_refused_on_a_resume(bench: BuildContext) -> None:
    then = {**bench.target.environment(), "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="began with dtype 'bfloat16'"):
        check_same_target(then, bench.target.environment())
    check_same_target(bench.target.environment(), bench.target.environment())


def test_the_time_left_is_written_as_people_say_it() -> None:
    words = [time_left(s) for s in (None, 0.0, 0.2, 40.0, 600.0, 7500.0)]
    about = ("1 s", "40 s", "10 min", "2 h 5 min")
    assert words == ["", "", *(f"about {time} left" for time in about)]


def test_a_round_that_another_worker_began_is_measured_again(
    bench: BuildContext, log: RunLog
) -> None:
    plan = tiny_plan(scripted(), items=(item("a"), item("b")))
    told: list[Progress] = []
    # the first worker answers one round and a half
    cancelled = lambda: sum(one.last is not None for one in told) >= 3  # noqa: E731
    benchmark_id, _ = run(
        plan, bench, log, worker="a", on_progress=told.append, cancelled=cancelled
    )
    run(plan, bench, log, benchmark_id, worker="b")
    last = finished_requests(log, benchmark_id)
    assert [(r.prompt, r.worker) for r in last] == [("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")]
    assert len(list(runs_of(log, benchmark_id))) == plan.num_requests + 1
    assert run(plan, bench, log, benchmark_id, worker="c")[1].num_new == 0
