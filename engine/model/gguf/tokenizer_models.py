"""The parts of a tokenizer per kind: byte-pair encodings, SentencePiece's, and unigrams.

As the `tokenizers` library reads them: normalizer, pre-tokenizer, model and decoder.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.pre import IGNORE_MERGES, PATTERNS, RAW
from engine.model.gguf.vocabulary import PREFIX, TokenType, Vocabulary, array

Json = dict[str, Any]
SPACE = "▁"
"""How SentencePiece writes a space."""
NO_BYTES = "ÀÁõö÷øùúûüýþÿ"
"""GPT-2's letters for bytes that no text has; some vocabularies have them as tokens of text."""
MARK = "\ufdd0"
"""No character: a token that begins with it is text, not bytes."""

BYTE_LEVEL: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
"""Between bytes and GPT-2's alphabet."""


def model_parts(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """Normalizer, pre-tokenizer, model and decoder.

    Raises SourceError: a field that they need is missing or damaged.
    """
    if vocabulary.model == "llama":
        return _sentencepiece(file, vocabulary)
    if vocabulary.model == "t5":
        return _unigram(file, vocabulary)
    return _byte_pairs(file, vocabulary)


def _byte_pairs(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """A byte-pair encoding by the file's merges."""
    pre, is_raw = vocabulary.pre, vocabulary.pre in RAW
    merges = _usable_merges(array(file, "merges", str), vocabulary.ids)
    if not merges:
        raise SourceError(
            f"{vocabulary.where}: its tokenizer has no merges (tokenizer.ggml.merges)."
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in PATTERNS[pre]
    ]
    model = _bpe(vocabulary, merges, byte_fallback=is_raw)
    if is_raw:
        return {
            "normalizer": _replace(" ", SPACE),
            "pre_tokenizer": _sequence("pretokenizers", splits),
            "model": model,
            "decoder": _byte_decoder(strips=False),
        }
    return {
        "normalizer": None,
        "pre_tokenizer": _sequence("pretokenizers", [*splits, BYTE_LEVEL]),
        "model": model | {"ignore_merges": pre in IGNORE_MERGES},
        "decoder": _alphabet_decoder(vocabulary),
    }


def _alphabet_decoder(vocabulary: Vocabulary) -> Json:
    """Joins tokens written in GPT-2's alphabet of bytes."""
    types = ((letter, vocabulary.ids.get(letter)) for letter in NO_BYTES)
    letters = "".join(
        letter
        for letter, i in types
        if i is not None and vocabulary.types[i] == TokenType.USER_DEFINED
    )
    if not letters:
        return BYTE_LEVEL
    mark = _replace(rf"\A(?=[{letters}]\z)", MARK, "Regex")
    return _sequence("decoders", [mark, BYTE_LEVEL, _replace(MARK, "")])


def _usable_merges(merges: list[str], ids: dict[str, int]) -> list[str]:
    """The merges of two tokens into a third, each once."""
    usable: dict[str, None] = {}
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left in ids and right in ids and left + right in ids:
            usable.setdefault(merge)
    return list(usable)


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """SentencePiece's byte-pair encoding: neighbours are merged into the token of highest score."""
    merges = _merges_by_score(vocabulary, _scores(file, vocabulary))
    steps = [_replace(" ", SPACE)]
    if vocabulary.add_space:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    return {
        "normalizer": _sequence("normalizers", steps),
        "pre_tokenizer": None,
        "model": _bpe(vocabulary, merges, byte_fallback=True),
        "decoder": _byte_decoder(strips=vocabulary.add_space),
    }


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[str]:
    """All pairs of tokens that make a token, best first.

    Of equal scores llama.cpp merges the leftmost pair, so that a run of equal characters grows from
    its left end: the longest token first, and its longest left part, has the same effect.
    """
    ids, merges = vocabulary.ids, []
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -len(vocabulary.tokens[i]), i))
    for token_id in order:
        token = vocabulary.tokens[token_id]
        if " " in token:
            continue  # a text's spaces have been replaced
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append(f"{left} {right}")
    return merges


def _unigram(file: GGUFFile, vocabulary: Vocabulary) -> Json:
    """SentencePiece's unigrams: the most probable tokens of a text."""
    scores = _scores(file, vocabulary)
    for token_id, kind in enumerate(vocabulary.types):
        if kind == TokenType.USER_DEFINED:
            scores[token_id] = 0.0
    merges_spaces = file.metadata.get(PREFIX + "remove_extra_whitespaces") is True
    steps: list[Json] = []
    if charsmap := array(file, "precompiled_charsmap", int):
        steps.append(_charsmap(charsmap, vocabulary.where))
    if merges_spaces:
        steps += [_replace(r"\A +| +\z", "", "Regex"), _replace(" {2,}", " ", "Regex")]
    if adds_space := vocabulary.add_space or merges_spaces:
        steps.append(_replace(r"\A(?= *[^ ])", SPACE, "Regex"))  # but not to spaces alone
    return {
        "normalizer": _sequence("normalizers", [*steps, _replace(" ", SPACE)]),
        "pre_tokenizer": None,
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.unk_id,
            "vocab": list(zip(vocabulary.tokens, scores, strict=True)),
            "byte_fallback": False,
        },
        "decoder": _byte_decoder(strips=adds_space),
    }


def _charsmap(values: list[int], where: str) -> Json:
    """SentencePiece's table of replaced characters: its size, a trie, and the replacements."""
    raw = bytes(value & 0xFF for value in values)
    size = int.from_bytes(raw[:4], "little")
    if size % 4 or 4 + size >= len(raw) or raw[-1]:
        raise SourceError(f"{where}: tokenizer.ggml.precompiled_charsmap is damaged.")
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def _scores(file: GGUFFile, vocabulary: Vocabulary) -> list[float]:
    """The tokens' scores; 0 where the file has none."""
    scores = array(file, "scores", float, int) or [0.0] * len(vocabulary.tokens)
    if len(scores) < len(vocabulary.tokens) or not all(map(math.isfinite, scores)):
        raise SourceError(
            f"{vocabulary.where}: its scores (tokenizer.ggml.scores) must be a number per token."
        )
    return [float(score) for score in scores[: len(vocabulary.tokens)]]


def _bpe(vocabulary: Vocabulary, merges: list[str], *, byte_fallback: bool) -> Json:
    unknown = vocabulary.unk_id if byte_fallback else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _byte_decoder(*, strips: bool) -> Json:
    """Joins tokens with `▁` for a space and bytes such as `<0xE2>`.

    Args:
        strips: whether the first space is none of the text's.
    """
    steps: list[Json] = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strips:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", steps)


def _replace(old: str, new: str, kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def _sequence(key: str, steps: list[Json]) -> Json:
    return {"type": "Sequence", key: steps}
