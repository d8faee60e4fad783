"""Plans on a tiny target: what is logged, what a cancel keeps, what a resume does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from engine.drafters.base import Drafter
from engine.errors import ConfigError
from playground.cli.bench import LoadedBench
from playground.experiments.bench import session
from playground.experiments.bench.audits import audits_of
from playground.experiments.bench.measured import Measured, measured_runs, summaries
from playground.experiments.bench.plan import Plan
from playground.experiments.bench.progress import Eta, Progress, time_left
from playground.experiments.bench.runner import run_plan
from storage import RunLog, StepRow
from tests.playground.bench.conftest import TYPES, item, scripted, tiny_plan
from tests.playground.tiny import ScriptedDrafter


def run(plan: Plan, bench: LoadedBench, log: RunLog, **options: Any) -> tuple[str, Any]:
    benchmark_id = session.begin(log, plan)
    return benchmark_id, session.conduct(plan, bench, log, benchmark_id, **options)


def test_every_request_is_a_run_with_steps_and_labels(bench: LoadedBench, log: RunLog) -> None:
    plan = tiny_plan(repeats=2)
    benchmark_id, outcome = run(plan, bench, log)
    runs = list(summaries(log, benchmark_id))
    assert outcome.status == "completed" and outcome.num_new == len(runs) == plan.num_requests
    wanted = [request.labels for requests in plan.rounds() for request in requests]
    assert [dict(run.labels) for run in runs] == wanted
    assert all(run.benchmark_id == benchmark_id and run.status == "completed" for run in runs)
    for stored in runs:
        assert len(log.steps(stored.id)) == stored.num_steps > 0
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.status == "completed"
    assert session.environment_of(log, benchmark_id)["dtype"] == "float32"


def test_measured_figures_are_those_of_the_steps(bench: LoadedBench, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(), bench, log)
    for request in measured_runs(log, benchmark_id):
        steps = log.steps(request.run_id)
        assert request.num_steps == len(steps)
        assert request.num_accepted == sum(len(step.accepted) for step in steps)
        assert request.latency_s == pytest.approx(steps[-1].at_s)
        assert request.decode_s == pytest.approx(steps[-1].at_s - request.ttft_s)
        assert request.at_least == at_least(steps)
        parts = [sum(getattr(step, name) for step in steps) for name in SPLIT]
        assert request.split_s == pytest.approx(parts)
    report = session.read_results(log, benchmark_id).report
    assert report.section("scripted").overall.mat > 1.3  # type: ignore[operator]
    verdict = report.section("scripted").verdict
    assert verdict is not None and verdict.identical and verdict.num_compared == 3


SPLIT = ("draft_s", "verify_s", "accept_s", "other_s")


def at_least(steps: tuple[StepRow, ...]) -> tuple[int, ...]:
    deepest = max(len(step.accepted) for step in steps)
    return tuple(sum(len(s.accepted) >= i for s in steps) for i in range(1, deepest + 1))


def test_a_second_turn_follows_on_plain_decodings_answer(bench: LoadedBench, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(repeats=2), bench, log)
    runs = [log.get(run.id) for run in summaries(log, benchmark_id)]
    first = [r for r in runs if r and r.labels["prompt"] == "b" and r.labels["turn"] == "0"]
    second = [r for r in runs if r and r.labels["prompt"] == "b" and r.labels["turn"] == "1"]
    plain = next(r for r in first if r.labels["configuration"] == "plain")
    expected = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": plain.text},
        {"role": "user", "content": "Two?"},
    ]
    assert len(second) == 4
    assert all([dict(m) for m in r.messages] == expected for r in second)
    assert len({r.prompt_ids for r in second}) == 1


def test_cancelling_keeps_what_is_done_and_resuming_does_exactly_the_rest(
    bench: LoadedBench, log: RunLog
) -> None:
    plan = tiny_plan(repeats=2)
    seen: list[Progress] = []
    benchmark_id, outcome = run(
        plan,
        bench,
        log,
        tell=seen.append,
        cancelled=lambda: sum(p.last is not None for p in seen) >= 5,
    )
    assert outcome.status == "cancelled" and outcome.num_new == 5
    kept = {request.key: request.run_id for request in measured_runs(log, benchmark_id)}
    assert len(kept) == 5

    again = session.plan_to_resume(log, benchmark_id, TYPES)
    assert again == plan
    log.benchmarks.resume(benchmark_id)
    more = session.conduct(again, bench, log, benchmark_id)
    assert (more.status, more.num_new) == ("completed", plan.num_requests - 5)
    all_runs = {request.key: request.run_id for request in measured_runs(log, benchmark_id)}
    assert len(all_runs) == plan.num_requests and kept.items() <= all_runs.items()
    assert session.conduct(again, bench, log, benchmark_id).num_new == 0


def test_a_run_stopped_in_the_middle_is_run_again(bench: LoadedBench, log: RunLog) -> None:
    """The cancel comes during a request: its run stays as cancelled and counts for nothing."""
    plan = tiny_plan(scripted(delay_ms=20.0))
    asked: list[int] = []

    def cancelled() -> bool:
        running = [r for r in summaries(log, benchmark_id) if r.status == "running"]
        inside = any(r.decoding_type == "Scripted" for r in running)
        asked.append(1) if inside else None
        return len(asked) > 2

    benchmark_id = session.begin(log, plan)
    outcome = run_plan(plan, bench, log, benchmark_id, cancelled=cancelled)
    statuses = [run.status for run in summaries(log, benchmark_id)]
    assert outcome.cancelled and statuses.count("cancelled") == 1
    assert run_plan(plan, bench, log, benchmark_id).num_new == plan.num_requests - outcome.num_new


def test_a_prompt_that_does_not_fit_is_left_out_and_said(bench: LoadedBench, log: RunLog) -> None:
    plan = tiny_plan(items=(item("long", "x" * 600, "And then?"), item("short")))
    benchmark_id, outcome = run(plan, bench, log)
    assert outcome.status == "completed" and outcome.num_new == 2
    assert [(skip.prompt, skip.turn) for skip in outcome.skipped] == [("long", 0), ("long", 1)]
    assert "do not fit the context of 512" in outcome.skipped[0].reason
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


class CorruptedBench:
    """Makes a drafter that breaks the text for the configuration of this note."""

    def __init__(self, bench: LoadedBench) -> None:
        self.target = bench.target
        self._bench = bench

    def new_drafter(self, config: Any) -> Drafter:
        if getattr(config, "note", "") == "corrupt":
            from engine.drafters.base import Workbench

            made = Workbench(self.target, lambda name: None, lambda spec: None)  # type: ignore[arg-type,return-value]
            return Corrupted(config, made)
        return self._bench.new_drafter(config)


def test_a_corrupted_method_is_found_out(bench: LoadedBench, log: RunLog) -> None:
    plan = tiny_plan(scripted("good"), scripted("bad", note="corrupt"))
    benchmark_id = session.begin(log, plan)
    session.conduct(plan, CorruptedBench(bench), log, benchmark_id)
    report = session.read_results(log, benchmark_id).report
    good, bad = report.section("good").verdict, report.section("bad").verdict
    assert good is not None and good.identical
    assert bad is not None and bad.num_identical == 0
    first = bad.divergences[0]
    ours, plain = log.get(first.run_id), log.get(first.reference_run_id)
    assert ours is not None and plain is not None
    assert ours.output_ids[: first.at] == plain.output_ids[: first.at]
    assert ours.output_ids[first.at] != plain.output_ids[first.at]
    assert bad.cause == "fault" and first.near_tie is False
    assert "float32: top-2 logit gap" in first.gap[0]
    assert good.cause is None


def test_differences_are_looked_into_once(bench: LoadedBench, log: RunLog) -> None:
    plan = tiny_plan(scripted("bad", note="corrupt"))
    benchmark_id = session.begin(log, plan)
    corrupted = CorruptedBench(bench)
    session.conduct(plan, corrupted, log, benchmark_id)
    told: list[str] = []
    session.look_into_differences(
        bench.target, log, benchmark_id, tell=lambda progress: told.append(progress.words)
    )
    assert told == []
    verdict = session.read_results(log, benchmark_id).report.section("bad").verdict
    assert verdict is not None and all(one.gap for one in verdict.divergences)
    assert len(audits_of(log, benchmark_id)) == len(verdict.divergences)


def test_a_bug_in_a_drafter_ends_the_benchmark_and_leaves_it_resumable(
    bench: LoadedBench, log: RunLog
) -> None:
    plan = tiny_plan(scripted(fail_at=30))
    benchmark_id = session.begin(log, plan)
    with pytest.raises(RuntimeError, match="scripted failure"):
        session.conduct(tiny_plan(scripted(fail_at=1)), bench, log, benchmark_id)
    stored = log.benchmarks.get(benchmark_id)
    assert stored is not None and stored.status == "failed"
    log.benchmarks.resume(benchmark_id)
    outcome = session.conduct(
        session.plan_to_resume(log, benchmark_id, TYPES), bench, log, benchmark_id
    )
    assert outcome.status == "completed"


def test_repeats_start_from_drafters_that_know_nothing(bench: LoadedBench, log: RunLog) -> None:
    """N-gram's public pool outlives a text: a second repeat must not copy from the first."""
    from engine.drafters.ngram import NGramConfig
    from playground.experiments.bench.plan import Configuration

    ngram = Configuration("ngram", "N-gram", NGramConfig(max_draft_len=4))
    benchmark_id, _ = run(tiny_plan(ngram, repeats=3), bench, log)
    steps: dict[tuple[str, int], set[int]] = {}
    for request in measured_runs(log, benchmark_id):
        if request.configuration == "ngram":
            steps.setdefault((request.prompt, request.turn), set()).add(request.num_steps)
    assert all(len(counts) == 1 for counts in steps.values())


