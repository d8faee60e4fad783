"""A process that is killed in a trial loses nothing but that trial, which is tried again."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from engine.errors import ConfigError
from playground.experiments.sweep.report import shown_trials, state_of
from playground.experiments.sweep.run import DIED, MAX_TRIES, run_sweep
from playground.experiments.sweep.store import SweepStore, sqlite_file
from playground.experiments.sweep.trials import OUTCOME, key_of
from tests.playground.sweeps.killing import kill, run_until_killed, start_until_it_hangs
from tests.playground.sweeps.scripted import Scripted, plan

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.mark.parametrize("mode", ["search", "grid"])
def test_resume_after_a_kill_does_exactly_what_was_planned(
    tmp_path: Path, filed: SweepStore, mode: str
) -> None:
    filed.create(plan("max_draft_len=1:6", trials=6, mode=mode), "s")
    broken_off = run_until_killed(tmp_path, "s", num_whole=2)
    sweep = filed.load("s")
    assert sweep.status == "interrupted"
    assert [t.outcome for t in shown_trials(sweep)] == ["measured", "measured", "running"]
    assert [row["outcome"] for row in state_of(sweep)["trials"]][-1] == "killed"
    measure = Scripted()
    assert run_sweep(sweep, measure) == "completed"
    tried = [key_of({"max_draft_len": c.max_draft_len}) for c in measure.configs]
    assert tried[0] == broken_off and len(tried) == len(set(tried)) == 4
    done = shown_trials(filed.load("s"))
    assert [t.outcome for t in done] == ["measured"] * 6
    assert sorted(int(t.point["max_draft_len"] or 0) for t in done) == [1, 2, 3, 4, 5, 6]
    assert [t.outcome for t in sweep.trials()].count("killed") == 1


def test_killed_again_and_again_it_still_ends_with_the_plan(
    tmp_path: Path, filed: SweepStore
) -> None:
    filed.create(plan("max_draft_len=1:30", trials=5), "s")
    for _ in range(2):
        run_until_killed(tmp_path, "s", num_whole=1)
    assert run_sweep(filed.load("s"), Scripted()) == "completed"
    assert [t.outcome for t in shown_trials(filed.load("s"))] == ["measured"] * 5


def test_a_point_that_kills_every_process_is_given_up(tmp_path: Path, filed: SweepStore) -> None:
    filed.create(plan("max_draft_len=1:3", mode="grid"), "s")
    for _ in range(MAX_TRIES):
        assert run_until_killed(tmp_path, "s", num_whole=0) == key_of({"max_draft_len": 1})
    measure = Scripted()
    assert run_sweep(filed.load("s"), measure) == "completed"
    assert [c.max_draft_len for c in measure.configs] == [2, 3]
    first = shown_trials(filed.load("s"))
    assert {(t.outcome, t.reason) for t in first if t.point["max_draft_len"] == 1} == {
        ("failed", DIED)
    }


def test_a_point_that_answers_more_at_every_try_is_not_given_up(
    tmp_path: Path, filed: SweepStore
) -> None:
    filed.create(plan("max_draft_len=1:2", mode="grid"), "s")
    for num_answered in range(1, 3 * MAX_TRIES):
        run_until_killed(tmp_path, "s", num_whole=0, num_answered=num_answered)
    for _ in range(MAX_TRIES - 1):
        run_until_killed(tmp_path, "s", num_whole=0)
    assert run_sweep(filed.load("s"), Scripted()) == "completed"
    assert [t.outcome for t in shown_trials(filed.load("s"))] == ["measured"] * 2


def test_a_trial_noted_but_not_told_to_optuna_is_tried_again(filed: SweepStore) -> None:
    """The process died between the two writes that end a trial."""
    sweep = filed.create(plan("max_draft_len=1:3", mode="grid"), "s")
    sweep.study.enqueue_trial({"max_draft_len": 1})
    trial = sweep.study.ask({"max_draft_len": optuna.distributions.IntDistribution(1, 3)})
    trial.set_user_attr(OUTCOME, "measured")
    measure = Scripted()
    run_sweep(filed.load("s"), measure)
    assert [c.max_draft_len for c in measure.configs] == [1, 2, 3]


def test_a_trial_without_its_settings_is_only_buried(filed: SweepStore) -> None:
    """The process died while the point was being chosen."""
    sweep = filed.create(plan("max_draft_len=1:3", "lookup=pool,transformers", mode="grid"), "s")
    sweep.study.enqueue_trial({"max_draft_len": 1, "lookup": "pool"})
    half = sweep.study.ask()
    half.suggest_int("max_draft_len", 1, 3)
    measure = Scripted()
    assert run_sweep(filed.load("s"), measure) == "completed"
    assert len(measure.configs) == len({key_of(c.model_dump()) for c in measure.configs}) == 6
    assert len(shown_trials(sweep)) == 6


def test_two_processes_never_run_one_sweep(tmp_path: Path, filed: SweepStore) -> None:
    filed.create(plan("max_draft_len=1:4", mode="grid"), "s")
    process, _ = start_until_it_hangs(tmp_path, "s", num_whole=1)
    assert [head.status for head in filed.heads()] == ["running"]
    with pytest.raises(ConfigError, match="running already"):
        run_sweep(filed.load("s"), Scripted())
    kill(process)
    assert run_sweep(filed.load("s"), Scripted()) == "completed"
    assert sqlite_file(tmp_path / "runs.sqlite3").is_file()
