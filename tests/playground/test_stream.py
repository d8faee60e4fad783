"""The event protocol: whatever is lost or repeated, the panel ends with the same text."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from playground.host.live import LiveRun, LiveRuns
from playground.host.methods import NEAR_TIES
from playground.host.runner import EngineHost
from playground.host.stream import History, RunStream, follow, status_of
from storage import NewRun
from tests.playground.asks import finished, start


class Panel:
    """What panel.js does with messages, in Python."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.stream, self.seq = "", -1
        self.events: list[list[Any]] = []
        self.end: dict[str, Any] | None = None

    def receive(self, message: dict[str, Any]) -> None:
        fresh = message["stream"] != self.stream
        if not fresh and message["seq"] <= self.seq:
            return
        if fresh:
            self.stream, self.seq = message["stream"], -1
        gap = message["seq"] > self.seq + 1
        self.seq = message["seq"]
        whole = self._take(json.loads(message["ev"])) and not gap
        for end in message["ends"].values():
            self.end = end
        if not whole or (self.end is not None and len(self.events) < self.end["n"]):
            self.resync(message["runs"][0]["id"])

    def _take(self, events: list[list[Any]]) -> bool:
        whole = True
        for event in events:
            if event[1] == len(self.events):
                self.events.append(event)
            whole = whole and event[1] < len(self.events)
        return whole

    def resync(self, run: str) -> None:
        answer = self.history.since(run, len(self.events))
        assert self._take(answer["ev"])
        self.end = answer["end"] or self.end

    @property
    def text(self) -> str:
        return "".join(piece for event in self.events for piece in event[2])


def messages_of(host: EngineHost, **changes: Any) -> tuple[LiveRun, list[dict[str, Any]]]:
    async def collect(run: LiveRun) -> list[dict[str, Any]]:
        return [message async for message in follow(RunStream([run], host.ahead_of), tick_s=0.01)]

    run = start(host, **changes)
    return run, asyncio.run(collect(run))


def streamed(run: LiveRun) -> str:
    assert run.first is not None
    return run.first.text + "".join(
        t for row in run.rows.read(0) or () for t in row.committed_texts
    )


def test_lost_and_repeated_batches_end_in_the_same_state(
    host: EngineHost, history: History
) -> None:
    run, messages = messages_of(host, settings={"delay_ms": "10"})
    assert [m["seq"] for m in messages] == list(range(len(messages))) and len(messages) > 3
    assert messages[-1]["status"][run.id]["state"] == "completed"
    for seed in range(8):
        rng = random.Random(seed)
        panel = Panel(history)
        for message in messages[:-1]:
            for _ in range(rng.choice([0, 1, 1, 2]) if seed else 1):  # first all, in order
                panel.receive(message)
                if seed and rng.random() < 0.3:
                    panel.receive(rng.choice(messages[: message["seq"] + 1]))
        panel.receive(messages[-1])
        assert panel.text == streamed(run), seed
        assert [event[1] for event in panel.events] == list(range(run.num_events)), seed
        assert panel.end is not None and panel.end["n"] == run.num_events


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
