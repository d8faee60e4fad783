"""Tokenizers of strangers: what panics or multiplies a text ends one request, and nothing else."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from engine.errors import PromptError, SourceError
from engine.model.sources import TargetSpec
from engine.model.tokenizer import GROWTH, MAX_CHARS, check_tokenizer, encode
from playground.host.catalog import Catalog
from playground.host.live import LiveRun
from tests.hostile.watch import MOST_S, Watch
from tests.playground.asks import finished, until
from tests.playground.serving import Served, serving_tiny
from tests.playground.tiny import save_tiny_llama

pytestmark = pytest.mark.slow

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
    """A sound target; one whose tokenizer panics; one that without bounds ends this process."""
    folder = tmp_path_factory.mktemp("tokenizers")
    many = [replace("a", "a" * 1000)] * 4
    bad = {
        "panics": changed(folder / "panics", pre_tokenizer=SLOW_SPLIT),
        "multiplies": changed(folder / "many", normalizer=sequence("normalizers", many)),
    }
    targets = {name: TargetSpec(name=name, title=name, path=str(at)) for name, at in bad.items()}

    def with_bad(tiny: Catalog) -> Catalog:
        return dataclasses.replace(tiny, targets={**tiny.targets, **targets})

    with serving_tiny(folder, adapt=with_bad) as served:
        yield served


def ask(served: Served, model: str, prompt: str) -> httpx.Response:
    body = {"model": f"{model}:plain", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("model", ["panics", "multiplies"])
def test_a_tokenizer_that_breaks_ends_its_request_and_no_other(served: Served, model: str) -> None:
    answer = ask(served, model, PANIC_TEXT)
    assert answer.status_code == 400
    assert "tokenizer" in answer.json()["error"]["message"]
    until(lambda: served.host.occupancy == (0, 0))
    assert ask(served, "panics", "b").status_code == 200
    assert ask(served, "tiny", PANIC_TEXT).status_code == 200
    watch = Watch()
    assert httpx.get(f"{served.url}/v1/models").status_code == 200
    assert watch.took_s < MOST_S


class Halt(BaseException):
    """No `Exception`, as a panic of a library is none."""


@pytest.mark.parametrize("error", [Halt, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_ends_a_run_leaves_the_engine_s_thread(
    served: Served, error: type[BaseException]
) -> None:
    def work(run: LiveRun) -> None:
        raise error

    run = served.host.submit(work, owner="halt")
    assert finished(run).state == "failed" and run.error
    assert ask(served, "tiny", "b").status_code == 200


# ---- bounds


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


def test_templates_and_decoders_that_multiply_are_refused(tmp_path: Path) -> None:
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
    decoder = sequence("decoders", [replace("a", "a" * 1000)] * 4)
    tokenizer = AutoTokenizer.from_pretrained(changed(tmp_path / "d", decoder=decoder))
    with pytest.raises(SourceError, match="characters of one"):
        check_tokenizer(tokenizer, "d")
    check_tokenizer(AutoTokenizer.from_pretrained(save_tiny_llama(tmp_path / "sound")), "sound")
