"""Readable labels of single tokens: in a draft tree, above the text, in a report.

A token may be part of a character: 🦜 is four bytes, which many vocabularies split in two. The
label of such a token names the character that it belongs to on its path. Special tokens are in
angle brackets that no text has: `<|im_end|>` is ⟨|im_end|⟩.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.model.text import REPLACEMENT
from engine.model.tokenizer import decode
from engine.steps import Step

MAX_LABELS = 20_000
"""Labels cached within one run."""
MAX_TOKENS_BEFORE = 3
"""Tokens before the root in which a character of the step may have begun."""
CHARACTER = re.compile(
    rb"[\xc0-\xdf][\x80-\xbf]?|[\xe0-\xef][\x80-\xbf]{0,2}|[\xf0-\xff][\x80-\xbf]{0,3}|.", re.DOTALL
)
"""A UTF-8 character, a prefix of one, or a byte that begins none."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
BYTE_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The letter that stands for each byte in byte-level vocabularies."""


class TokenLabels:
    """Labels of a run's tokens.

    Args:
        tokenizer: None for a target without one, whose tokens are numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._whole = lru_cache(MAX_LABELS)(self._find_whole)

    def __call__(self, token_id: int) -> str:
        """A token out of context; for part of a character, the number of its bytes."""
        return self._whole(token_id) or _label(b"", self._bytes(token_id), b"")

    def of_step(self, step: Step, before: Sequence[int]) -> list[str]:
        """Labels of the nodes, then of the bonus or recovered token.

        Args:
            before: the text's tokens up to and including the root.
        """
        tokens = [*step.tokens, step.bonus]
        labels = [self._whole(token) for token in tokens]
        if all(labels):
            return labels
        added = len(step.tokens)
        parents = [*step.parents, step.accepted[-1] if step.accepted else 0]
        data = [self._bytes(token) for token in tokens]
        above = [b"".join(self._bytes(token) for token in before[:-1][-MAX_TOKENS_BEFORE:])]
        for parent in parents[1:]:
            above.append(above[parent] + data[parent])
        # A node continues with its child on the accepted path, else with its first: set last.
        below, path = [b""] * len(tokens), {*step.accepted, added}
        for node in sorted(range(added, 0, -1), key=path.__contains__):
            below[parents[node]] = data[node] + below[node]
        rows = zip(labels, above, data, below, strict=True)
        return [label or _label(*around) for label, *around in rows]

    def _find_whole(self, token_id: int) -> str:
        """The label of a token with a text or name of its own; "" for part of a character."""
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token_id)
        if self._tokenizer is None or not isinstance(name, str):
            return f"⟨{token_id}⟩"
        if token_id in self._special:
            return f"⟨{name.removeprefix('<').removesuffix('>')}⟩"
        text = decode(self._tokenizer, [token_id])
        return "" if REPLACEMENT in text else text or name

    def _bytes(self, token_id: int) -> bytes:
        """A token's text in UTF-8; empty where the vocabulary does not say."""
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(name, str):
            return b""
        if match := BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        if BYTE_LETTERS.keys() >= set(name):
            return bytes(BYTE_LETTERS[letter] for letter in name)
        return name.encode()


def _label(above: bytes, own: bytes, below: bytes) -> str:
    """Example: the last two bytes of 🦜 after its first two: "2 of 4 bytes of 🦜"."""
    start, end = len(above), len(above) + len(own)
    parts: list[str] = []
    for match in CHARACTER.finditer(above + own + below):
        lead, letter = match[0][0], match[0].decode(errors="ignore")
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        inside = min(match.end(), end) - max(match.start(), start)
        if inside == size:
            parts.append(letter or f"byte {match[0].hex(' ').upper()}")
        elif inside > 0:
            parts.append(f"{inside} of {size} bytes" + (f" of {letter}" if letter else ""))
    return "".join(parts)
