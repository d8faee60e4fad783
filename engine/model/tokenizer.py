"""Calls into tokenizers: what strangers' files make of a text is bounded, and panics are errors.

A tokenizer's file brings normalizers that may multiply the text, and regular expressions. Where its
library gives up it panics, which Python sees as an exception that is no `Exception`; where it runs
out of memory it ends the process.
"""

from __future__ import annotations

import base64
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from engine.errors import PromptError, SourceError, first_line

MAX_CHARS = 8 << 20
"""Of a text that is turned into tokens, at every stage."""
MAX_DECODER_GROWTH = 64
GROWTH = {"NFC": 3, "NFD": 4, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 12} | dict.fromkeys(
    ("Strip", "StripAccents", "Nmt", "Prepend"), 1
)
"""Characters that one becomes at most; in compatibility forms (NFKC, NFKD) 18."""
Stage = tuple[Any, int, int]
"""A normalizer, the characters that it makes of one, and those that it adds."""
_stages: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, list[Stage]] = (
    weakref.WeakKeyDictionary()
)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of a text. Raises PromptError: it becomes too long, or the tokenizer breaks."""
    _check_growth(tokenizer, text)
    with _panics("read this text"):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special: bool = False
) -> str:
    """What tokens say. Raises PromptError: the tokenizer breaks."""
    with _panics("write these tokens"):
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
    assert isinstance(text, str)
    return text


@contextmanager
def _panics(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise PromptError(
                f"The model's tokenizer could not {what}: {first_line(error)}. Change the text, or "
                "use another tokenizer.json."
            ) from error
        raise


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up; each has its own class of that name."""
    return type(error).__name__ == "PanicException"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises SourceError: it repeats the text, or its decoder multiplies tokens' texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    if _copies(_state(backend.post_processor)) > 1:
        raise SourceError(f"{where}: its tokenizer.json repeats the text in its template.")
    growth = _decoder_growth(_state(backend.decoder))
    if growth > MAX_DECODER_GROWTH:
        raise SourceError(
            f"{where}: the decoder of its tokenizer.json makes up to {growth} characters of one."
        )


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _copies(state: dict[str, Any]) -> int:
    """How often a post-processor repeats the text."""
    copies = sum("Sequence" in piece for piece in state.get("single", ()))
    for one in state.get("processors", ()):
        copies = max(1, copies) * _copies(one)
    return max(1, copies)


def _decoder_growth(state: dict[str, Any]) -> int:
    growth = len(state["content"]) + 1 if state.get("type") == "Replace" else 1
    for one in state.get("decoders", ()):
        growth *= _decoder_growth(one)
    return growth


def _check_growth(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raises PromptError before a normalizer makes too long a text of this one."""
    if tokenizer not in _stages:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalizer = None if backend is None else backend.normalizer
        _stages[tokenizer] = list(_stages_of(_state(normalizer)))
    stages = _stages[tokenizer]
    most = len(text)
    for _, growth, added in stages:
        most = most * growth + added
    if most <= MAX_CHARS:
        return
    for normalizer, growth, added in stages:  # as far as it goes, what it really becomes
        _check_length(len(text) * growth + added)
        with _panics("read this text"):
            text = normalizer.normalize_str(text)
    _check_length(len(text))


def _check_length(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise PromptError(
            f"The model's tokenizer may make {num_chars} characters of this text; at most "
            f"{MAX_CHARS} are read. Shorten it, or use another tokenizer.json."
        )


def _stages_of(state: dict[str, Any]) -> Iterator[Stage]:
    if not state or state["type"] == "Sequence":
        for one in state.get("normalizers", ()):
            yield from _stages_of(one)
        return
    normalizer = normalizers.Lowercase()  # any: its state makes it another
    normalizer.__setstate__(json.dumps(state).encode())
    if state["type"] == "Replace":  # an expression that matches nothing inserts, too
        yield normalizer, len(state["content"]) + 1, len(state["content"])
    elif state["type"] == "Precompiled":
        yield normalizer, _longest_replacement(state["precompiled_charsmap"]), 0
    else:
        yield normalizer, GROWTH.get(state["type"], 18), len(state.get("prepend", ""))


def _longest_replacement(charsmap: str) -> int:
    """Of SentencePiece's: a trie, its size before it, then texts that end with NUL."""
    raw = base64.b64decode(charsmap)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max((len(one.decode(errors="replace")) for one in texts.split(b"\0")), default=1) or 1
