"""Engines that are watched and measured, and answer what would freeze, fill or confuse a server."""

from __future__ import annotations

import asyncio
import gzip
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from playground.connect import client as client_module
from playground.connect.client import Client
from playground.connect.readings import ENGINES
from playground.connect.replay import Load
from playground.connect.report import Report
from playground.connect.session import Address, measure
from playground.experiments.plan import Item
from storage import RunLog
from tests.commands import invoke, refused
from tests.hostile.watch import Watch
from tests.playground.serving import Served
from tests.playground.test_http import call

pytestmark = pytest.mark.slow

MOST_SENT = 64 << 20
MOST_S = 30.0
Body = Iterable[bytes]
Parts = tuple[str, Body]
"""Further headers, and a body piece by piece."""


def listed(model: str = "m", owner: str = "vllm") -> Parts:
    return "", [json.dumps({"data": [{"id": model, "owned_by": owner}]}).encode()]


def streamed(*chunks: str) -> Parts:
    return "", [f"data: {chunk}\n\n".encode() for chunk in (*chunks, "[DONE]")]


TEXT = '{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}'
GOOD = streamed(TEXT, '{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}')
FINE: dict[str, Parts] = {"/v1/models": listed(), "/metrics": ("", []), "/v1/chat": GOOD}


class FakeEngine(socketserver.ThreadingTCPServer):
    """Answers by the beginning of the path; bounded, whatever it is told to send."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answers: dict[str, Parts]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.sent, self.first_chat = {**FINE, **answers}, 0, threading.Lock()
        self.begun = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str) -> Parts:
        """A chat is answered oddly once, and well after that."""
        (key,) = (key for key in self.answers if path.startswith(key))
        odd = key != "/v1/chat" or self.first_chat.acquire(blocking=False)
        return self.answers[key] if odd else GOOD


class _Handler(socketserver.StreamRequestHandler):
    server: FakeEngine

    def handle(self) -> None:
        head = b""
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            head += line.lower()
        if b"content-length:" in head:
            self.rfile.read(int(head.partition(b"content-length:")[2].split()[0]))
        headers, body = self.server.answer(head.decode().split()[1])
        ends = time.monotonic() + MOST_S
        try:
            self.wfile.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n{headers}\r\n".encode())
            for part in body:
                self.wfile.write(part)
                self.server.sent += len(part)
                self.server.begun.set()
                if self.server.sent > MOST_SENT or time.monotonic() > ends:
                    return
        except OSError:
            pass


@contextmanager
def engine(**answers: Parts) -> Iterator[FakeEngine]:
    paths = {"models": "/v1/models", "metrics": "/metrics", "chat": "/v1/chat"}
    with FakeEngine({paths[name]: parts for name, parts in answers.items()}) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "TIMEOUT_S", 1.5)
    monkeypatch.setattr(client_module, "ANSWER_S", 1.5)


def connect(served: Served, function: str, values: list[Any]) -> list[Any]:
    """What a function of the Connect page yields; other pages have some of the same name."""
    with served.client() as client:
        config = client.get("/config").json()
    (url,) = (
        part["id"]
        for part in config["components"]
        if part["props"].get("elem_id") == "pg-connect-url"
    )
    names = [fn["api_name"] for fn in config["dependencies"] if fn["inputs"][:1] == [url]]
    return call(served, next(name for name in names if name.startswith(function)), values)


def meanwhile(served: Served, work: Callable[[], Any]) -> Any:
    """What `work` brings; while it goes on, the server answers others within a second."""
    with ThreadPoolExecutor(1) as thread, served.client() as client:
        doing = thread.submit(work)
        while not doing.done():
            watch = Watch()
            assert client.get("/v1/models").status_code == 200
            assert watch.took_s < 1
            time.sleep(0.02)
        return doing.result()


# ---- what freezes and fills


def drip(piece: bytes) -> Body:
    while True:
        yield piece
        time.sleep(0.1)


def sample(labels: str) -> Parts:
    return "", [f"vllm:num_requests_running{{{labels}}} 1\n".encode()]


LABELS = ",".join(f'l{i}="v"' for i in range(80_000))
BOMB = gzip.compress(b"a" * (40 << 20))
FLOOD = repeat(b"a" * 65536)
COUNTERS: dict[str, tuple[Parts, str]] = {
    "many labels": (sample(LABELS), "vLLM at"),
    "more labels than fit": (sample(LABELS * 2), "at most 1048576 bytes"),
    "backslashes": (sample('a="' + "\\\\" * 400_000 + '"'), "vLLM at"),
    "backslashes without an end": (sample('a="' + "\\" * 900_000), "text format"),
    "quotes": (sample('"' * 900_001), "text format"),
    "many samples": (("", [b"a 1\n" * 250_000]), "vLLM at"),
    "endless": (("", FLOOD), "at most 1048576 bytes"),
    "a gzip bomb": (("content-encoding: gzip\r\n", [BOMB]), "must not be encoded"),
    "a drip": (("", drip(b"a")), "did not answer within"),
    "a drip in the head": (("a: " + "b" * 10, drip(b"b")), "did not answer within"),
}


MODELS = {"endless": FLOOD, "lists without end": repeat(b"[" * 65536), "a drip": drip(b" ")}
READ = {case: ("metrics", *expected) for case, expected in COUNTERS.items()} | {
    f"models: {case}": ("models", ("", body), "must be at most") for case, body in MODELS.items()
}


@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("case", READ)
def test_nothing_that_is_read_freezes_or_fills_the_server(served: Served, case: str) -> None:
    what, parts, sentence = READ[case]
    with engine(**{what: parts}) as fake:
        shown = meanwhile(served, lambda: connect(served, "poll", [fake.url, "", ""])[-1])
    assert sentence in shown[0] or "did not answer within" in shown[0]
    assert "Something broke" not in shown[0] and fake.sent < 16 << 20


STREAMS: dict[str, tuple[Body, str]] = {
    "no line ends": (FLOOD, "a line of more than"),
    "lines without end": (repeat(b"data: {}\n" * 7000), "must be at most"),
    "blank lines without end": (repeat(b"\n" * 65536), "must be at most"),
    "a drip": (drip(f"data: {TEXT}\n\n".encode()), "did not answer within"),
}


@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("case", STREAMS)
def test_no_streamed_answer_freezes_or_fills_the_server(served: Served, case: str) -> None:
    body, sentence = STREAMS[case]
    with engine(chat=("", body)) as fake:
        form = [fake.url, "", "", "", "starter", 2, 16, "1", 60]
        shown = meanwhile(served, lambda: connect(served, "measure", form)[-1])
    assert "1 of 1 levels" in shown[0]
    assert sentence in shown[1] or "did not answer within" in shown[1]
    assert fake.sent < 16 << 20


# ---- what is odd

SPEC = '{"num_spec_steps": %s, "num_draft_tokens": 9, "num_accepted_draft_tokens": 3}'
ODD_CHUNKS = {
    "a number": "5",
    "a list": "[]",
    "deep": "[" * 20_000,
    "no list": '{"choices": 5}',
    "a list of texts": '{"choices": ["a"]}',
    "usage of NaN": '{"usage": {"completion_tokens": NaN}}',
    "usage of infinity": '{"usage": {"completion_tokens": 1e400}}',
    "usage of text": '{"usage": {"completion_tokens": "many"}}',
    "usage as a list": '{"usage": [1]}',
    "usage of 400 digits": '{"usage": {"completion_tokens": %s}}' % ("9" * 400),
    "usage over 2^53": '{"usage": {"completion_tokens": 9007199254740993}}',
    "usage below nothing": '{"usage": {"completion_tokens": -600000}}',
    "more than was asked for": '{"usage": {"completion_tokens": 5000}}',
    "half of the timings": '{"timings": {"draft_n": 9, "predicted_n": 9}}',
    "more accepted than drafted": '{"timings": {"draft_n": 9, "draft_n_accepted": 10}}',
    "no steps": '{"metrics": {"speculative_decoding": %s}}' % (SPEC % 0),
    "half a step": '{"metrics": {"speculative_decoding": %s}}' % (SPEC % 0.5),
    "a reason as a list": '{"choices": [{"finish_reason": ["stop"]}]}',
    "a content as a list": '{"choices": [{"delta": {"content": ["a"]}}]}',
    "half a surrogate pair": '{"choices": [{"delta": {"content": "\\ud800"}}]}',
    "an error as a list": '{"error": [[]]}',
}
LOAD = Load(
    [Item("s", str(i), "chat", "chat", ("Tea?",)) for i in range(3)], (1,), max_new_tokens=8
)


def visited(address: Address, load: Load = LOAD, log: RunLog | None = None) -> Report:
    async def last() -> Report:
        return [report async for report in measure(address, load, log)][-1]

    return asyncio.run(last())


@pytest.mark.parametrize("case", ODD_CHUNKS)
def test_an_odd_answer_is_a_failed_request_and_the_measurement_goes_on(
    case: str, log: RunLog
) -> None:
    with engine(chat=streamed(TEXT, ODD_CHUNKS[case])) as fake:
        report = visited(Address(fake.url), log=log)
    stored = [run.status for run in log.find().rows]
    (level,) = report.drafting
    assert level.num_failed == 1 and len(level.replies) == 2
    assert sorted(stored) == ["completed", "completed", "failed"]
    sentence = report.sentences()[-1]
    assert sentence.startswith("The engine ") and len(sentence) < 500


ODD_COUNTS: list[Any] = [float("nan"), float("inf"), -1, 2**53 + 1, "1", [], 10**400]
ODD_COUNTERS = {
    "vllm": [
        f"vllm:{name} {value}\n".encode()
        for name in ("num_requests_running", "spec_decode_num_drafts_total")
        for value in ("NaN", "+Inf", "1e400", "-1", "9007199254740994", "a", "9" * 400)
    ]
    + [b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="a"} 1\n', b"\xff", b"<html>"],
    "trtllm": [
        json.dumps([{"specDecodingStats": {"numDraftTokens": value}}]).encode()
        for value in ODD_COUNTS
    ]
    + [b"5", b"[5]", b"{}", b"[" * 100_000, b"[" + b"0," * 300_000 + b"0]"],
}
CASES = [(owner, body) for owner, bodies in ODD_COUNTERS.items() for body in bodies]


@pytest.mark.parametrize(("name", "body"), CASES, ids=[f"{o} {b[-40:]!r}" for o, b in CASES])
def test_odd_counters_are_refused_in_one_sentence(name: str, body: bytes) -> None:
    one = next(one for one in ENGINES if one.name == name)
    with pytest.raises(ConfigError, match="/metrics") as refused:
        one.read(body)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_an_engine_that_hangs_up_and_odd_counters_do_not_end_a_measurement() -> None:
    odd = ("", [b"vllm:num_requests_running NaN\n"])
    with engine(chat=("content-length: 9999\r\n", streamed(TEXT)[1]), metrics=odd) as fake:
        report = visited(Address(fake.url))
    (level,) = report.drafting
    assert level.num_failed == 1 and level.counters is None
    assert "hung up" in report.sentences()[-1]


@pytest.mark.parametrize(
    "parts",
    [
        {"models": ("", [b"5"])},
        {"models": ("", [b"[" * 100_000])},
        {"models": ("", [b'{"data": [{"id": 5}]}'])},
        {"models": ("", [b"\xff\xfe"])},
        {"metrics": ("", [b"vllm:num_requests_running NaN\n"])},
        {"metrics": ("", [b"vllm:num_requests_running -1\n"])},
    ],
    ids=range(6),
)
def test_an_odd_engine_is_a_sentence_on_the_page_and_on_the_terminal(
    served: Served, parts: dict[str, Parts]
) -> None:
    with engine(**parts) as fake:
        shown = connect(served, "poll", [fake.url, "", ""])[-1]
        said = refused("connect", fake.url, "--readings", "1", "--every", "0.1")
    assert "must" in shown[0] or "valid JSON" in shown[0] or "nests deeper" in shown[0]
    assert "must" in said or "valid JSON" in said or "nests deeper" in said


ODD_URLS = "ftp://x http:// http://a:b@c http://[ http://a:99999 http://a\0b http://a:0".split(" ")
ODD_ADDRESSES = [*((url, "") for url in ("", "http://\u202e", *ODD_URLS))]
ODD_ADDRESSES += [("http://a", key) for key in ("é", "a\nb", "\ud800")]


@pytest.mark.parametrize(("url", "key"), ODD_ADDRESSES, ids=ascii)
def test_odd_addresses_and_keys_are_refused(url: str, key: str) -> None:
    with pytest.raises(ConfigError, match=r"^The (address|API key) must be"):
        Client.at(url, key)


def test_names_of_an_engine_are_shown_on_a_terminal_not_obeyed(tmp_path: Path) -> None:
    name, error = "\x1b[2J\x1b]0;owned\x07\x9b31m", '{"error": "\\u001b[2J"}'
    with engine(models=listed(name), chat=streamed(error)) as fake:
        watched = invoke("connect", fake.url, "--readings", "1").output
        line = ("connect", fake.url, "--replay", "--prompts", 1, "--concurrency", 1)
        measured = invoke(*line, "--db", tmp_path / "log.db").output
    assert r"\x1b[2J\x1b]0;owned\x07\x9b31m" in watched
    assert "gave up" in measured
    for text in (watched, measured):
        assert not any(sign in text for sign in "\x1b\x07\x9b")
