"""A sweep tries what it planned: each point once, broken-off ones again, refused ones for free."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from optuna.trial import TrialState

from engine.drafters.eagle.methods import EagleConfig
from engine.errors import ConfigError, OutOfMemoryError, SourceError
from playground.experiments.job import BrokenOffError, Progress
from playground.experiments.sweep.report import best_of, shown_trials
from playground.experiments.sweep.run import SweepError, run_sweep
from playground.experiments.sweep.store import REFERENCE, Sweep, SweepStore
from playground.experiments.sweep.trials import Trial
from tests.playground.sweeps.scripted import PLAIN_TOK_S, Scripted, plan

EAGLE = EagleConfig(use_dynamic_tree=True)


def swept(store: SweepStore, measure: Any, *vary: str, **changes: Any) -> Sweep:
    sweep = store.create(plan(*vary, **changes), store.free_name("s"))
    run_sweep(sweep, measure)
    return sweep


def values(trials: list[Trial]) -> list[Any]:
    return [t.figures.value if t.figures else None for t in trials]


def test_a_grid_measures_every_combination_once(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(store, measure, "max_draft_len=1:3", "lookup=pool,transformers", mode="grid")
    tried = [(c.max_draft_len, c.lookup) for c in measure.configs]
    assert tried == [(n, how) for n in (1, 2, 3) for how in ("pool", "transformers")]
    assert [t.outcome for t in sweep.trials()] == ["measured"] * 6
    assert sweep.status == "completed"


def test_a_search_finds_the_peak_and_repeats_nothing(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(store, measure, "max_draft_len=1:32", "lookup=pool,transformers", trials=30)
    tried = [(c.max_draft_len, c.lookup) for c in measure.configs]
    assert len(tried) == len(set(tried)) == 30
    best = best_of(shown_trials(sweep))
    assert best is not None and abs(int(best.point["max_draft_len"] or 0) - 5) <= 1


def test_a_search_begins_where_the_method_is(store: SweepStore) -> None:
    measure = Scripted()
    swept(store, measure, "max_draft_len=1:16", trials=2)
    assert measure.configs[0].max_draft_len == 10


def test_a_search_of_few_points_takes_each_once_and_ends(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(store, measure, "max_draft_len=1:6", trials=50)
    assert sorted(c.max_draft_len for c in measure.configs) == [1, 2, 3, 4, 5, 6]
    assert sweep.plan.num_trials == 6 and sweep.status == "completed"


def test_what_drifts_divides_out_of_tok_s_and_speedup(store: SweepStore) -> None:
    def halves(trial: int) -> float:
        return 0.5**trial

    for objective, scale in (("speedup", 1.0), ("tok_s", PLAIN_TOK_S)):
        measure = Scripted(drift=halves)
        sweep = swept(store, measure, "max_draft_len=3:5", mode="grid", objective=objective)
        steady = swept(store, Scripted(), "max_draft_len=3:5", mode="grid", objective="speedup")
        expected = [scale * value for value in values(steady.trials())]
        assert values(sweep.trials()) == pytest.approx(expected)
        raw = [t.figures.tok_s or 0.0 for t in sweep.trials() if t.figures]
        assert raw[0] > raw[1] > raw[2], "the machine did slow down"
    assert sweep.attributes[REFERENCE] == pytest.approx(PLAIN_TOK_S)


def test_mat_counts_steps_not_time(store: SweepStore) -> None:
    sweep = swept(store, Scripted(), "max_draft_len=3:4", mode="grid", objective="mat")
    assert values(sweep.trials()) == [4.0, 4.0]


def test_settings_that_do_not_fit_are_refused_with_their_sentence(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(
        store,
        measure,
        "max_draft_len=1:3",
        "dynamic_tree_max_topK=2,10",
        base=EAGLE,
        mode="grid",
    )
    refused = [t for t in sweep.trials() if t.outcome == "refused"]
    assert [t.point["dynamic_tree_max_topK"] for t in refused] == [2, 10, 2, 2]
    assert "max_total_draft_tokens must be at most 2," in refused[0].reason
    states = [t.state for t in sweep.study.get_trials()]
    assert states.count(TrialState.PRUNED) == 4 and states.count(TrialState.COMPLETE) == 2
    assert len(measure.configs) == 2


def test_refusals_cost_a_search_nothing(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(
        store,
        measure,
        "max_draft_len=1:8",
        "dynamic_tree_max_topK=1:10",
        base=EAGLE,
        trials=12,
    )
    outcomes = [t.outcome for t in shown_trials(sweep)]
    assert outcomes.count("measured") == len(measure.configs) == 12
    assert "refused" in outcomes


def test_a_space_without_any_fitting_point_ends(store: SweepStore) -> None:
    sweep = store.create(plan("max_draft_len=1", "dynamic_tree_max_topK=1:9", base=EAGLE), "s")
    assert run_sweep(sweep, Scripted()) == "completed"
    assert {t.outcome for t in shown_trials(sweep)} == {"refused"}
    wide = store.create(plan("max_total_draft_tokens=200:1024", "max_draft_len=1", base=EAGLE), "w")
    with pytest.raises(SweepError, match="100 combinations in a row refused"):
        run_sweep(wide, Scripted())
    assert wide.status == "failed"


def test_a_target_that_fails_ends_the_sweep_and_it_can_go_on(store: SweepStore) -> None:
    calls = []

    class Failing(Scripted):
        def __call__(self, *asked: Any) -> Any:
            calls.append(asked)
            if len(calls) == 3:
                raise SourceError("The weights are gone. Fetch them again.")
            return super().__call__(*asked)

    sweep = store.create(plan(trials=4), "s")
    with pytest.raises(SourceError):
        run_sweep(sweep, Failing())
    assert sweep.status == "failed"
    assert sweep.attributes["fault"] == "The weights are gone. Fetch them again."
    assert [t.outcome for t in shown_trials(sweep)] == ["measured", "measured", "stopped"]
    measure = Scripted()
    assert run_sweep(store.load("s"), measure) == "completed"
    assert len(measure.configs) == 2, "the broken-off trial and the one that was left"
    assert sweep.attributes["fault"] == ""


def test_points_that_fail_are_told_and_three_in_a_row_are_enough(store: SweepStore) -> None:
    class Fragile(Scripted):
        def __init__(self, kind: type[Exception], *broken: int) -> None:
            super().__init__()
            self.kind = kind
            self.broken = broken

        def __call__(self, config: Any, *asked: Any) -> Any:
            if config.max_draft_len in self.broken:
                raise self.kind("It broke.")
            return super().__call__(config, *asked)

    for kind in (BrokenOffError, OutOfMemoryError):
        sweep = swept(store, Fragile(kind, 2, 4, 5), "max_draft_len=1:6", mode="grid")
        outcomes = [(t.outcome, t.reason) for t in shown_trials(sweep)]
        assert [outcome for outcome, _ in outcomes] == [
            *("measured", "failed", "measured", "failed", "failed", "measured")
        ]
        assert outcomes[1][1] == "It broke."
    with pytest.raises(SweepError, match="3 combinations in a row failed; the last one: It broke."):
        swept(store, Fragile(BrokenOffError, 2, 3, 4), "max_draft_len=1:6", mode="grid")


def test_poor_trials_are_broken_off_after_the_first_prompts(store: SweepStore) -> None:
    measure = Scripted()
    sweep = swept(store, measure, "max_draft_len=1:20", trials=15, prune=True)
    pruned = [t for t in sweep.trials() if t.outcome == "pruned"]
    assert pruned and all("below the median after 2 of 4 prompts" in t.reason for t in pruned)
    best = best_of(shown_trials(sweep))
    assert best is not None and best.outcome == "measured"
    assert set(measure.num_answers) == {2, 4}
    assert len([t for t in sweep.trials() if t.outcome in ("measured", "pruned")]) == 15
    unpruned = Scripted()
    swept(store, unpruned, "max_draft_len=1:20", trials=15)
    assert set(unpruned.num_answers) == {4}


def test_stop_ends_within_an_answer_and_resume_does_the_rest(store: SweepStore) -> None:
    stop_at = 9
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > stop_at

    sweep = store.create(plan(trials=5), "s")
    first, second = Scripted(), Scripted()
    assert run_sweep(sweep, first, cancelled=cancelled) == "stopped"
    assert sweep.trials()[-1].outcome == "stopped"
    assert first.num_answers[-1] < 4
    assert run_sweep(store.load("s"), second) == "completed"
    assert second.configs[0] == first.configs[-1], "the broken-off point comes first"
    assert second.groups[0] == first.groups[-1], "and finds the answers that it had"
    done = [t for t in shown_trials(sweep) if t.outcome == "measured"]
    assert len(done) == 5 and len({t.key for t in done}) == 5


def test_more_trials_can_be_asked_of_a_finished_search(store: SweepStore) -> None:
    swept(store, Scripted(), "max_draft_len=1:30", trials=3)
    with pytest.raises(ConfigError, match="at least 3"):
        store.reopen("s", 2)
    measure = Scripted()
    run_sweep(store.reopen("s", 7), measure)
    assert len(measure.configs) == 4
    assert len({t.key for t in store.load("s").trials()}) == 7


def test_a_running_sweep_cannot_be_started_again(store: SweepStore) -> None:
    sweep = store.create(plan(), "s")

    class Greedy(Scripted):
        def __call__(self, *asked: Any) -> Any:
            with pytest.raises(ConfigError, match="running already"):
                run_sweep(store.load("s"), Scripted())
            with pytest.raises(ConfigError, match="running"):
                store.delete("s")
            return super().__call__(*asked)

    assert run_sweep(sweep, Greedy()) == "completed"
    assert [t.outcome for t in shown_trials(sweep)] == ["measured"] * 5


def test_progress_counts_up_and_tells_what_is_left(store: SweepStore) -> None:
    told: list[Progress] = []
    sweep = store.create(plan("max_draft_len=1:3", mode="grid"), "s")
    run_sweep(sweep, Scripted(), tell=told.append)
    done = [progress.num_done for progress in told]
    assert done == sorted(done) and (done[0], done[-1]) == (0, 3)
    assert told[0].eta_s is None and told[-1].eta_s == 0.0
    assert {progress.num_planned for progress in told} == {3}
    running = [progress for progress in told if progress.trial]
    assert {p.trial.num_pairs for p in running if p.trial} >= {0, 1, 2, 3}
    estimates = [p.eta_s for p in running if p.num_done == 2 and p.eta_s is not None]
    assert estimates == sorted(estimates, reverse=True)


def test_a_trial_without_a_second_token_is_refused_with_advice(store: SweepStore) -> None:
    class Short(Scripted):
        def __call__(self, *asked: Any) -> Any:
            made = super().__call__(*asked)
            return [tuple(dataclasses.replace(m, decode_s=0.0) for m in pair) for pair in made]

    sweep = store.create(plan("max_draft_len=5", mode="grid"), "s")
    run_sweep(sweep, Short())
    assert "ignore_eos" in sweep.trials()[0].reason
