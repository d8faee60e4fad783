"""Engines that listen: the playground's own endpoint, and made-up ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.formats import DASH
from playground.api.prometheus import PrometheusMetrics
from playground.connect import client as client_module
from playground.connect.client import Client, EngineError, Reply
from playground.connect.replay import Load, read_concurrencies
from playground.connect.session import Address, measure
from playground.experiments.plan import Item
from playground.host.live import LiveRuns
from playground.runs.details import facts
from playground.runs.query import FLAT, TableQuery
from playground.runs.reading import History
from playground.runs.table import RunTable
from storage import EXTERNAL, ExperimentRow, RunLog, RunQuery
from tests.commands import invoke
from tests.hostile.test_engines import drip, engine, streamed, visited
from tests.playground.serving import Served, free_port

ASKED = [
    Item("s", str(i), "chat", "chat", (text,)) for i, text in enumerate(("Hello.", "Tea?", "Why?"))
]
LOAD = Load(ASKED, (1, 2), max_new_tokens=16)


def test_our_own_endpoint_is_compared_with_its_own_plain_decoding(
    served: Served, tmp_path: Path
) -> None:
    own_metrics = PrometheusMetrics(served.host)
    with RunLog.open(str(tmp_path / "mine.db")) as mine:
        mine.watchers.append(own_metrics)
        report = visited(Address(served.url, model="tiny:scripted"), LOAD, mine)
        stored = [mine.get(row.id) for row in mine.find().rows]
        (folded,) = mine.experiments.page(RunQuery()).rows
    assert "vllm:request_success_total{" not in own_metrics.text().decode()
    assert isinstance(folded, ExperimentRow) and folded.kind == "replay"
    assert folded.num_runs == folded.num_completed == len(stored)
    assert report.engine.name == "playground"
    assert [level.concurrency for level in report.drafting] == [1, 2]
    for own, plain in report.pairs:
        assert plain is not None and own.num_failed == plain.num_failed == 0
        assert [a.reply.num_new_tokens for a in own.outcomes if a.reply] == [16, 16, 16]
        texts = {a.prompt: a.reply.text for a in plain.outcomes if a.reply}
        assert all(a.reply and a.reply.text == texts[a.prompt] for a in own.outcomes)
        # What requests tell of themselves is what the counters grew by: one formula, two places.
        assert own.counters is not None and own.mat == own.counters.mat
        assert plain.mat is None or plain.mat == 1
    assert len(stored) == 2 * 2 * len(ASKED)
    assert all(run and run.decoding_type == EXTERNAL and run.lossless is None for run in stored)
    drafted = [run for run in stored if run and run.metrics.get("num_drafted")]
    assert len(drafted) == 2 * len(ASKED) and all(run.mat and run.mat > 1 for run in drafted)
    assert re.search("× plain decoding|no speedup is given", report.sentences()[0])
    assert report.advice[0].concurrency == 1


def test_an_engine_that_does_not_report_its_steps_has_none(log: RunLog) -> None:
    """It may draft: then its steps are not as many as its tokens."""
    events = [json.dumps({"choices": [{"delta": {"content": "a"}}]})] * 9
    events.append(json.dumps({"choices": [], "usage": {"completion_tokens": 9}}))
    with engine(chat=streamed(*events)) as fake:
        visited(Address(fake.url), Load(ASKED[:1], (1,)), log)
    (run,) = log.details([row.id for row in log.find().rows])
    assert run.num_new_tokens == 9 and "num_drafted" not in run.metrics
    columns = ("num_new_tokens", "num_steps", "mat")
    (row,) = RunTable(log).view(TableQuery(group=FLAT), columns)["rows"]
    assert row["cells"] == ["9", DASH, DASH]
    assert "steps" not in dict(facts(run)["run"])
    figures = History(LiveRuns(), log).since(run.id, 0)["figures"]
    assert figures["texts"]["num_new_tokens"] == f"9 / {DASH}" and figures["result"] is None


def test_a_level_ends_when_its_time_is_up() -> None:
    with engine(chat=("", drip(b"\n"))) as fake:
        report = visited(Address(fake.url), Load(ASKED, (1,), max_seconds=0.5))
    errors = [one.error for one in report.drafting[0].outcomes]
    assert len(errors) < len(ASKED) and {*errors} <= {"The time limit was reached."}


def test_the_answers_before_a_stop_are_in_the_log(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Client.answer

    async def stopped(log: RunLog) -> None:
        last_asked = asyncio.Event()

        async def held(client: Client, prompt: str, *, max_new_tokens: int) -> Reply:
            if prompt == ASKED[-1].turns[0]:
                last_asked.set()
                await asyncio.Event().wait()
            return await answer(client, prompt, max_new_tokens=max_new_tokens)

        monkeypatch.setattr(Client, "answer", held)
        measuring = measure(Address(served.url, model="tiny:plain"), LOAD, log)
        task = asyncio.ensure_future(anext(measuring))
        await asyncio.wait_for(last_asked.wait(), 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    with RunLog.open(str(tmp_path / "mine.db")) as mine:
        asyncio.run(stopped(mine))
        stored = [(run.status, run.prompt_text) for run in mine.find().rows]
    assert sorted(stored) == [("completed", one.turns[0]) for one in ASKED[:-1]]


@pytest.mark.parametrize("names", ["reasoning", "reasoning_content", "reasoning_content reasoning"])
def test_reasoning_is_timed_and_kept_like_the_answer(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines with a reasoning parser stream it under either name, or under both."""
    seconds = itertools.count()
    monkeypatch.setattr(client_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    deltas = [*[dict.fromkeys(names.split(), "t")] * 10, {"content": "a"}]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]

    async def asked(url: str) -> Reply:
        async with Client.connect(url) as client:
            return await client.answer("Why?", max_new_tokens=11)

    with engine(chat=streamed(*events)) as fake:
        reply = asyncio.run(asked(fake.url))
    assert reply.text == "t" * 10 + "a"
    assert (reply.ttft_s, reply.decode_s) == (1, 10)  # the clock's hand moves at every piece


def test_concurrencies_are_checked() -> None:
    assert read_concurrencies("1, 4,4") == (1, 4)
    for text in ("", "0", "65", "a", "1;2"):
        with pytest.raises(ConfigError, match="concurrency"):
            read_concurrencies(text)


def test_an_address_where_nothing_listens_is_refused() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        visited(Address(f"http://127.0.0.1:{free_port()}"))


@pytest.mark.slow
def test_the_command_watches_and_measures(served: Served, tmp_path: Path) -> None:
    watched = invoke("connect", served.url, "--readings", 1, "--every", 0.1)
    assert "since its start: MAT" in watched.stdout
    model = ("--model", "tiny:scripted", "--db", tmp_path / "runs.db")
    load = ("--prompts", 2, "--concurrency", 1, "--max-new-tokens", 150)
    line = ("connect", served.url, "--replay", *model, *load)
    printed = invoke(*line).stdout
    assert all(f"concurrency 1, {kind}" in printed for kind in ("plain", "drafting"))
    assert re.search("× plain decoding|no speedup is given", printed)
