"""Tiny vocabularies of every kind that is rebuilt, as GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.model.gguf.file import GGUFFile
from tests.engine.cpu.tiny_gguf import finish

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WORDS = ("Ġthe", "Ġhello", "hello", "ĠGrÃ¶ÃŁe", "ĊĊ", "ĠĠĠĠ", "123", "'ll", "camel", "Case")
PIECES = ("▁the", "▁hello", "hello", "▁▁▁▁", "▁Größe", "aaaa", "123", "'ll", "\n\n")
TEXTS = (
    "", " ", "  ", "hello", " hello", "  hello the the\n\n\nthe", "Größe für 🙂👩\u200d👧 中文 ñ",
    "aaaaaaa aaa", "the 12345 123", "I'll camelCase", " " * 11 + "x", "\t \t",
    "<|im_start|>user\nhello<|im_end|>\n", "<s>hello</s> the", "a tool<tool>the tool",
    "<0x41> <unused> e\u0301",
)  # fmt: skip


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write_vocabulary(
    path: Path, tokens: Mapping[str, int], fields: Mapping[str, Any], pieces: Mapping[str, Any]
) -> GGUFFile:
    """A file with one tensor and this vocabulary.

    Args:
        tokens: with their types.
        fields: of `tokenizer.ggml.`, and others by their whole name; None = left out.
        pieces: `merges` or `scores`.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    if "merges" in pieces:
        writer.add_token_merges(pieces["merges"])
    if "scores" in pieces:
        writer.add_token_scores(pieces["scores"])
    for name, value in fields.items():
        whole = name if "." in name else f"tokenizer.ggml.{name}"
        add: Mapping[type, Any] = {
            bool: writer.add_bool,
            str: writer.add_string,
            int: writer.add_uint32,
        }
        if isinstance(value, list):
            writer.add_array(whole, value)
        elif value is not None:
            add[type(value)](whole, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    finish(writer)
    return GGUFFile(path)


def byte_pairs(path: Path, **fields: Any) -> GGUFFile:
    """A byte-pair encoding like GPT-2's, with control, user-defined and unused tokens."""
    tokens, merges = dict.fromkeys(byte_alphabet(), NORMAL), []
    for word in WORDS:
        for cut in range(1, len(word)):
            tokens.setdefault(word[: cut + 1], NORMAL)
            merges.append(f"{word[:cut]} {word[cut]}")
    tokens["Ġhe"] = NORMAL
    tokens["toolthe"] = NORMAL  # no merges make it
    tokens |= {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": NORMAL}
    tokens |= {"<tool>": USER_DEFINED, "<unused>": UNUSED, "<｜begin▁of▁sentence｜>": CONTROL}
    tokens |= {"<｜User｜>": CONTROL, "<｜end▁of▁sentence｜>": CONTROL}
    ids = {token: i for i, token in enumerate(tokens)}
    usual = {"model": "gpt2", "pre": "gpt-2", "eos_token_id": ids["<|endoftext|>"]}
    usual["bos_token_id"] = ids["<｜begin▁of▁sentence｜>"]
    return write_vocabulary(path, tokens, usual | fields, {"merges": list(dict.fromkeys(merges))})


def sentencepiece(path: Path, **fields: Any) -> GGUFFile:
    """SentencePiece with scores, bytes, and four spaces of the same score as two."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    scores = [0.0] * len(tokens)
    for score, piece in enumerate((*PIECES, *sorted(set("".join(PIECES))))):
        for end in range(1, len(piece) + 1):
            if piece[:end] not in tokens:
                tokens[piece[:end]] = NORMAL
                scores.append(-1e9 if piece[0] == "▁" == piece[end - 1] else -float(score))
    tokens |= {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED}
    tokens["<|endoftext|>"] = CONTROL
    scores += [-1000.0] * 4
    return write_vocabulary(path, tokens, {"model": "llama"} | fields, {"scores": scores})


def raw_byte_pairs(path: Path, **fields: Any) -> GGUFFile:
    """Gemma 4's encoding: merges of characters, bytes for others, lines by themselves."""
    tokens = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    merges = []
    for piece in (*PIECES, *sorted(set("".join(PIECES)))):
        for end in range(1, len(piece) + 1):
            tokens.setdefault(piece[:end], NORMAL)
            if end > 1:
                merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
    tokens |= {"<turn|>": CONTROL, "<|tool_response>": USER_DEFINED, "</s>": NORMAL}
    usual = {"model": "gemma4", "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    return write_vocabulary(path, tokens, usual | fields, {"merges": list(dict.fromkeys(merges))})


def unigram(path: Path, **fields: Any) -> GGUFFile:
    """SentencePiece's unigrams."""
    tokens = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}
    scores = [0.0] * 3
    for score, piece in enumerate((*sorted(set("".join(PIECES))), *PIECES)):
        if piece not in tokens:
            tokens[piece] = NORMAL
            scores.append(-3.0 - score / 10)
    tokens["<tool>"] = USER_DEFINED
    pieces = {"scores": [*scores, 0.0]}
    usual = {"model": "t5", "add_space_prefix": True, "remove_extra_whitespaces": True}
    return write_vocabulary(path, tokens, usual | fields, pieces)


KINDS: dict[str, tuple[Callable[..., GGUFFile], dict[str, Any]]] = {
    "gpt2": (byte_pairs, {}),
    "gpt2, bos": (byte_pairs, {"add_bos_token": True, "add_eos_token": True}),
    "llama-bpe": (byte_pairs, {"pre": "llama-bpe"}),
    "llama": (sentencepiece, {}),
    "llama, no space": (sentencepiece, {"add_space_prefix": False, "add_bos_token": False}),
    "phi-3": (sentencepiece, {"general.name": "Phi 3, or Phi-3"}),
    "gemma4": (raw_byte_pairs, {"add_bos_token": False}),
    "t5": (unigram, {}),
    "t5, spaces": (unigram, {"remove_extra_whitespaces": False, "add_eos_token": False}),
}
"""Vocabularies whose ids of `TEXTS` are recorded, with further fields."""