def test_other_weights_are_refused_on_a_resume(bench: LoadedBench) -> None:
    then = {"environment": {**bench.target.environment(), "dtype": "bfloat16"}}
    with pytest.raises(ConfigError, match="began with dtype 'bfloat16'"):
        session.check_same_target(then, bench.target)
    session.check_same_target({"environment": bench.target.environment()}, bench.target)


def test_progress_counts_up_to_all_and_tells_the_time_left(bench: LoadedBench, log: RunLog) -> None:
    seen: list[Progress] = []
    run(tiny_plan(), bench, log, tell=seen.append)
    assert [p.num_past for p in seen] == sorted(p.num_past for p in seen)
    assert seen[-1].num_past == seen[-1].num_requests == 6
    assert seen[0].eta_s is None and seen[-1].eta_s == 0
    assert [p.last.configuration for p in seen if p.last] == [
        *("plain", "scripted", "scripted", "plain", "plain", "scripted")
    ]


def test_time_left_weighs_configurations_alike() -> None:
    eta = Eta()
    assert eta.seconds(5) is None
    for seconds in (1.0, 1.0, 1.0):
        eta.add("fast", seconds)
    eta.add("slow", 3.0)
    assert eta.seconds(10) == pytest.approx(20)
    words = [time_left(s) for s in (None, 0.0, 0.2, 40.0, 600.0, 7500.0)]
    assert words == [
        "",
        "",
        "about 1 s left",
        "about 40 s left",
        "about 10 min left",
        "about 2 h 5 min left",
    ]


def test_the_reference_is_measured_like_the_rest(bench: LoadedBench, log: RunLog) -> None:
    benchmark_id, _ = run(tiny_plan(), bench, log)
    plain: list[Measured] = [
        r for r in measured_runs(log, benchmark_id) if r.configuration == "plain"
    ]
    assert all(r.num_steps == 7 and r.num_new_tokens == 8 and r.mat == 1 for r in plain)
    report = session.read_results(log, benchmark_id).report
    own = report.section("plain").overall.speedup
    assert own is not None and own.ratio == 1 and own.mean_of_ratios == 1
