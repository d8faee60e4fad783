"""Engines that listen: the playground's own endpoint, a real llama-server, and half-dead ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from engine.errors import ConfigError
from playground.api.prometheus import PrometheusMetrics
from playground.cli.main import app
from playground.connect.client import Client, EngineError, Reply
from playground.connect.replay import Load, ReplayPrompt, read_concurrencies
from playground.connect.report import Report
from playground.connect.session import Address, measure
from storage import EXTERNAL, ExperimentRow, RunLog, RunQuery
from tests.hostile.test_engines import engine
from tests.playground.serving import Served, free_port

ASKED = tuple(
    ReplayPrompt("s", str(i), "chat", text) for i, text in enumerate(("Hello.", "Tea?", "Why?"))
)
LOAD = Load(ASKED, (1, 2), max_new_tokens=16)


def visited(address: Address, load: Load = LOAD, log: RunLog | None = None) -> Report:
    async def last() -> Report:
        return [report async for report in measure(address, load, log)][-1]

    return asyncio.run(last())


def test_our_own_endpoint_is_compared_with_its_own_plain_decoding(
    served: Served, tmp_path: Path
) -> None:
    own_metrics = PrometheusMetrics(served.host)
    with RunLog.open(str(tmp_path / "mine.db")) as mine:
        mine.watchers.append(own_metrics)
        report = visited(Address(served.url, model="tiny:scripted"), log=mine)
        stored = [mine.get(row.id) for row in mine.find().rows]
        (folded,) = mine.experiments.page(RunQuery()).rows
    assert "vllm:request_success_total{" not in own_metrics.text().decode()
    assert isinstance(folded, ExperimentRow) and folded.key.startswith("replay:")
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
    drafted = [run for run in stored if run and run.metrics["num_drafted"]]
    assert len(drafted) == 2 * len(ASKED) and all(run.mat and run.mat > 1 for run in drafted)
    assert re.search("× plain decoding|no speedup is given", report.sentences()[0])
    assert report.advice
    assert json.loads(json.dumps(report.to_dict()))["choices"][0]["concurrency"] == 1


@pytest.mark.slow
def test_a_level_ends_when_its_time_is_up(served: Served) -> None:
    load = Load(ASKED * 20, (1,), max_new_tokens=200, max_seconds=1.0)
    began = time.monotonic()
    report = visited(Address(served.url, model="tiny:plain"), load)
    assert time.monotonic() - began < 20
    assert len(report.drafting[0].outcomes) < len(load.prompts)


def test_the_answers_before_a_stop_are_in_the_log(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Client.answer

    async def stopped(log: RunLog) -> None:
        last_asked = asyncio.Event()

        async def held(client: Client, prompt: str, *, max_new_tokens: int) -> Reply:
            if prompt == ASKED[-1].text:
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
    assert sorted(stored) == [("completed", one.text) for one in ASKED[:-1]]


@pytest.mark.parametrize("names", ["reasoning", "reasoning_content", "reasoning_content reasoning"])
def test_reasoning_is_timed_and_kept_like_the_answer(names: str) -> None:
    """Engines with a reasoning parser stream it under either name, or under both."""
    pause_s, num_thoughts = 0.02, 10

    def event(**delta: str) -> bytes:
        return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()

    def body() -> Iterator[bytes]:
        for _ in range(num_thoughts):
            yield event(**dict.fromkeys(names.split(), "t"))
            time.sleep(pause_s)
        yield event(content="a")
        yield b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 11}}\n\n'

    async def asked(url: str) -> Reply:
        async with Client.connect(url) as client:
            return await client.answer("Why?", max_new_tokens=11)

    with engine(chat=("", body())) as fake:
        reply = asyncio.run(asked(fake.url))
    assert reply.text == "t" * num_thoughts + "a"
    assert reply.decode_s > pause_s * num_thoughts / 2


def test_concurrencies_are_checked() -> None:
    assert read_concurrencies("1, 4,4") == (1, 4)
    for text in ("", "0", "65", "a", "1;2"):
        with pytest.raises(ConfigError, match="concurrency"):
            read_concurrencies(text)


def test_nobody_listens() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        visited(Address(f"http://127.0.0.1:{free_port()}"))


LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
GGUF = os.environ.get("LLAMA_SERVER_MODEL", "")


@pytest.mark.skipif(
    not (LLAMA_SERVER and GGUF), reason="LLAMA_SERVER and LLAMA_SERVER_MODEL name none"
)
def test_a_real_llama_server_is_read_and_replayed() -> None:
    port = free_port()
    line = [LLAMA_SERVER, "--model", GGUF, "--port", str(port), "--metrics", "--ctx-size", "4096"]
    line += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(f"{url}/health")
            text = "Repeat this ten times: tea for two and two for tea."
            asked = (ReplayPrompt("s", "1", "chat", text),)
            report = visited(Address(url), Load(asked, (1,), max_new_tokens=64))
        finally:
            process.terminate()
    (level,) = report.drafting
    assert report.engine.name == "llamacpp" and level.num_failed == 0
    drafting = level.replies[0].drafting
    assert drafting is not None and level.counters is not None
    assert drafting.drafted and drafting.drafted == level.counters.drafted
    assert drafting.accepted == level.counters.accepted


def _wait_for(url: str) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


@pytest.mark.slow
def test_the_command_watches_and_measures(served: Served, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["connect", served.url, *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "since its start: MAT" in said("--readings", "1", "--every", "0.1")
    measuring = ("--replay", "--prompts", "2", "--concurrency", "1", "--max-new-tokens", "150")
    more = ("--model", "tiny:scripted", "--db", str(tmp_path / "runs.db"))
    told = json.loads(said(*measuring, *more, "--json"))
    assert [level["kind"] for level in told["levels"]] == ["plain", "drafting"]
    assert re.search("× plain decoding|no speedup is given", said(*measuring, *more))
