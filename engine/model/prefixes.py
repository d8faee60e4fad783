"""Prefix caching: a chat's next turn computes only its new tokens.

A text's rows are copied when its run ends, and restored for a prompt with the same prefix:

    cached   [user] hi [assistant] hello
    prompt   [user] hi [assistant] hello [user] and you?
                                         prefill: these only

Rows of attention layers can be reused up to any token. A recurrent state cannot: there a prompt
continues from the longest common prefix with a stored state, at the end of an answer or a prompt.
Rows were computed for the same tokens at the same positions and rotary frequencies, so the text is
that of a full prefill, up to the rounding of forwards of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.metrics import common_len
from engine.model.cache import CacheSnapshot, TreeCache
from engine.proposal import Needs, TargetOutput

MAX_BYTES = 1 << 30
"""Memory for one model's cached texts, on its device."""
MAX_TEXTS = 8
NO_FEATURES = Needs()


@dataclass(frozen=True, slots=True, eq=False)
class _CachedText:
    token_ids: list[int]
    rows: CacheSnapshot
    needs: Needs
    features: TargetOutput | None
    num_bytes: int


class PrefixCache:
    """One model's cached texts; the least recently used ones are evicted."""

    def __init__(self) -> None:
        self._texts: list[_CachedText] = []

    @property
    def num_bytes(self) -> int:
        return sum(text.num_bytes for text in self._texts)

    def restore(
        self, token_ids: Sequence[int], cache: TreeCache, needs: Needs = NO_FEATURES
    ) -> TargetOutput | None:
        """Fill an empty cache with the longest cached prefix of a text, without its last token.

        Returns:
            Features of the restored rows, if any are needed.
        """
        best, rows = None, 0
        for text in self._texts:
            if text.rows.rope_len != cache.rope_len:
                continue
            if needs in (text.needs, NO_FEATURES):  # else a drafter would lack features
                common = min(common_len(text.token_ids, token_ids), len(token_ids) - 1)
                if (usable := text.rows.usable_len(common)) > rows:
                    best, rows = text, usable
        if best is None:
            return None
        self._texts.remove(best)
        self._texts.append(best)
        cache.restore(best.rows, rows)
        features = best.features if needs == best.needs else None
        return features and features.at(slice(rows))

    @torch.inference_mode()
    def keep(
        self,
        token_ids: Sequence[int],
        cache: TreeCache,
        needs: Needs = NO_FEATURES,
        features: TargetOutput | None = None,
    ) -> None:
        """Store the rows of a text that are in the cache; evict older texts beyond the limits.

        Args:
            features: for `needs`, of at least these rows.
        """
        num_bytes = cache.snapshot_bytes + (0 if features is None else features.feature_bytes)
        if not cache.length or num_bytes > MAX_BYTES:
            return
        ids = list(token_ids[: cache.length])
        if features is not None:
            features = features.at(slice(cache.length))
        self._texts = [
            text
            for text in self._texts
            if text.needs != needs or ids[: len(text.token_ids)] != text.token_ids
        ]
        self._texts.append(_CachedText(ids, cache.snapshot(), needs, features, num_bytes))
        while len(self._texts) > MAX_TEXTS or self.num_bytes > MAX_BYTES:
            self._texts.pop(0)

    def clear(self) -> None:
        self._texts.clear()
