"""What makes two runs comparable: equal settings, equal prompts; and text folded for search."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from storage import codec

SEED = "seed"


def setup_id(
    *,
    target: str,
    method: Mapping[str, Any],
    sampling: Mapping[str, Any],
    limits: Mapping[str, Any],
    dtype: str,
    device: str,
) -> str:
    """Equal for runs of equal settings; the seed of the sampling may differ."""
    drawn = {key: value for key, value in sampling.items() if key != SEED}
    return _digest([target, method, drawn, limits, dtype, device])


def prompt_id(text: str, messages: Sequence[Mapping[str, str]], token_ids: Sequence[int]) -> str:
    """Equal for runs that were asked the same; token ids count where there is no text."""
    return _digest([text, messages, [] if text or messages else token_ids])


def fold(text: str) -> str:
    """Text as it is searched: `fold(a) in fold(b)` whatever the case, in any script."""
    return unicodedata.normalize("NFC", text).casefold()


def _digest(value: Any) -> str:
    return hashlib.sha256(codec.canonical(value).encode()).hexdigest()[:32]
