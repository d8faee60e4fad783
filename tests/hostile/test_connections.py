"""Connections that send slowly, too much at once, or two requests as one; loopback only."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from playground.web import security
from tests.playground.serving import Served

pytestmark = pytest.mark.slow

SOON_S = 5.0
FEW = 8
COMPLETIONS = "/v1/completions"
UPLOAD = "/gradio_api/upload"


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=10)


def head(path: str, *fields: str) -> bytes:
    kind = "multipart/form-data; boundary=x" if path == UPLOAD else "application/json"
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-type: {kind}", *fields, "", ""]
    return "\r\n".join(lines).encode()


def slow_body(served: Served, path: str = COMPLETIONS) -> socket.socket:
    """A request whose body has begun."""
    connection = connected(served)
    connection.sendall(head(path, "content-length: 1000000") + b'{"prompt"')
    return connection


def received(connection: socket.socket) -> bytes:
    """Everything until the server hangs up."""
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    return answer


def answers_soon(served: Served) -> None:
    """Every request is answered; the fastest of three in seconds, also on a busy machine."""
    took_s = []
    for _ in range(3):
        began = time.monotonic()
        assert httpx.get(f"{served.url}/v1/models").status_code == 200
        took_s.append(time.monotonic() - began)
    with served.client() as client:
        assert client.get("/config").status_code == 200
    assert min(took_s) < SOON_S


def test_slow_bodies_lock_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MAX_CONNECTIONS", FEW)
    with ExitStack() as stack:
        for _ in range(3 * FEW):
            stack.enter_context(slow_body(served))
        answers_soon(served)


def test_the_token_is_asked_for_before_the_body(served: Served) -> None:
    with slow_body(served, UPLOAD) as connection:
        answer = received(connection)  # which also says that the server hangs up
    assert b" 401 " in answer.splitlines()[0]


SECOND = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 2}'
TWO_LENGTHS = [
    ("content-length: 4", "transfer-encoding: chunked"),
    ("transfer-encoding: chunked", f"content-length: {len(BODY)}"),
    ("Content-Length: 0", "Transfer-Encoding: CHUNKED"),
    ("content-length: 4", "content-length: 5"),
    ("transfer-encoding: identity", "content-length: 4"),
    ("transfer-encoding: chunked, chunked",),
]


@pytest.mark.parametrize("fields", TWO_LENGTHS, ids="; ".join)
@pytest.mark.parametrize("body", [b"", BODY], ids=["empty", "whole"])
def test_a_request_of_two_lengths_is_refused_and_nothing_behind_it_served(
    served: Served, fields: tuple[str, ...], body: bytes
) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    with connected(served) as connection:
        connection.sendall(head(COMPLETIONS, *fields) + chunks + SECOND)
        answer = received(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))


def test_a_body_that_is_cut_off_runs_nothing(served: Served) -> None:
    """What came of it is whole JSON by itself."""
    before = served.log.find().total
    with connected(served) as connection:
        connection.sendall(head(COMPLETIONS, f"content-length: {len(BODY) + 5}") + BODY)
    answers_soon(served)
    answer = httpx.post(f"{served.url}{COMPLETIONS}", content=BODY)
    assert answer.status_code == 200
    assert served.log.find().total == before + 1
