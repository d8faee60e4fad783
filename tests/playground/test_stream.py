"""The event protocol, and the runs in memory that it tells of: bounded, and told from the log."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import ExitStack
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.host import live
from playground.host.live import FirstToken, LiveRun, LiveRuns, RecentSteps
from playground.host.methods import NEAR_TIES
from playground.host.runner import EngineHost
from playground.host.stream import RunStream, follow, status_of
from playground.runs.reading import History
from storage import NewRun, StepRow
from tests.playground.asks import finished, start
from tests.playground.tiny import held_drafts
from tests.storage import conftest
from tests.storage.conftest import step


def test_a_stream_has_every_event_and_what_was_missed_is_told_again(
    host: EngineHost, history: History
) -> None:
    async def collect(run: LiveRun) -> list[dict[str, Any]]:
        stream = follow(RunStream([run]))
        first = await anext(stream)
        drafts.close()
        return [first, *[message async for message in stream]]

    with ExitStack() as drafts:
        drafts.enter_context(held_drafts())
        run = start(host)
        messages = asyncio.run(collect(run))
    batches = [json.loads(message["batches"])[run.id] for message in messages]
    events = [event for batch in batches for event in batch["events"]]
    assert [m["seq"] for m in messages] == list(range(len(messages))) and len(messages) > 1
    assert [event[0] for event in events] == list(range(run.num_events))
    assert "".join(piece for event in events for piece in event[1]) == "".join(run.pieces())
    assert batches[-1]["status"]["state"] == "completed"
    assert batches[-1]["end"] == history.since(run.id, 0)["end"]
    for have in (0, 1, 5):
        assert history.since(run.id, have)["events"] == events[have:]


def test_the_log_tells_the_same_as_memory(host: EngineHost, history: History) -> None:
    run = finished(start(host, sampling={"temperature": "0.7"}))
    assert run.log_id is not None
    memory, reopened = history.since(run.log_id, 0), History(LiveRuns(), host.log)
    stored = reopened.since(run.log_id, 0)
    assert stored["events"] == memory["events"]
    (meta,) = reopened.show(run.log_id)["runs"]
    assert run.meta["temperature"] == meta["temperature"] == 0.7
    assert stored["end"] == memory["end"]
    assert stored["figures"] == json.loads(json.dumps(memory["figures"]))
    assert history.step(run.log_id, 2) == reopened.step(run.log_id, 2)


@pytest.mark.parametrize(
    ("method", "lossless", "exact", "badge"),
    [
        ({"decoding_type": "NGram"}, True, True, "lossless"),
        ({"decoding_type": "NGram"}, True, False, NEAR_TIES),
        ({"decoding_type": "Autoregressive"}, True, False, "lossless"),
        ({"decoding_type": "Of_Tomorrow"}, True, False, NEAR_TIES),
        ({"decoding_type": "Of_Tomorrow"}, False, False, "lossy"),
        ({"decoding_type": "External"}, None, None, ""),
    ],
)
def test_a_stored_run_keeps_its_method_s_badge(
    host: EngineHost, method: dict[str, str], lossless: bool | None, exact: bool | None, badge: str
) -> None:
    kind: dict[str, Any]
    kind = {"target": "tiny", "method": method, "method_title": "", "lossless": lossless}
    kind |= {"environment": {} if exact is None else {"exact": exact}}
    run = host.log.begin(NewRun(**kind, sampling={}, limits={}, prompt_ids=(1,)))
    (meta,) = History(LiveRuns(), host.log).show(run)["runs"]
    assert meta["badge"] == badge


@pytest.mark.parametrize(("dtype", "badge"), [("float32", "lossless"), ("bfloat16", NEAR_TIES)])
def test_a_badge_promises_what_the_target_computes(
    host: EngineHost, dtype: str, badge: str
) -> None:
    """The tiny target has no kernels: in bfloat16 a row is rounded differently among others."""
    run = finished(start(host, dtype=dtype))
    assert status_of(run, {})["badge"] == badge
    (meta,) = History(LiveRuns(), host.log).show(run.log_id or "")["runs"]
    assert meta["badge"] == badge


# ---- runs in memory


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
    steps, files = RecentSteps(), (__file__, live.__file__, conftest.__file__)
    tracemalloc.start()
    steps.extend([wide(index) for index in range(500)])
    ours = [tracemalloc.Filter(True, file) for file in files]  # other threads are at work
    taken = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)
    tracemalloc.stop()
    assert 500_000 < taken < steps.num_bytes < 3 * taken


def test_a_run_keeps_its_newest_steps_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STEP_BYTES", 100_000)
    steps, most = RecentSteps(), 0
    for index in range(50):
        steps.extend([wide(index)])
        most = max(most, steps.num_bytes)
    assert most <= 100_000 and len(steps) == 50 and 0 < steps.first < 50
    kept = steps.read(steps.first)
    assert kept is not None and [row.index for row in kept] == list(range(steps.first, 50))
    assert steps.read(steps.first - 1) is None
    assert steps.longest == 64


def test_oldest_finished_runs_go_first_and_without_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_RUNS", 3)
    store, runs = LiveRuns(), [LiveRun("tab") for _ in range(5)]
    for run in runs:
        store.add(run)
        run.rows.extend([wide(index) for index in range(6)])
        if run is not runs[0]:
            run.end("completed")
    assert [store.get(run.id) is run for run in runs] == [True, False, False, True, True]
    assert [len(run.rows.read(run.rows.first) or ()) for run in runs] == [6, 0, 0, 0, 6]
    assert all(len(run.rows) == 6 for run in runs), "the log has them"


def test_what_is_in_memory_no_more_is_answered_from_the_log(
    host: EngineHost, history: History
) -> None:
    run = finished(start(host))

    def answers() -> list[object]:
        since = [history.since(run.id, have) for have in (0, 1, 5)]
        steps = [history.step(run.id, index) for index in range(len(run.rows))]
        return [since, steps]

    before = answers()
    run.rows.drop(1 << 40)
    assert run.rows.read(run.rows.first) == [] and answers() == before
    with pytest.raises(ConfigError, match="has no step"):
        history.step(run.id, len(run.rows))


def numbers(message: dict[str, Any] | None) -> list[int]:
    """The numbers of the events of a stream's only run."""
    assert message is not None
    (batch,) = json.loads(message["batches"]).values()
    return [event[0] for event in batch["events"]]


def test_a_stream_that_lags_behind_memory_goes_on_and_the_page_asks_for_the_rest() -> None:
    run = LiveRun("tab", first=FirstToken("a", 0.1))
    stream = RunStream([run])
    run.rows.extend([wide(index) for index in range(4)])
    run.rows.drop(2 * run.rows.num_bytes // 4)
    assert numbers(stream.next()) == [3, 4]
    assert run.pieces() == [] and len(run.pieces(3)) == 2
    run.rows.extend([wide(4)])
    assert numbers(stream.next()) == [5]
