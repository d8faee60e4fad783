"""Tokenizers of GGUF files give llama.cpp's ids.

`peer_ids.json` and `peer_splits.json` were recorded from llama.cpp 11434: its ids of `TEXTS`, the
tokens that end a text, and the lengths of the pieces that each `tokenizer.ggml.pre` makes of a
text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import PreTrainedTokenizerBase

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.pre import PATTERNS
from engine.model.gguf.tokenizer import (
    HARMLESS,
    HONOURED,
    TEMPLATE,
    end_ids,
    read_tokenizer,
    tokenizer_remark,
    write_tokenizer,
)
from engine.model.text import Detokenizer
from engine.model.tokenizer import decode, encode
from tests.engine.gguf.vocabularies import KINDS, TEXTS, byte_pairs, sentencepiece

HERE = Path(__file__).parent
PEER_IDS = json.loads((HERE / "peer_ids.json").read_text(encoding="utf-8"))
PEER_SPLITS = json.loads((HERE / "peer_splits.json").read_text(encoding="utf-8"))
SEPARATOR = "\n__ggml_vocab_test__\n"
DECODERS = (
    "command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 "
    "qwen2 qwen35 refact starcoder"
).split()
"""Vocabularies of decoders in llama.cpp's source, with texts and ids."""


class VocabularyFile(GGUFFile):
    """A file without a model, which `GGUFFile` refuses."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes, self._files, self.entries = path, 0, [], {}
        self.metadata, self._lists, self._header = self._read(path)


def rebuilt(file: GGUFFile, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir(exist_ok=True)
    write_tokenizer(file, folder)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def peer_models() -> Path:
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP is not set to the folder of llama.cpp's source")
    return Path(os.environ["LLAMA_CPP"]) / "models"


@pytest.mark.parametrize("name", DECODERS)
def test_all_texts_of_a_vocabulary_get_llama_cpps_ids(
    name: str, peer_models: Path, tmp_path: Path
) -> None:
    path = peer_models / f"ggml-vocab-{name}.gguf"
    tokenizer = rebuilt(VocabularyFile(path), tmp_path)
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(token_id) for token_id in line.split()] for line in lines]
    ids = [encode(tokenizer, text) for text in texts]
    assert len(texts) >= 46 and ids == expected[: len(texts)]
    assert [decode(tokenizer, one) for one in ids] == texts


@pytest.mark.parametrize("name", ["aquila", "baichuan", "gpt-neox"])
def test_vocabularies_without_recorded_ids_load(
    name: str, peer_models: Path, tmp_path: Path
) -> None:
    file = VocabularyFile(peer_models / f"ggml-vocab-{name}.gguf")
    tokenizer = rebuilt(file, tmp_path)
    assert decode(tokenizer, encode(tokenizer, "Hello, Größe 中文\n\n  x")) == (
        "Hello, Größe 中文\n\n  x"
    )
    assert bool(tokenizer_remark(file)) == (name != "baichuan"), "they do not name a splitting"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_vocabulary_gets_llama_cpps_ids(kind: str, tmp_path: Path) -> None:
    write, fields = KINDS[kind]
    tokenizer = rebuilt(write(tmp_path / "some.gguf", **fields), tmp_path / "tokenizer")
    ids = [encode(tokenizer, text, add_special_tokens=True) for text in TEXTS]
    assert ids == PEER_IDS[kind]["ids"]
    assert end_ids(tmp_path / "tokenizer") == PEER_IDS[kind]["ends"]


@pytest.mark.parametrize("kind", ["gpt2", "llama-bpe", "llama", "llama, no space", "gemma4"])
def test_texts_are_what_their_tokens_say(kind: str, tmp_path: Path) -> None:
    write, fields = KINDS[kind]
    tokenizer = rebuilt(write(tmp_path / "some.gguf", **fields), tmp_path / "tokenizer")
    for text in TEXTS:
        if "<" in text:
            continue  # SentencePiece adds a space after a control token
        ids = encode(tokenizer, text)
        detokenizer = Detokenizer(tokenizer, skip_special=False)
        streamed = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert decode(tokenizer, ids) == streamed == text


def test_every_name_of_a_splitting_splits_as_llama_cpp(tmp_path: Path) -> None:
    text, recorded = PEER_SPLITS["text"], PEER_SPLITS["lengths"]
    assert sorted(PATTERNS) == sorted(" ".join(recorded).split())
    lengths_by_pattern: dict[tuple[str, ...], list[int]] = {}
    for names, lengths in recorded.items():
        for pre in names.split():
            patterns = PATTERNS[pre]
            if patterns not in lengths_by_pattern:
                file = byte_pairs(tmp_path / "some.gguf", pre=pre)
                tokenizer: Any = rebuilt(file, tmp_path / "tokenizer")
                pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
                lengths_by_pattern[patterns] = [end - begin for _, (begin, end) in pieces]
            assert lengths_by_pattern[patterns] == lengths, pre


def test_control_tokens_of_deepseek_r1_distill_are_in_the_vocabulary(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path / "some.gguf", pre="deepseek-r1-qwen", add_bos_token=True)
    tokenizer = rebuilt(file, tmp_path / "tokenizer")
    tokens = file.array("tokenizer.ggml.tokens")
    ids = encode(tokenizer, "<｜User｜>hello", add_special_tokens=True)
    assert [tokens[i] for i in ids] == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "hello"]
    assert tokenizer.bos_token_id == tokens.index("<｜begin▁of▁sentence｜>") < len(tokens)
    assert len(tokenizer) == len(tokens)
    assert decode(tokenizer, ids, skip_special=True) == "hello"


def test_llama_3s_splitting_adds_bos_and_prefers_whole_tokens(tmp_path: Path) -> None:
    for pre, is_llama in (("llama-bpe", True), ("dbrx", False)):
        file = byte_pairs(tmp_path / "some.gguf", pre=pre)
        tokenizer = rebuilt(file, tmp_path / "tokenizer")
        tokens = file.array("tokenizer.ggml.tokens")
        ids = encode(tokenizer, "toolthe", add_special_tokens=True)
        assert (tokens.index("toolthe") in ids) == (tokenizer.bos_token_id in ids) == is_llama
        assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokens.index("<|endoftext|>")


def test_a_plain_token_stays_text_though_a_field_names_it(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path / "some.gguf", padding_token_id=0)
    tokenizer = rebuilt(file, tmp_path / "tokenizer")
    ids = encode(tokenizer, "a!")
    assert tokenizer.pad_token is None and decode(tokenizer, ids, skip_special=True) == "a!"


def test_letters_that_stand_for_bytes_of_no_text_are_decoded_as_letters(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path / "some.gguf")
    types = [4 if t == "ü" else kind for t, kind in zip(*_tokens_and_types(file), strict=True)]
    array = file.array
    file.array = lambda name: types if name.endswith("token_type") else array(name)  # type: ignore[method-assign]
    tokenizer = rebuilt(file, tmp_path / "tokenizer")
    assert decode(tokenizer, encode(tokenizer, "für ü")) == "für ü"


def _tokens_and_types(file: GGUFFile) -> tuple[list[str], list[int]]:
    return file.array("tokenizer.ggml.tokens"), file.array("tokenizer.ggml.token_type")


def test_bytes_are_streamed_as_characters(tmp_path: Path) -> None:
    tokenizer = rebuilt(sentencepiece(tmp_path / "some.gguf"), tmp_path / "tokenizer")
    tokens = [f"<0x{byte:02X}>" for byte in "🙂".encode()]
    ids = [tokenizer.get_vocab()[token] for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "🙂"]


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    fields = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = rebuilt(byte_pairs(tmp_path / "some.gguf", **fields), tmp_path / "tokenizer")
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}
    turns = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "plain"


def test_every_field_of_the_format_is_honoured_or_harmless() -> None:
    fields = {value for name, value in vars(gguf.Keys.Tokenizer).items() if name.isupper()}
    templates = {TEMPLATE, f"{TEMPLATE}.{{name}}"}
    assert fields - templates <= HONOURED | HARMLESS
    assert not HONOURED & HARMLESS


def test_what_may_differ_from_the_model_is_remarked(tmp_path: Path) -> None:
    def remark(**fields: Any) -> str:
        return tokenizer_remark(byte_pairs(tmp_path / "some.gguf", **fields))

    assert remark() == "" and "does not say how its tokenizer splits" in remark(pre=None)
    assert "asks that 2 tokens are never chosen" in remark(suppress_tokens=[3, 4])


@pytest.mark.parametrize(
    ("write", "fields", "reason"),
    [
        (byte_pairs, {"pre": "new-one"}, r"unknown here \(tokenizer.ggml.pre = 'new-one'\)"),
        (byte_pairs, {"model": "rwkv"}, "cannot be rebuilt; it is RWKV's search"),
        (byte_pairs, {"model": "new"}, "cannot be rebuilt; it is unknown here"),
        (
            byte_pairs,
            {"eos_token_id": 999},
            "eos_token_id is 999, but its tokens have the ids 0 to",
        ),
        (byte_pairs, {"add_bos_token": "yes"}, "add_bos_token must be true or false, not 'yes'"),
        (byte_pairs, {"splits_backwards": True}, "has the field tokenizer.ggml.splits_backwards"),
        (byte_pairs, {"model": "t5", "scores": ["a"]}, "tokenizer.ggml.scores must not hold 'a'"),
        (byte_pairs, {"model": "t5", "scores": [0.5]}, "must be a number per token"),
        (sentencepiece, {"model": "gpt2"}, "its tokenizer has no merges"),
        (byte_pairs, {"model": "t5", "precompiled_charsmap": [9, 0, 0]}, "charsmap is damaged"),
    ],
)
def test_a_tokenizer_that_would_be_wrong_is_refused(
    write: Callable[..., GGUFFile], fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=reason):
        write_tokenizer(write(tmp_path / "some.gguf", **fields), tmp_path)


def test_ids_of_minus_one_name_no_token(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path / "some.gguf", padding_token_id=0xFFFFFFFF)
    assert rebuilt(file, tmp_path / "tokenizer").pad_token is None


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path / "some.gguf", model="no_vocab")
    write_tokenizer(file, tmp_path)
    assert read_tokenizer(tmp_path) is None and end_ids(tmp_path) == []
