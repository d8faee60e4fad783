"""Plans on a tiny target: what is logged, what a cancel keeps, what a resume does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from engine.drafters.base import BuildContext
from engine.errors import ConfigError
from playground.experiments.experiment import Experiment
from playground.experiments.finished import (
    FinishedRequest,
    finished_requests,
    pair_requests,
)
from playground.experiments.job import Progress, time_left
from playground.experiments.measurement import Measurement, check_same_target
from playground.experiments.plan import BASELINE_NAME, Configuration, ExperimentPlan
from playground.experiments.report.report import first_run, read_results, stored_experiment
from playground.experiments.report.verdict import audit_divergences, audits_of
from storage import RunLog, StepRow
from tests.playground.bench.conftest import TYPES, item, scripted, tiny_plan
from tests.playground.bench.requests import runs_of
from tests.playground.tiny import ScriptedConfig, ScriptedDrafter


def run(plan: ExperimentPlan, bench: BuildContext, log: RunLog, **options: Any) -> tuple[str, Any]:
    benchmark_id = begin(log, plan)
    return benchmark_id, go_on(plan, bench, log, benchmark_id, **options)


def begin(log: RunLog, plan: ExperimentPlan) -> str:
    experiment = Experiment(log, plan)
    experiment.begin()
    return experiment.id


def go_on(
    plan: ExperimentPlan, bench: BuildContext, log: RunLog, benchmark_id: str, **options: Any
) -> Any:
    measurement = Measurement(plan=plan, log=log, benchmark_id=benchmark_id, **options)
    experiment = Experiment(log, plan, benchmark_id=benchmark_id)
    return experiment.run(lambda: measurement.run(bench))


def test_every_request_is_a_run_with_steps_and_labels(bench: BuildContext, log: RunLog) -> None:
    plan = tiny_plan(repeats=2)
    benchmark_id, outcome = run(plan, bench, log)
    runs = list(runs_of(log, benchmark_id))
    assert outcome.status == "completed" and outcome.num_new == len(runs) == plan.num_requests
    wanted = [request.labels for requests in plan.rounds() for request in requests]
    assert [dict(run.labels) for run in runs] == wanted
    assert all(run.benchmark_id == benchmark_id and run.status == "completed" for run in runs)
    assert all(len(log.steps(run.id)) == run.num_steps > 0 for run in runs)
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.status == "completed"
    assert first_run(log, benchmark_id).environment["dtype"] == "float32"


def test_measured_figures_are_those_of_the_steps(bench: BuildContext, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(), bench, log)
    for request in finished_requests(log, benchmark_id):
        steps = log.steps(request.run_id)
        assert request.num_steps == len(steps)
        assert request.num_accepted == sum(len(step.accepted) for step in steps)
        assert request.latency_s == pytest.approx(steps[-1].at_s)
        assert request.decode_s == pytest.approx(steps[-1].at_s - request.ttft_s)
        assert request.at_least == at_least(steps)
        parts = [sum(getattr(step, name) for step in steps) for name in SPLIT]
        assert request.split_s == pytest.approx(parts)
    report = read_results(log, benchmark_id).report
    assert report.section("scripted").overall.mat > 1.3  # type: ignore[operator]
    verdict = report.section("scripted").verdict
    assert verdict is not None and verdict.identical and verdict.num_compared == 3


SPLIT = ("draft_s", "verify_s", "accept_s", "other_s", "rollback_s")


def at_least(steps: tuple[StepRow, ...]) -> tuple[int, ...]:
    deepest = max(len(step.accepted) for step in steps)
    return tuple(sum(len(s.accepted) >= i for s in steps) for i in range(1, deepest + 1))


def test_a_second_turn_follows_on_plain_decodings_answer(bench: BuildContext, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(repeats=2), bench, log)
    runs = [log.get(run.id) for run in runs_of(log, benchmark_id)]
    first = [r for r in runs if r and r.labels["prompt"] == "b" and r.labels["turn"] == "0"]
    second = [r for r in runs if r and r.labels["prompt"] == "b" and r.labels["turn"] == "1"]
    plain = next(r for r in first if r.labels["configuration"] == BASELINE_NAME)
    expected = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": plain.text},
        {"role": "user", "content": "Two?"},
    ]
    assert len(second) == 4
    assert all([dict(m) for m in r.messages] == expected for r in second)
    assert len({r.prompt_ids for r in second}) == 1


def test_cancelling_keeps_what_is_done_and_resuming_does_exactly_the_rest(
    bench: BuildContext, log: RunLog
) -> None:
    plan = tiny_plan(repeats=2)
    seen: list[Progress] = []
    benchmark_id, outcome = run(
        plan,
        bench,
        log,
        on_progress=seen.append,
        cancelled=lambda: sum(p.last is not None for p in seen) >= 5,
    )
    assert outcome.status == "cancelled" and outcome.num_new == 5
    kept = {request.key: request.run_id for request in finished_requests(log, benchmark_id)}
    assert len(kept) == 5

    again = stored_experiment(log, benchmark_id, TYPES)[1]
    assert again == plan
    log.benchmarks.resume(benchmark_id)
    more = go_on(again, bench, log, benchmark_id)
    assert (more.status, more.num_new) == ("completed", plan.num_requests - 5)
    all_runs = {request.key: request.run_id for request in finished_requests(log, benchmark_id)}
    assert len(all_runs) == plan.num_requests and kept.items() <= all_runs.items()
    assert go_on(again, bench, log, benchmark_id).num_new == 0


def test_a_run_stopped_in_the_middle_is_run_again(bench: BuildContext, log: RunLog) -> None:
    """The cancel comes during a request: its run stays as cancelled and counts for nothing."""
    plan = tiny_plan(scripted(delay_ms=20.0))
    asked: list[int] = []

    def cancelled() -> bool:
        running = [r for r in runs_of(log, benchmark_id) if r.status == "running"]
        inside = any(r.decoding_type == "Scripted" for r in running)
        asked.append(1) if inside else None
        return len(asked) > 2

    benchmark_id = begin(log, plan)
    outcome = go_on(plan, bench, log, benchmark_id, cancelled=cancelled)
    statuses = [run.status for run in runs_of(log, benchmark_id)]
    assert outcome.cancelled and statuses.count("cancelled") == 1
    assert go_on(plan, bench, log, benchmark_id).num_new == plan.num_requests - outcome.num_new


def test_a_prompt_that_does_not_fit_is_left_out_and_said(bench: BuildContext, log: RunLog) -> None:
    plan = tiny_plan(items=(item("long", "x" * 600, "And then?"), item("short")))
    benchmark_id, outcome = run(plan, bench, log)
    assert outcome.status == "completed" and outcome.num_new == 2
    assert [(skip.prompt, skip.turn) for skip in outcome.skipped] == [("long", 0), ("long", 1)]
    assert "context holds 512 tokens" in outcome.skipped[0].reason
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.summary["skipped"][0] == asdict(outcome.skipped[0])


class Corrupted(ScriptedDrafter):
    """Claims what the target never said."""

    def rule(self, sampling: Any) -> Any:
        inner = super().rule(sampling)

        def wrong(verified: Any, draws: Any) -> Any:
            accepted = inner(verified, draws)
            return type(accepted)(accepted.path, (accepted.next_token + 1) % 256)

        return wrong


class CorruptedConfig(ScriptedConfig):
    """Makes the drafter that breaks the text."""

    def build(self, bench: BuildContext) -> Corrupted:
        return Corrupted(self, bench)


def corrupted(name: str) -> Configuration:
    return Configuration(name, "Scripted", CorruptedConfig())


def test_a_corrupted_method_is_found_out(bench: BuildContext, log: RunLog) -> None:
    plan = tiny_plan(scripted("good"), corrupted("bad"))
    benchmark_id = begin(log, plan)
    go_on(plan, bench, log, benchmark_id)
    report = read_results(log, benchmark_id).report
    good, bad = report.section("good").verdict, report.section("bad").verdict
    assert good is not None and good.identical
    assert bad is not None and bad.num_identical == 0
    first = bad.divergences[0]
    ours, plain = log.get(first.run_id), log.get(first.reference_run_id)
    assert ours is not None and plain is not None
    assert ours.output_ids[: first.at] == plain.output_ids[: first.at]
    assert ours.output_ids[first.at] != plain.output_ids[first.at]
    assert bad.cause == "fault" and first.cause == "fault"
    assert "float32: top-2 logit gap" in first.gap[0]
    assert good.cause is None


def test_differences_are_looked_into_once(bench: BuildContext, log: RunLog) -> None:
    plan = tiny_plan(corrupted("bad"))
    benchmark_id = begin(log, plan)
    go_on(plan, bench, log, benchmark_id)
    finished = finished_requests(log, benchmark_id)
    own, plain = (
        [r for r in finished if r.configuration == name] for name in ("bad", BASELINE_NAME)
    )
    told: list[str] = []
    audit_divergences(
        bench.target,
        log,
        pair_requests(own, plain),
        benchmark_id=benchmark_id,
        most=8,
        on_audit=lambda: told.append("asked"),
    )
    assert told == []
    verdict = read_results(log, benchmark_id).report.section("bad").verdict
    assert verdict is not None and all(one.gap for one in verdict.divergences)
    assert len(audits_of(log, benchmark_id)) == len(verdict.divergences)


def test_a_bug_in_a_drafter_ends_the_benchmark_and_leaves_it_resumable(
    bench: BuildContext, log: RunLog
) -> None:
    plan = tiny_plan(scripted(fail_at=30))
    benchmark_id = begin(log, plan)
    with pytest.raises(RuntimeError, match="scripted failure"):
        go_on(tiny_plan(scripted(fail_at=1)), bench, log, benchmark_id)
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.status == "failed"
    log.benchmarks.resume(benchmark_id)
    outcome = go_on(stored_experiment(log, benchmark_id, TYPES)[1], bench, log, benchmark_id)
    assert outcome.status == "completed"


def test_repeats_start_from_drafters_that_know_nothing(bench: BuildContext, log: RunLog) -> None:
    """N-gram's public pool outlives a text: a second repeat must not copy from the first."""

    from engine.drafters.lookup.ngram import NGramConfig

    ngram = Configuration("ngram", "N-gram", NGramConfig(max_draft_len=4))
    benchmark_id, _ = run(tiny_plan(ngram, repeats=3), bench, log)
    steps: dict[tuple[str, int], set[int]] = {}
    for request in finished_requests(log, benchmark_id):
        if request.configuration == "ngram":
            steps.setdefault((request.prompt, request.turn), set()).add(request.num_steps)
    assert all(len(counts) == 1 for counts in steps.values())


