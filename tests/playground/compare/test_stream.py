"""The stream to the Compare page, its links, and the times of the race."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.experiments.comparison import Comparison, reopen_message, stream
from playground.experiments.forms import from_comparison
from playground.experiments.plan import BASELINE_NAME
from playground.host.live import LiveRuns
from playground.host.runner import EngineHost
from playground.runs.reading import History
from storage import RunLog
from tests.playground.asks import busy, until
from tests.playground.compare.corrupted import begun, ended, experiments_of, stored_race

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def shown(host: EngineHost, history: History) -> tuple[Comparison, Messages]:
    """A comparison and its stream, which shows each of its rounds."""
    messages: Messages = []

    def one_by_one(number: int, *more: Any) -> Any:
        until(lambda: len({message["stream"] for message in messages}) == number)
        return comparison.begin_round(number, *more)

    async def collect() -> None:
        async for message in stream(comparison, history):
            messages.append(message)

    with busy(host):
        comparison = begun(host, suite="starter")
        comparison.on_round = one_by_one
    asyncio.run(collect())
    return comparison, messages


def test_every_round_is_a_stream_of_its_own_and_the_report_grows(
    shown: tuple[Comparison, Messages],
) -> None:
    messages = shown[1]
    first = messages[0]
    assert [meta["title"] for meta in first["runs"]] == [BASELINE_NAME, "Scripted tree"]
    assert first["runs"][0]["prompt"] == "Say hello." and first["report"] == ""
    streams = list(dict.fromkeys(message["stream"] for message in messages))
    assert len(streams) == 1 + 2 * 2 + 1
    for message in messages[1:-1]:
        ids = {meta["id"] for meta in message["runs"]}
        assert json.loads(message["batches"]).keys() <= ids
    words = [json.loads(message["compare"])["text"] for message in messages]
    assert any(word.startswith("round 2 of 4") for word in words)
    counts = [len(json.loads(m["report"])["speedups"]) for m in messages if m["report"]]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] < 8


def test_the_last_message_shows_median_runs_of_the_log(
    shown: tuple[Comparison, Messages], log: RunLog
) -> None:
    comparison, messages = shown
    last = messages[-1]
    state = json.loads(last["compare"])
    assert last["resync"] and state["final"] and state["state"] == "completed"
    labels = [dict((log.get(meta["id"]) or pytest.fail()).labels) for meta in last["runs"]]
    assert {entry["prompt"] for entry in labels} == {"2"}


def test_a_resumed_comparison_without_a_method_that_works_has_no_round(
    host: EngineHost, history: History
) -> None:
    first = ended(begun(host, ("scripted", {"fail_at": "0"})))
    with busy(host):
        experiments_of(host).resume(first.id)
        resumed = experiments_of(host).job(first.id)
        assert isinstance(resumed, Comparison)

    async def collect() -> Messages:
        return [message async for message in stream(resumed, history)]

    last = asyncio.run(collect())[-1]
    assert json.loads(last["compare"])["state"] == "completed"
    assert [meta["title"] for meta in last["runs"]] == [BASELINE_NAME]


def test_a_link_shows_the_same_from_the_log_alone(
    shown: tuple[Comparison, Messages], host: EngineHost, log: RunLog
) -> None:
    comparison, messages = shown
    again = reopen_message(stored_race(host, comparison.id), History(LiveRuns(), log))
    last = messages[-1]
    assert json.loads(again["report"]) == json.loads(last["report"])
    assert [meta["id"] for meta in again["runs"]] == [meta["id"] for meta in last["runs"]]
    with pytest.raises(ConfigError, match="nothing"):
        stored_race(host, "nothing")


def test_a_link_of_a_comparison_fills_the_form(host: EngineHost, log: RunLog) -> None:
    methods = ("scripted", {"max_draft_len": "5"}), ("corrupted", {"wrong_at": "99"})
    asked = begun(host, *methods, system="Be brief.", limits={"max_new_tokens": "9"})
    comparison = ended(asked)
    again = from_comparison(host.catalog, log, comparison.id).plan(host.catalog)
    assert again == comparison.plan
