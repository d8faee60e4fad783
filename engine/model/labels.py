"""Tokens as a person can read them one by one: in a draft tree, above the text, in a report.

A token may hold a part of a character: 🦜 is four bytes, which many vocabularies split in two.
Such a token is named by the character that it belongs to on its path. Special tokens stand in
brackets that no text has: `<|im_end|>` is ⟨|im_end|⟩.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache

from transformers import PreTrainedTokenizerBase

from engine.model.text import REPLACEMENT
from engine.model.tokenizer import decode
from engine.steps import Step

MAX_LABELS = 20_000
"""Labels remembered within one run."""
MOST_TAIL = 3
"""Tokens before the root that an incomplete character may have begun with, and its bytes."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_label(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> str:
    """One token on its own; of a part of a character, how many of its bytes."""
    whole = _whole(tokenizer, token_id, _specials(tokenizer))
    return _label(b"", _bytes(tokenizer, token_id), b"") if whole is None else whole


class StepLabels:
    """Labels of a step's tokens.

    Args:
        tokenizer: None for a target without one, whose tokens are numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        specials = _specials(tokenizer)
        self._whole = lru_cache(MAX_LABELS)(lambda token: _whole(tokenizer, token, specials))

    def of(self, step: Step, before: Sequence[int]) -> tuple[list[str], str]:
        """Labels of the nodes, and of the token that the target adds.

        Args:
            before: the text's tokens up to the root, the root included.
        """
        tokens = [*step.tokens, step.bonus]
        labels = [self._whole(token) for token in tokens]
        if None not in labels:
            return [*labels[:-1]], labels[-1]  # type: ignore[list-item, return-value]
        parents = [*step.parents, step.accepted[-1] if step.accepted else 0]
        data = [_bytes(self._tokenizer, token) for token in tokens]
        tail = (_bytes(self._tokenizer, token) for token in before[:-1][-MOST_TAIL:])
        lead = [_incomplete(b"".join(tail))]
        for parent in parents[1:]:
            lead.append(_incomplete(lead[parent] + data[parent]))
        path = {0, *step.accepted, len(tokens) - 1}
        named = [
            _label(lead[node], data[node], _after(node, parents, data, path))
            if label is None
            else label
            for node, label in enumerate(labels)
        ]
        return named[:-1], named[-1]


def _specials(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _whole(
    tokenizer: PreTrainedTokenizerBase | None, token_id: int, specials: frozenset[int]
) -> str | None:
    """The label of a token that has a text or a name of its own; None for a part of a character."""
    if tokenizer is None:
        return f"⟨{token_id}⟩"
    name = tokenizer.convert_ids_to_tokens(token_id)
    if token_id in specials:
        return f"⟨{str(name).removeprefix('<').removesuffix('>')}⟩"
    text = decode(tokenizer, [token_id])
    if REPLACEMENT in text and _bytes(tokenizer, token_id):
        return None
    if text and REPLACEMENT not in text:
        return text
    return str(name) if name is not None else f"⟨{token_id}⟩"


def _bytes(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> bytes:
    """What a token adds to a text in UTF-8; empty where the vocabulary does not say."""
    name = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(name, str):
        return b""
    if match := BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    letters = _byte_letters()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return name.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies write bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _size(lead: int) -> int:
    """Bytes of the character that begins with this one; 1 for one that begins none."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _incomplete(data: bytes) -> bytes:
    """The beginning of a character at the end of `data`."""
    for count in range(1, min(MOST_TAIL, len(data)) + 1):
        lead = data[-count]
        if lead >= 0xC0:
            return data[-count:] if _size(lead) > count else b""
    return b""


def _after(node: int, parents: Sequence[int], data: Sequence[bytes], path: set[int]) -> bytes:
    """The bytes that follow a node: on the accepted path, else of its first children."""
    follows = b""
    while len(follows) < MOST_TAIL:
        children = [child for child in range(1, len(parents)) if parents[child] == node]
        if not children:
            break
        node = next((child for child in children if child in path), children[0])
        follows += data[node]
    return follows


def _label(lead: bytes, own: bytes, follows: bytes) -> str:
    """Example: the last two bytes of 🦜 after its first two: "2 of 4 bytes of 🦜"."""
    if not 0x80 <= own[0] < 0xC0:  # what came before was not gone on with
        lead = b""
    data, start, end = lead + own + follows, len(lead), len(lead) + len(own)
    parts: list[str] = []
    at = 0
    while at < end:
        size = _size(data[at])
        letter = data[at : at + size].decode("utf-8", "replace")
        inside = min(at + size, end) - max(at, start)
        whole = len(data[at : at + size]) == size and REPLACEMENT not in letter
        if inside == size:
            parts.append(letter if whole else f"byte {data[at]:02X}")
        elif inside > 0:
            parts.append(f"{inside} of {size} bytes" + (f" of {letter}" if whole else ""))
        at += size
    return "".join(parts)
