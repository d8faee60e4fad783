"""The event protocol: a stream has every event once, and what a page missed is told again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from playground.host.live import LiveRun, LiveRuns
from playground.host.methods import NEAR_TIES
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, follow, status_of
from storage import NewRun
from tests.playground.asks import finished, start


def test_a_stream_has_every_event_and_what_was_missed_is_told_again(
    host: EngineHost, history: History
) -> None:
    async def collect(run: LiveRun) -> list[dict[str, Any]]:
        return [message async for message in follow(RunStream([run], host.ahead_of))]

    run = start(host, settings={"delay_ms": "10"})
    messages = asyncio.run(collect(run))
    events = [event for message in messages for event in json.loads(message["ev"])]
    assert [m["seq"] for m in messages] == list(range(len(messages))) and len(messages) > 3
    assert [event[1] for event in events] == list(range(run.num_events))
    assert "".join(piece for event in events for piece in event[2]) == "".join(run.pieces())
    assert messages[-1]["status"][run.id]["state"] == "completed"
    assert messages[-1]["ends"][run.id] == history.since(run.id, 0)["end"]
    for have in (0, 1, 5):
        assert history.since(run.id, have)["ev"] == events[have:]


def test_the_log_tells_the_same_as_memory(host: EngineHost, history: History) -> None:
    run = finished(start(host, sampling={"temperature": "0.7"}))
    assert run.log_id is not None
    live, reopened = history.since(run.log_id, 0), History(LiveRuns(), host.log)
    stored = reopened.since(run.log_id, 0)
    assert stored["ev"] == live["ev"]
    (meta,) = reopened.show(run.log_id)["runs"]
    assert run.meta["temperature"] == meta["temperature"] == 0.7
    assert stored["end"] == live["end"]
    assert stored["figures"] == json.loads(json.dumps(live["figures"]))
    assert history.step(run.log_id, 2) == reopened.step(run.log_id, 2)


@pytest.mark.parametrize(
    ("method", "lossless", "exact", "badge"),
    [
        ({"decoding_type": "NGram"}, True, None, "lossless"),
        ({"decoding_type": "NGram"}, True, True, "lossless"),
        ({"decoding_type": "NGram"}, True, False, NEAR_TIES),
        ({"decoding_type": "Autoregressive"}, True, False, "lossless"),
        ({"decoding_type": "Of_Tomorrow"}, True, None, "lossless"),
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
    assert status_of(run, 0)["badge"] == badge
    (meta,) = History(LiveRuns(), host.log).show(run.log_id or "")["runs"]
    assert meta["badge"] == badge
