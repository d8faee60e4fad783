"""Tokenizers of strangers: what panics or multiplies a text ends one request, and nothing else."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from engine.errors import PromptError, SourceError
from engine.model.sources import TargetSpec
from engine.model.tokenizer import GROWTH, MAX_CHARS, check_tokenizer, decode, encode
from playground.host.live import LiveRun
from storage import RunLog
from tests.playground.serving import Served, serving
from tests.playground.tiny import save_tiny_llama, tiny_catalog

pytestmark = pytest.mark.slow

SOON_S = 10.0
SLOW_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
PANIC_TEXT = "a" * 40 + "b"


def replace(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def precompiled(by: str) -> dict[str, Any]:
    """SentencePiece's table that replaces `a`: a double-array trie of one key, then the text."""
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ ord("a")] = ord("a") | 1 << 8 | 3 << 10  # a leaf, whose value is 3 units away
    trie = struct.pack("<512I", *units)
    table = struct.pack("<I", len(trie)) + trie + by.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def sequence(kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def changed(folder: Path, **parts: Any) -> Path:
    """A model's folder with parts of its tokenizer.json replaced."""
    file = save_tiny_llama(folder) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A sound target, one whose tokenizer panics, one whose tokenizer multiplies."""
    folder = tmp_path_factory.mktemp("tokenizers")
    catalog = tiny_catalog(save_tiny_llama(folder / "tiny"))
    many = [replace("a", "a" * 1000)] * 4
    bad = {
        "panics": changed(folder / "panics", pre_tokenizer=SLOW_SPLIT),
        "multiplies": changed(folder / "many", normalizer=sequence("normalizers", many)),
    }
    targets = {name: TargetSpec(name=name, title=name, path=str(at)) for name, at in bad.items()}
    catalog = dataclasses.replace(catalog, targets={**catalog.targets, **targets})
    with (
        RunLog.open(str(folder / "runs.db")) as log,
        serving(catalog, log, folder / "cache") as served,
    ):
        yield served


def ask(served: Served, model: str, prompt: str) -> httpx.Response:
    body = {"model": f"{model}:plain", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("model", ["panics", "multiplies"])
def test_a_tokenizer_that_breaks_ends_its_request_and_no_other(served: Served, model: str) -> None:
    answer = ask(served, model, PANIC_TEXT)
    assert answer.status_code == 400
    assert "tokenizer" in answer.json()["error"]["message"]
    assert served.host.occupancy == (0, 0)
    assert ask(served, model, "b").status_code == 200
    assert ask(served, "tiny", PANIC_TEXT).status_code == 200
    began = time.monotonic()
    assert httpx.get(f"{served.url}/v1/models").status_code == 200
    assert time.monotonic() - began < SOON_S


class Halt(BaseException):
    """No `Exception`, as a panic of a library is none."""


@pytest.mark.parametrize("error", [Halt, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_ends_a_run_leaves_the_engine_s_thread(
    served: Served, error: type[BaseException]
) -> None:
    def work(run: LiveRun) -> None:
        raise error

    run = served.host.submit(work, owner="halt")
    assert run.over.wait(10) and run.state == "failed" and run.error
    assert ask(served, "tiny", "b").status_code == 200


# ---- bounds


def test_normalizers_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    """In a process of its own: without the bound it aborts."""
    many = sequence("normalizers", [replace("a", "a" * 1000)] * 4)
    folder = changed(tmp_path / "many", normalizer=many)
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        "from engine.errors import PromptError; from engine.model.tokenizer import encode\n"
        "try: encode(AutoTokenizer.from_pretrained(sys.argv[1]), 'a')\n"
        "except PromptError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0 and "characters of this text" in ran.stdout, ran.stderr[-500:]


def test_growth_is_measured_where_the_bound_is_far_from_what_happens(tmp_path: Path) -> None:
    """Stages that could multiply, but do not at this text."""
    parts = [replace(letter, letter * 1000) for letter in "xyz"]
    folder = changed(tmp_path / "some", normalizer=sequence("normalizers", parts))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert decode(tokenizer, encode(tokenizer, "abc")) == "abc"
    assert len(encode(tokenizer, "x")) == 1000
    with pytest.raises(PromptError, match="Shorten it"):
        encode(tokenizer, "x" * (MAX_CHARS // 1000 + 1))


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 2000},
        sequence("normalizers", [sequence("normalizers", [replace("a", "aa")] * 12)] * 2),
        {"type": "Prepend", "prepend": "a" * (MAX_CHARS + 1)},
        precompiled("a" * 2000),
    ],
    ids=["what matches nothing", "nested", "put before", "SentencePiece"],
)
def test_every_way_to_multiply_is_bounded(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(changed(tmp_path / "m", normalizer=normalizer))
    with pytest.raises(PromptError, match="characters of this text"):
        encode(tokenizer, "a" * 5000)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_unicode_forms_grow_no_more_than_they_are_said_to(tmp_path: Path, form: str) -> None:
    """The longest prompt of a page is read under any of them."""
    tokenizer = AutoTokenizer.from_pretrained(changed(tmp_path / "form", normalizer={"type": form}))
    assert encode(tokenizer, "a" * 400_000)
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    characters = (chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000)
    assert max(len(normalize(one)) for one in characters) <= GROWTH.get(form, 18)


def test_a_template_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [text] * 2,
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    processor = sequence("processors", [template] * 2)
    tokenizer = AutoTokenizer.from_pretrained(changed(tmp_path / "t", post_processor=processor))
    with pytest.raises(SourceError, match="repeats the text"):
        check_tokenizer(tokenizer, "t")


def test_a_decoder_that_multiplies_is_refused(tmp_path: Path) -> None:
    decoder = sequence("decoders", [replace("a", "a" * 1000)] * 4)
    tokenizer = AutoTokenizer.from_pretrained(changed(tmp_path / "d", decoder=decoder))
    with pytest.raises(SourceError, match="characters of one"):
        check_tokenizer(tokenizer, "d")
    sound = AutoTokenizer.from_pretrained(save_tiny_llama(tmp_path / "sound"))
    check_tokenizer(sound, "sound")
    assert decode(sound, encode(sound, "abc")) == "abc"