def test_what_a_drafter_remarks_is_told_with_the_figures(
    bench: BuildContext, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedDrafter, "notes", ("Made for float32.",), raising=False)
    _, outcome = run(tiny_plan(), bench, log)
    assert outcome.notes == {"scripted": ("Made for float32.",)}


def test_other_weights_are_refused_on_a_resume(bench: BuildContext) -> None:
    then = {**bench.target.environment(), "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="began with dtype 'bfloat16'"):
        check_same_target(then, bench.target.environment())
    check_same_target(bench.target.environment(), bench.target.environment())


def test_progress_counts_up_to_all_and_tells_the_time_left(
    bench: BuildContext, log: RunLog
) -> None:
    seen: list[Progress] = []
    run(tiny_plan(), bench, log, on_progress=seen.append)
    assert [p.num_done for p in seen] == sorted(p.num_done for p in seen)
    assert seen[-1].num_done == seen[-1].num_planned == 6
    assert seen[0].eta_s is None and seen[-1].eta_s == 0
    assert [p.last.configuration for p in seen if p.last] == [
        *(BASELINE_NAME, "scripted", "scripted", BASELINE_NAME, BASELINE_NAME, "scripted")
    ]


def test_the_time_left_is_written_as_people_say_it() -> None:
    words = [time_left(s) for s in (None, 0.0, 0.2, 40.0, 600.0, 7500.0)]
    assert words == [
        "",
        "",
        "about 1 s left",
        "about 40 s left",
        "about 10 min left",
        "about 2 h 5 min left",
    ]


def test_the_reference_is_measured_like_the_rest(bench: BuildContext, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(), bench, log)
    plain: list[FinishedRequest] = [
        r for r in finished_requests(log, benchmark_id) if r.configuration == BASELINE_NAME
    ]
    assert all(r.num_steps == 7 and r.num_new_tokens == 8 and r.mat == 1 for r in plain)
    report = read_results(log, benchmark_id).report
    own = report.section(BASELINE_NAME).overall.speedup
    assert own is not None and (own.low, own.ratio, own.high) == (1, 1, 1)


def test_a_round_that_another_worker_began_is_measured_again(
    bench: BuildContext, log: RunLog
) -> None:
    plan = tiny_plan(scripted(), items=(item("a"), item("b")))
    told: list[Progress] = []
    # the first worker answers one round and a half
    benchmark_id, _ = run(
        plan, bench, log, worker="a", on_progress=told.append, cancelled=lambda: _new(told) >= 3
    )
    go_on(plan, bench, log, benchmark_id, worker="b")
    last = finished_requests(log, benchmark_id)
    assert [(r.prompt, r.worker) for r in last] == [("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")]
    assert len(list(runs_of(log, benchmark_id))) == plan.num_requests + 1
    assert go_on(plan, bench, log, benchmark_id, worker="c").num_new == 0


def _new(told: list[Progress]) -> int:
    return sum(progress.last is not None for progress in told)
