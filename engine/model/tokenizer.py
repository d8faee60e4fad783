"""Calls untrusted tokenizers safely: the growth of a text is bounded, and panics become errors.

A tokenizer file contains normalizers that may multiply the text, and regular expressions. Where the
library fails it panics, which Python sees as an exception outside `Exception`; where it runs out of
memory it ends the process.
"""

from __future__ import annotations

import base64
import json
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.errors import PromptError, SourceError, first_line

MAX_CHARS = 8 << 20
"""Length of a text to be tokenized, as its normalizers may at most make it."""
MAX_DECODER_GROWTH = 64
GROWTH = {"NFC": 3, "NFD": 4, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 12} | dict.fromkeys(
    ("Strip", "StripAccents", "Nmt", "Prepend"), 1
)
"""Maximum characters per character; for compatibility forms (NFKC, NFKD) 18."""
Growth = tuple[int, int]
"""The characters that a normalizer makes of one at most, and the number that it adds."""
_growths: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, list[Growth]] = (
    weakref.WeakKeyDictionary()
)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of a text. Raises PromptError: it grows too long, or the tokenizer panics."""
    _check_growth(tokenizer, text)
    with _panics("read this text"):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special: bool = False
) -> str:
    """The text of tokens. Raises PromptError: the tokenizer panics."""
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
    """Whether a Rust library panicked; each has its own class of that name."""
    return type(error).__name__ == "PanicException"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises SourceError: its template repeats the text, or its decoder multiplies it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    templates = _steps(backend.post_processor, "processors")
    if any(sum("Sequence" in part for part in state.get("single", ())) > 1 for state in templates):
        raise SourceError(f"{where}: its tokenizer.json repeats the text in its template.")
    decoders = _steps(backend.decoder, "decoders")
    growth = math.prod(len(s["content"]) + 1 for s in decoders if s["type"] == "Replace")
    if growth > MAX_DECODER_GROWTH:
        raise SourceError(
            f"{where}: the decoder of its tokenizer.json makes up to {growth} characters of one."
        )


def _steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer's component; `key` names the steps of a sequence."""
    steps = [] if part is None else [json.loads(part.__getstate__())]
    while steps:
        state = steps.pop(0)
        if key in state:
            steps[:0] = state[key]
        else:
            yield state


def _check_growth(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raises PromptError: a normalizer may make the text too long."""
    if tokenizer not in _growths:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalizer = None if backend is None else backend.normalizer
        _growths[tokenizer] = [_growth_of(state) for state in _steps(normalizer, "normalizers")]
    num_chars = len(text)
    for growth, added in _growths[tokenizer]:
        num_chars = num_chars * growth + added
    if num_chars > MAX_CHARS:
        raise PromptError(
            f"The model's tokenizer may make {num_chars} characters of this text; at most "
            f"{MAX_CHARS} are read. Shorten it, or use another tokenizer.json."
        )


def _growth_of(state: dict[str, Any]) -> Growth:
    if state["type"] == "Replace":  # an expression that matches the empty string inserts, too
        return len(state["content"]) + 1, len(state["content"])
    if state["type"] == "Precompiled":
        return _longest_replacement(state["precompiled_charsmap"]), 0
    return GROWTH.get(state["type"], 18), len(state.get("prepend", ""))


def _longest_replacement(charsmap: str) -> int:
    """Of SentencePiece's map: a trie preceded by its size, then NUL-terminated texts."""
    raw = base64.b64decode(charsmap)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max((len(one.decode(errors="replace")) for one in texts.split(b"\0")), default=1) or 1
