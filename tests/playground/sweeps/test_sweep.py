"""A sweep tries what it planned: each point once, broken-off ones again, refused ones for free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from optuna.trial import TrialState

from engine.drafters.eagle.methods import EagleConfig
from engine.errors import OutOfMemoryError, PlaygroundError, SourceError
from playground.experiments.measurement import Progress
from playground.experiments.sweep.report import read_sweep
from playground.experiments.sweep.search import Sweep
from playground.experiments.sweep.trials import Trial, study_of
from playground.host.runner import MeasurementFailedError
from storage import RunLog
from tests.playground.sweeps.scripted import Scripted, plan, resumed, run, swept

EAGLE = EagleConfig(use_dynamic_tree=True)


def values(trials: Sequence[Trial]) -> list[Any]:
    return [trial.value("speedup") for trial in trials]


def test_a_search_finds_the_peak_and_repeats_nothing(log: RunLog) -> None:
    measure = Scripted()
    vary = "max_draft_len=1:32", "lookup=pool,transformers"
    sweep = swept(log, *vary, measure=measure, trials=30)
    tried = [(c.max_draft_len, c.lookup) for c in measure.configs]
    assert len(tried) == len(set(tried)) == 30
    assert [trial.number for trial in sweep.trials] == [*range(1, 31)]
    assert measure.configs[0].max_draft_len == 10, "it begins where the method is"
    assert abs(int(sweep.trial().point["max_draft_len"] or 0) - 5) <= 1


def test_a_search_of_few_points_takes_each_once_at_random_and_ends(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.experiments.sweep.trials.MAX_REPEATED", 0)
    measure = Scripted()
    sweep = swept(log, "max_draft_len=1:20", measure=measure, trials=50)
    tried = [c.max_draft_len for c in measure.configs]
    assert sorted(tried) == [*range(1, 21)] and tried[1:] != sorted(tried[1:])
    assert sweep.plan.num_trials == 20 and sweep.benchmark.status == "completed"


def test_what_drifts_divides_out_of_the_speedup(log: RunLog) -> None:
    grid = partial(swept, log, "max_draft_len=3:5", mode="grid")
    sweep = grid(measure=Scripted(drift=lambda trial: 0.5**trial))
    assert values(sweep.trials) == pytest.approx(values(grid().trials))
    raw = [t.section.overall.tok_s or 0.0 for t in sweep.trials if t.section]
    assert raw[0] > raw[1] > raw[2], "the machine did slow down"
    mats = [trial.value("mat") for trial in grid(objective="mat").trials]
    assert mats == [4.0] * 3, "MAT counts steps, not time"


def test_settings_that_do_not_fit_are_refused_with_their_sentence(log: RunLog) -> None:
    measure = Scripted()
    vary = "max_draft_len=1:3", "dynamic_tree_max_topK=2,10"
    sweep = swept(log, *vary, measure=measure, base=EAGLE, mode="grid")
    refused = [t for t in sweep.trials if t.outcome == "refused"]
    assert [t.point["dynamic_tree_max_topK"] for t in refused] == [2, 10, 2, 2]
    assert "max_total_draft_tokens must be at most 2," in refused[0].reason
    states = [t.state for t in study_of(sweep.plan, sweep.trials).get_trials()]
    assert states.count(TrialState.PRUNED) == 4 and states.count(TrialState.COMPLETE) == 2
    assert len(measure.configs) == 2
    vary = "max_draft_len=1:8", "dynamic_tree_max_topK=1:10"
    search = swept(log, *vary, measure=(measure := Scripted()), base=EAGLE, trials=12)
    outcomes = [t.outcome for t in search.trials]
    assert outcomes.count("measured") == len(measure.configs) == 12, "refusals cost nothing"
    assert "refused" in outcomes


def test_a_space_without_any_fitting_point_ends(log: RunLog) -> None:
    sweep = swept(log, "max_draft_len=1", "dynamic_tree_max_topK=1:9", base=EAGLE)
    assert sweep.benchmark.status == "completed"
    assert {t.outcome for t in sweep.trials} == {"refused"}
    with pytest.raises(PlaygroundError, match="100 combinations in a row refused"):
        swept(log, "max_total_draft_tokens=200:1024", "max_draft_len=1", base=EAGLE)
    newest, _ = log.benchmarks.list(sweeps=True)
    assert newest.status == "failed"


def test_a_target_that_fails_ends_the_sweep_and_it_can_go_on(log: RunLog) -> None:
    class Failing(Scripted):
        def __call__(self, trial: Any, *others: Any) -> Any:
            if len(self.configs) == 2:
                raise SourceError("The weights are gone. Fetch them again.")
            return super().__call__(trial, *others)

    with pytest.raises(SourceError):
        swept(log, measure=Failing(), trials=4)
    (head,) = log.benchmarks.list(sweeps=True)
    failed = read_sweep(log, head.id)
    state = json.loads(failed.json_text())
    assert (state["status"], state["fault"]) == (
        "failed",
        "The weights are gone. Fetch them again.",
    )
    outcomes = [row["outcome"] for row in state["trials"]]
    assert outcomes == ["measured", "measured", "interrupted"]
    measure = Scripted()
    done = resumed(log, head.id, measure)
    assert done.benchmark.status == "completed" and "error" not in done.benchmark.summary
    assert len(measure.configs) == 2, "the broken-off trial and the one that was left"


def test_points_that_fail_are_told_and_three_in_a_row_are_enough(log: RunLog) -> None:
    class Fragile(Scripted):
        def __init__(self, kind: type[Exception], *broken: int) -> None:
            super().__init__()
            self.kind, self.broken = kind, broken

        def __call__(self, trial: Any, *others: Any) -> Any:
            if trial.point["max_draft_len"] in self.broken:
                raise self.kind("It broke.")
            return super().__call__(trial, *others)

    grid = partial(swept, log, "max_draft_len=1:6", mode="grid")
    for kind in (MeasurementFailedError, OutOfMemoryError):
        outcomes = [(t.outcome, t.reason) for t in grid(measure=Fragile(kind, 2, 4, 5)).trials]
        assert [outcome for outcome, _ in outcomes] == [
            *("measured", "failed", "measured", "failed", "failed", "measured")
        ]
        assert outcomes[1][1] == "It broke."
    with pytest.raises(
        PlaygroundError, match="3 combinations in a row failed; the last one: It broke."
    ):
        grid(measure=Fragile(MeasurementFailedError, 2, 3, 4))


def test_stop_ends_within_an_answer_and_resume_does_the_rest(log: RunLog) -> None:
    sweep = Sweep(log, plan(trials=5))
    sweep.begin()
    first, second, looks = Scripted(), Scripted(), iter(range(10))
    sweep.interrupted = lambda: next(looks, None) is None
    assert run(sweep, first).cancelled
    stopped = read_sweep(log, sweep.id)
    assert stopped.benchmark.status == "cancelled" and first.num_answers[-1] < 4
    assert stopped.outcome(stopped.trials[-1]) == "stopped"
    done = [t for t in resumed(log, sweep.id, second).trials if t.outcome == "measured"]
    assert second.configs[0] == first.configs[-1], "the broken-off point comes first"
    assert second.groups[0] == first.groups[-1], "and finds the answers that it had"
    assert len(done) == 5 and len({t.key for t in done}) == 5


def test_progress_counts_up_and_tells_what_is_left(log: RunLog) -> None:
    told: list[Progress] = []
    sweep = Sweep(log, plan("max_draft_len=1:3", mode="grid"))
    sweep.begin()
    sweep.on_progress = told.append
    run(sweep)
    done = [progress.num_done for progress in told]
    assert done == sorted(done) and (done[0], done[-1]) == (0, 3)
    assert told[0].eta_s is None and told[-1].eta_s == 0.0
    assert {progress.num_planned for progress in told} == {3}
    running = [progress for progress in told if progress.message.startswith("trial ")]
    answered = {progress.message.split(" · ")[1] for progress in running}
    assert answered == {f"{n} of 4 answered" for n in range(5)}
    estimates = [p.eta_s for p in running if p.num_done == 2 and p.eta_s is not None]
    assert estimates == sorted(estimates, reverse=True)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (lambda pair: tuple(dataclasses.replace(one, decode_s=0.0) for one in pair), "ignore_eos"),
        (lambda pair: (), "No prompt was answered"),
    ],
)
def test_a_trial_without_two_tokens_or_answers_is_refused_with_advice(
    log: RunLog, answers: Any, reason: str
) -> None:
    class Short(Scripted):
        def pair(self, config: Any, prompt: int) -> Any:
            return answers(super().pair(config, prompt))

    (trial,) = swept(log, "max_draft_len=5", mode="grid", measure=Short()).trials
    assert trial.outcome == "refused" and reason in trial.reason
