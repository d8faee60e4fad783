"""The store of live runs stays within its bounds and never drops a run that goes on."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from engine.errors import ConfigError
from playground.experiments.comparison import race_clocks
from playground.host import live
from playground.host.live import FirstToken, LiveRun, LiveRuns, RecentSteps
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream
from storage import RunLog, StepRow
from tests.playground.asks import finished, start
from tests.storage.conftest import step


def test_oldest_finished_runs_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_RUNS", 2)
    store = LiveRuns()
    runs = [LiveRun("tab") for _ in range(4)]
    for run in runs:
        if run is not runs[0]:
            run.end("completed")
        store.add(run)
    assert store.get(runs[0].id) is runs[0]
    assert store.get(runs[1].id) is None and store.get(runs[2].id) is None
    assert store.get(runs[3].id) is runs[3]


def wide(index: int) -> StepRow:
    """A step with a tree of 65 nodes, as the recorder makes it: nothing of it is shared."""
    nodes = range(65)
    return step(
        index,
        tokens=tuple(1000 + index + node for node in nodes),
        parents=tuple(node - 1 for node in nodes),
        ranks=tuple(300 + node for node in nodes),
        draft_probs=tuple(0.5 / (1 + index + node) for node in nodes),
        target_probs=tuple(0.25 / (1 + index + node) for node in nodes),
        token_texts=tuple(f"t{node}" for node in nodes),
    )


def test_steps_take_no_more_memory_than_is_counted() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    steps = RecentSteps()
    steps.extend([wide(index) for index in range(500)])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken < steps.num_bytes < 3 * taken


def test_a_run_keeps_its_newest_steps_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STEP_BYTES", 100_000)
    steps, most = RecentSteps(), 0
    for index in range(50):
        steps.extend([wide(index)])
        most = max(most, steps.num_bytes)
    assert most <= 100_000 and len(steps) == 50 and 0 < steps.first < 50
    kept = steps.read(steps.first)
    assert kept is not None and [row.index for row in kept] == list(range(steps.first, 50))
    assert steps.read(steps.first - 1) is None and steps.read(50) == []
    assert steps.longest == 64


def test_finished_runs_keep_no_steps_once_another_begins() -> None:
    store = LiveRuns()
    over, running = [LiveRun("tab") for _ in range(3)], LiveRun("tab")
    for run in (*over, running):
        store.add(run)
        run.rows.extend([wide(index) for index in range(6)])
        if run is not running:
            run.end("completed")
    assert all(store.get(run.id) is run and len(run.rows) == 6 for run in over)
    assert not any(run.rows.read(run.rows.first) for run in over)
    assert len(running.rows.read(0) or ()) == 6


def test_what_is_in_memory_no_more_is_answered_from_the_log(
    host: EngineHost, log: RunLog, history: History
) -> None:
    run = finished(start(host))
    assert run.log_id is not None

    def answers() -> list[object]:
        since = [history.since(run.id, have) for have in (0, 1, 5)]
        steps = [history.step(run.id, index) for index in range(len(run.rows))]
        return [since, steps, race_clocks(host.runs, log, [run.id])]

    before = answers()
    run.rows.drop(1 << 40)
    assert run.rows.read(run.rows.first) == [] and answers() == before
    with pytest.raises(ConfigError, match="has no step"):
        history.step(run.id, len(run.rows))


def test_a_stream_that_lags_behind_memory_goes_on_and_the_page_asks_for_the_rest() -> None:
    run = LiveRun("tab", first=FirstToken("a", 0.1))
    stream = RunStream([run], lambda run: 0)
    run.rows.extend([wide(index) for index in range(4)])
    run.rows.drop(2 * run.rows.num_bytes // 4)
    message = stream.next()
    assert message is not None
    assert [event[1] for event in json.loads(message["ev"])] == [3, 4]
    assert run.pieces() == [] and len(run.pieces(3)) == 2
    run.rows.extend([wide(4)])
    message = stream.next()
    assert message is not None and [e[1] for e in json.loads(message["ev"])] == [5]
