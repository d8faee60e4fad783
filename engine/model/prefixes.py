"""What earlier texts left in a model's cache, so that a chat's next turn reads only what is new.

A text's rows are copied when its run ends, and copied back for a prompt that begins as it did:

    kept     [user] hi [assistant] hello
    prompt   [user] hi [assistant] hello [user] and you?
                                         read: these only

Rows of attention layers can be kept up to any token. A recurrent state cannot be taken back: there
a prompt goes on from the longest text within the common beginning that a state was kept of, which
are the ends of answers and of prompts. Rows are what the model computed for these very tokens at
these places, so the text is that of a run which reads everything, but for the rounding of forwards
of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.metrics import common_len
from engine.model.cache import CacheCopy, TreeCache
from engine.proposal import Needs, TargetOutput, joined
from engine.tree import upload

MAX_BYTES = 1 << 30
"""Most memory that is taken by the texts kept of one model, on its device."""
MAX_TEXTS = 8
NOTHING = Needs()


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What a drafter asked to see of the target, `(rows, …)` each; None = it did not."""

    hidden: Tensor | None = None
    layers: Tensor | None = None

    @classmethod
    def of(cls, output: TargetOutput, path: Sequence[int] | None = None) -> Features:
        """Of these rows of a forward; None = all."""
        seen = cls(output.hidden, output.layers)
        if path is None or (seen.hidden is None and seen.layers is None):
            return seen
        rows = upload(torch.tensor(path), output.logits.device)
        return cls(*(each if each is None else each[rows] for each in (seen.hidden, seen.layers)))

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        """Rows of several, one behind the other."""
        return cls(joined(part.hidden for part in parts), joined(part.layers for part in parts))

    def first(self, rows: int) -> Features:
        return Features(*(x if x is None else x[:rows] for x in (self.hidden, self.layers)))

    @property
    def num_bytes(self) -> int:
        return sum(0 if each is None else each.nbytes for each in (self.hidden, self.layers))


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    token_ids: list[int]
    rows: CacheCopy
    needs: Needs
    features: Features
    num_bytes: int

    def shows(self, needs: Needs) -> bool:
        """Whether a drafter with these needs would see of it all that it asks for."""
        return needs in (self.needs, NOTHING)


class PrefixCache:
    """Texts kept of one model, those that were used last."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: list[_Text] = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        return sum(text.num_bytes for text in self._texts)

    def restore(
        self, token_ids: Sequence[int], cache: TreeCache, needs: Needs = NOTHING
    ) -> Features:
        """Fill an empty cache with what is known of a text's beginning, but its last token.

        Returns:
            What was seen of the rows that the cache has now; nothing where it has none.
        """
        best, rows = None, 0
        for text in self._texts:
            if text.shows(needs):
                common = min(common_len(text.token_ids, token_ids), len(token_ids) - 1)
                if (usable := text.rows.usable(common)) > rows:
                    best, rows = text, usable
        if best is None:
            return Features()
        self._texts.remove(best)
        self._texts.append(best)
        cache.paste(best.rows, rows)
        return best.features.first(rows) if needs == best.needs else Features()

    def keep(
        self,
        token_ids: Sequence[int],
        cache: TreeCache,
        needs: Needs = NOTHING,
        seen: Sequence[Features] = (),
    ) -> None:
        """Keep a text's rows, as many as the cache has; older texts go where it gets too much.

        Args:
            seen: what `needs` asked for, of these rows and perhaps more.
        """
        num_bytes = cache.copied_bytes + sum(part.num_bytes for part in seen)
        if not cache.length or num_bytes > self._max_bytes:
            return
        ids, features = list(token_ids[: cache.length]), Features.joined(seen).first(cache.length)
        self._texts = [
            text
            for text in self._texts
            if text.needs != needs or ids[: len(text.token_ids)] != text.token_ids
        ]
        self._texts.append(_Text(ids, cache.copy(), needs, features, num_bytes))
        while len(self._texts) > MAX_TEXTS or self.num_bytes > self._max_bytes:
            self._texts.pop(0)

    def clear(self) -> None:
        self._texts.clear()


class PrefixUse:
    """What one run takes from a prefix cache, and leaves in it; nothing where there is none."""

    def __init__(self, prefixes: PrefixCache | None, cache: TreeCache, needs: Needs) -> None:
        self._prefixes, self._cache, self._needs = prefixes, cache, needs
        self._token_ids: list[int] = []
        self._seen: list[Features] = []

    def begin(self, prompt_ids: Sequence[int]) -> int | None:
        """Fill the cache as far as is known; how far that is, None without a prefix cache."""
        if self._prefixes is None:
            return None
        self._seen = [self._prefixes.restore(prompt_ids, self._cache, self._needs)]
        return self._cache.length

    def prefilled(self, prompt_ids: Sequence[int], output: TargetOutput) -> TargetOutput:
        """The output of the prompt's other rows with what was seen of the first ones."""
        if self._prefixes is None:
            return output
        self._token_ids = list(prompt_ids)
        whole = Features.joined([*self._seen, Features.of(output)])
        self._seen = [whole]
        return replace(output, hidden=whole.hidden, layers=whole.layers)

    def committed(
        self, token_ids: Sequence[int], output: TargetOutput, path: Sequence[int]
    ) -> None:
        """These rows of a forward went into the cache."""
        if self._prefixes is not None:
            self._token_ids.extend(token_ids)
            self._seen.append(Features.of(output, path))

    @torch.inference_mode()
    def keep(self) -> None:
        """Leave the text to later runs whose prompts begin with it."""
        if self._prefixes is not None and self._token_ids:
            self._prefixes.keep(self._token_ids, self._cache, self._needs, self._seen)
