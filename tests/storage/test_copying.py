"""A log copied into another, in both directions: equal to the last digit, and never twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from playground.experiments.sweep.report import read_sweep, stored_trials
from storage import RunLog, RunQuery, StorageError, copy_log, copying, dialects
from tests.commands import invoke
from tests.playground.sweeps.scripted import swept
from tests.storage.conftest import (
    begun_benchmark,
    detail,
    finish,
    finished_run,
    new_run,
    odd_run,
    step,
    whole,
)


def all_ids(log: RunLog) -> list[str]:
    return sorted(i for hidden in (False, True) for i in log.ids(RunQuery(deleted=hidden)))


@pytest.fixture(params=["file to server", "server to file", "file to file"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RunLog, RunLog]]:
    """A log, and one to copy it into."""
    places = {"file": str(tmp_path / "a.db"), "other": str(tmp_path / "b.db")}
    first, _, second = request.param.partition(" to ")
    with ExitStack() as stack:
        if "server" in request.param:
            server = request.getfixturevalue("postgres")
            places["server"] = stack.enter_context(server.database("empty_log"))
        source = stack.enter_context(RunLog.open(places[first]))
        into = stack.enter_context(RunLog.open(places["other" if first == second else second]))
        yield source, into


def filled(log: RunLog) -> list[str]:
    """Odd values, big texts, hidden and half runs, a benchmark, artifacts; ids, oldest first."""
    odd = odd_run(log).run.id
    benchmark_id = begun_benchmark(log, "näme", {"n": math.inf})
    big = "\U0001f642\x00\\u0041 \udcff" * 20_000
    of_benchmark = finished_run(log, experiment_id=benchmark_id, prompt_text=big)
    log.benchmarks.finish(benchmark_id, "completed", {"speedup": math.nan})
    hidden = finished_run(log, tags=("x",), dtype="a\x00b")
    log.set_deleted([hidden])
    digits = log.begin(new_run())
    log.add_steps(digits, [step(0, draft_s=0.1 + 0.2, draft_probs=(None, 5e-324, 1 - 1e-16))])
    finish(
        log,
        digits,
        {"tok_s": 1 / 3, "mat": 2 / 3, "ttft_s": 1.7976931348623157e308},
        status="cancelled",
        output_ids=[5],
        text="a",
    )
    log.artifacts.put("latency", {"a": 1}, meta={"b": [math.nan]}, payload=b"\x00\xff" * 100)
    log.artifacts.put("ranks", {}, meta={}, payload=b"r", benchmark_id=benchmark_id)
    return [odd, of_benchmark, hidden, digits]


def test_everything_arrives_as_it_was_and_once(logs: tuple[RunLog, RunLog]) -> None:
    source, into = logs
    ids = filled(source)
    going = source.begin(new_run())
    source.add_prefill(going, token_id=5, text="a", num_prompt_tokens=3, ttft_s=0.05)
    source.add_steps(going, [step(0)])
    of_going = begun_benchmark(source)
    source.artifacts.put("ranks", {}, meta={}, payload=b"s", benchmark_id=of_going)
    for again in (False, True):
        *_, found = copy_log(source, into)
        assert (found.runs, found.present) == ((0, 4) if again else (4, 0)) and found.running == 1
        assert (found.benchmarks, found.artifacts) == ((0, 0) if again else (1, 2))
    assert all_ids(into) == sorted(ids)
    for run_id in ids:
        assert repr(whole(into, run_id)) == repr(whole(source, run_id))
    (there,) = into.benchmarks.list()
    assert repr(source.benchmarks.head(there.id)) == repr(there)
    for artifact in source.artifacts.find("latency"):
        (copied,) = into.artifacts.find("latency")
        assert repr(copied) == repr(artifact)
        assert into.artifacts.payload(copied.id) == source.artifacts.payload(artifact.id)
    assert [one.benchmark_id for one in into.artifacts.find("ranks")] == [there.id]
    names = [one.name for one in into.experiments.page(RunQuery()).rows if hasattr(one, "num_runs")]
    assert names == ["näme", ""], "the odd run came without its benchmark"
    assert into.ids(RunQuery(text="NÄME", labels={"turn": "0"}, tag="a")) == (ids[0],)
    assert into.ids(RunQuery(text="LINE")) == (ids[0],)
    theirs = whole(source, going)
    for num_new in (1, 0):
        assert into.write_whole([theirs, theirs]) == num_new
        half = detail(into, going)
        assert half.status == "interrupted" and half.output_ids == (5, 6, 9)


def test_what_is_there_is_not_overwritten(logs: tuple[RunLog, RunLog]) -> None:
    source, into = logs
    run_id = finished_run(source)
    stored = whole(source, run_id)
    into.write_whole([stored])
    into.annotate(run_id, name="mine")
    into.set_deleted([run_id])
    assert into.write_whole([replace(stored, steps=stored.steps[:1])]) == 0
    *_, found = copy_log(source, into)
    assert found.present == 1
    kept = whole(into, run_id)
    assert (kept.run.name, kept.run.deleted, kept.steps) == ("mine", True, stored.steps)


def test_a_copy_that_was_cut_off_goes_on(
    logs: tuple[RunLog, RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BATCH", 2)
    source, into = logs
    ids = [finished_run(source) for _ in range(5)]
    cut = copy_log(source, into)
    assert next(cut).done == 2
    cut.close()
    *_, found = copy_log(source, into)
    assert (found.runs, found.present) == (3, 2) and all_ids(into) == sorted(ids)


def test_whole_runs_are_read_and_copied_however_long_that_takes(
    logs: tuple[RunLog, RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, into = logs
    ids = filled(source)
    source.artifacts.put("latency", {"a": 2}, meta={}, payload=b"\x00" * 10**6)
    for log in logs:
        log._database.engine.dispose()  # connections set up from now on
    monkeypatch.setattr(dialects, "INSTRUCTIONS", 20)
    monkeypatch.setattr(dialects, "MAX_READING_S", 0.0005)
    if source.url.get_backend_name() == "sqlite":
        with pytest.raises(StorageError, match="did not answer within"):
            source.find()
    assert whole(source, ids[0]) and [run.id for run in source.details(ids)] == ids
    *_, progress = copy_log(source, into)
    assert (progress.runs, progress.artifacts) == (4, 3)
    assert repr(whole(into, ids[1])) == repr(whole(source, ids[1]))


def test_sweeps_come_along_with_their_trials(tmp_path: Path, postgres: object) -> None:
    with postgres.database("empty_log") as url:  # type: ignore[attr-defined]
        source, into = RunLog.open(str(tmp_path / "a.db")), RunLog.open(url)
        sweep = swept(source, trials=3)
        source.benchmarks.resume(sweep.benchmark.id)
        list(copy_log(source, into))
        assert (
            into.benchmarks.list(9, sweeps=True) == ()
            and stored_trials(into, sweep.benchmark.id) == ()
        ), "it is going on"
        source.benchmarks.finish(sweep.benchmark.id, "completed", {})
        swept(into, trials=2)
        for num_copied in (3, 0):
            *_, progress = copy_log(source, into)
            assert progress.artifacts == num_copied
        copy = read_sweep(into, sweep.benchmark.id)
        assert copy.trials == read_sweep(source, sweep.benchmark.id).trials
        assert copy.plan.to_dict() == sweep.plan.to_dict()
        for one in (source, into):
            one.close()


def test_the_command_copies_and_says_what(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("a.db", "b.db")]
    with RunLog.open(places[0]) as log:
        filled(log)
    for said in ("4 runs copied, 0 were already there; 1 ", "0 runs copied, 4 were already"):
        assert said in invoke("runs", "copy", "--from", places[0], "--to", places[1]).output
