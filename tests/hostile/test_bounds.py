"""How much may come in, how long it may take, and what a terminal is told: bounds that hold."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, TreeError
from playground.deploy import triton
from playground.deploy.trees import parse_tree, read_growmap_file
from playground.runs.query import read_filters
from playground.runs.transfer import HEAD, TAIL, import_runs, read_lines, run_line
from playground.web import security
from playground.web.access import MAX_BODY_BYTES, MAX_UPLOAD_BYTES
from storage import RunLog
from tests.hostile.test_texts import refusal
from tests.hostile.watch import Watch, shared_lists
from tests.playground.serving import Served
from tests.storage.conftest import finished_run

pytestmark = pytest.mark.slow

API = "/gradio_api"
CALL = f"{API}/component_server"


# ---- bodies


def in_chunks(size: int) -> Iterator[bytes]:
    """A body of JSON that does not say how long it is."""
    yield b'{"data": "'
    for _ in range(size // 65536):
        yield b"a" * 65536
    yield b'"}'


@pytest.mark.parametrize("path", [CALL, f"{API}/queue/join", f"{API}/run/predict"])
def test_a_body_is_counted_while_it_comes(served: Served, path: str) -> None:
    with served.client(headers={"content-type": "application/json"}) as client:
        answer = client.post(path, content=in_chunks(2 * MAX_BODY_BYTES))
        assert answer.status_code in (400, 413)
        assert client.get("/config").status_code == 200


def test_an_upload_is_counted_too(served: Served) -> None:
    with served.client() as client:
        large = client.post(f"{API}/upload", files={"files": ("a", b"a" * (MAX_UPLOAD_BYTES + 1))})
        assert large.status_code == 413
        assert client.post(f"{API}/upload", files={"files": ("a", b"a")}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"data": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"data": "\\ud800"}',
        b'{"data": ' + b"1" * 5000 + b"}",
        b"{",
        b"\xff",
        "[]".encode("utf-16"),
    ],
)
def test_a_body_that_is_no_plain_json_is_refused(served: Served, body: bytes) -> None:
    with served.client(headers={"content-type": "application/json"}) as client:
        answer = client.post(CALL, content=body)
    assert 400 <= answer.status_code < 500
    assert "\n" not in answer.text


def test_connections_beyond_the_limit_are_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    monkeypatch.setattr(security, "MAX_CONNECTIONS", 0)
    with socket.create_connection(place, timeout=10) as refused:
        with pytest.raises(ConnectionResetError):
            assert refused.recv(1) == b""
            raise ConnectionResetError
    monkeypatch.undo()
    with served.client() as client:
        assert client.get("/config").status_code == 200


# ---- files


def zipped(**files: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, payload in files.items():
            archive.writestr(f"map/{name}.pkl", payload)
    return stream.getvalue()


def wide() -> dict[str, Any]:
    """1,600 bytes that were 3 GB as lists."""
    return {"Successors": [[1], []], "mask": torch.zeros(1).expand(20_000, 20_000)}


GROWMAPS = {
    "no archive": b"no archive",
    "empty": b"",
    "no pickle": zipped(other=b"a"),
    "empty pickle": zipped(data=b""),
    "cut pickle": zipped(data=pickle.dumps({"Successors": [[1], []]})[:-8]),
    "bomb": zipped(data=b"\x80\x02" + b"(" * 50_000_000),
    "memo": zipped(data=b"\x80\x02]r\xff\xff\xff\x7f."),
    "long text": zipped(data=b"\x80\x04\x8d" + b"\xff" * 8),
    "shared lists": zipped(data=pickle.dumps({"Successors": shared_lists()})),
    "a long number": zipped(data=pickle.dumps({"Successors": [[1], []], "size": 1 << 90_000})),
    "code": zipped(data=b"cos\nsystem\n(S'id'\ntR."),
    "a function of torch": zipped(data=b"ctorch\nload\n(S'/etc/passwd'\ntR."),
    "many branches": zipped(data=pickle.dumps({"branches": [[10**9]]})),
    "no mapping": zipped(data=pickle.dumps([1])),
}


@pytest.mark.parametrize("case", GROWMAPS)
def test_a_hostile_growmap_is_refused_soon(tmp_path: Path, case: str) -> None:
    (tmp_path / "map.pt").write_bytes(GROWMAPS[case])
    sentence = refusal(lambda: read_growmap_file(tmp_path / "map.pt"))
    assert "map.pt" in sentence or "rowmap" in sentence


def test_unneeded_parts_of_a_growmap_are_not_built(tmp_path: Path) -> None:
    torch.save(wide(), tmp_path / "map.pt")
    watch = Watch()
    assert len(read_growmap_file(tmp_path / "map.pt")) == 1
    assert watch.took_s < 1


SPACES = " " * 60_000


@pytest.mark.parametrize(
    "text",
    [
        "parameters" + SPACES,
        'key: "medusa_choices"' + SPACES,
        'parameters { key: "medusa_choices" value' + SPACES,
        'parameters { key: "medusa_choices" value: { string_value' + SPACES,
        "a" + SPACES,
        SPACES + "a",
        "# a\n" * 40_000,
        "[" * 100_000,
        "[[" + "0," * 60_000 + "0]]",
        "[" + ",".join(f"[{', '.join(['0'] * n)}]" for n in range(1, 600)) + "]",
        "choices:\n" + "- - " * 30_000,
        '{"Successors": [' + "[]," * 60_000 + "[]]}",
        '{"Successors": ' + "[" * 60_000,
    ],
    ids=lambda text: text[:24].strip() or "blanks",
)
def test_long_texts_are_trees_or_sentences_soon(text: str) -> None:
    watch = Watch()
    with contextlib.suppress(ConfigError):
        triton.ENGINE.parse(text, lambda text: None)
    with pytest.raises(TreeError):
        parse_tree(text)
        raise TreeError("It is one.")
    assert watch.took_s < 2


@pytest.mark.parametrize("text", ["a" + SPACES, "a" + SPACES + "b = ", SPACES], ids=len)
def test_long_filters_are_refused_soon(text: str) -> None:
    assert "filter must be like" in refusal(lambda: read_filters([text]))


def test_damaged_and_swollen_exports_are_refused(log: RunLog, tmp_path: Path) -> None:
    whole = log.read_whole(finished_run(log))
    assert whole is not None
    line = run_line(whole)
    good = gzip.compress((HEAD + line + TAIL).encode())
    odd = json.loads(line)
    cases = {
        "cut": good[:-20],
        "flipped": good[:40] + bytes([good[40] ^ 255]) + good[41:],
        "no gzip": b"\x1f\x8bno",
        "bomb": gzip.compress(b"a" * (200 << 20)),
        "blank lines": gzip.compress(HEAD.encode() + b"\n" * (200 << 20)),
        "one long line": gzip.compress(HEAD.encode() + b'"' + b" " * (100 << 20)),
        "reformatted bomb": gzip.compress(b"{\n" + b" \n" * (50 << 20)),
        "deep": (HEAD + "[" * 100_000).encode(),
        "latin": HEAD.encode() + b"\xe9\n",
        "half a pair": (HEAD + line.replace('"abdbd"', '"\\ud800"') + TAIL).encode(),
        "year 1": (HEAD + json.dumps(odd | {"created_at": "0001-01-01T00:00:00Z"})).encode(),
        "year 9999": (HEAD + json.dumps(odd | {"created_at": "9999-12-31T00:00:00Z"})).encode(),
        "odd float": (HEAD + json.dumps(odd | {"mat": {"$float": []}})).encode(),
        "odd float of text": (HEAD + json.dumps(odd | {"mat": {"$float": "1_0"}})).encode(),
        "no floats": (HEAD + json.dumps(odd | {"tok_s": 10**30})).encode(),
    }
    for name, payload in cases.items():
        file = tmp_path / f"{name}.json.gz"
        file.write_bytes(payload)
        refusal(lambda file=file: list(import_runs(log, read_lines(file))))  # type: ignore[misc]
    missing = refusal(lambda: list(read_lines(tmp_path)))
    assert str(tmp_path.name) in missing
