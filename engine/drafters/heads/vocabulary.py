"""Which of a target's tokens a head drafts: all, those it was made for, or the most frequent ones.

Multiplying by the whole vocabulary is most of a small head's work, and almost all that it drafts is
among the most frequent tokens. Verification is the target's own, so nothing is lost but a rare
guess. Source: arXiv:2502.14856 (FR-Spec), section 3.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from engine.drafters.texts import UNRANKED, rank_of
from engine.errors import DrafterError, first_line
from engine.model.checkpoints import local_file
from engine.model.files import read_json, read_pickle
from engine.model.target import Target

FILE = "draft_vocab.json"
"""Beside a head's weights: token ids, the most frequent first."""
DraftVocab = Annotated[
    int | None,
    Field(
        ge=16,
        le=1 << 20,
        title="Draft vocabulary",
        description="draft only this many of the most frequent tokens that the head's files list "
        "(FR-Spec); None = all of them, or the whole vocabulary if they list none",
    ),
]


class Vocabulary:
    """Some of a target's tokens in an order of their own: the places of a row of logits.

    Attributes:
        ids: `(size,)` int64, the target's id at each place; None = all of its tokens.
        size: number of places.
    """

    def __init__(self, ids: Tensor | None, vocab_size: int) -> None:
        """`vocab_size`: of the target."""
        self.ids, self._vocab_size = ids, vocab_size
        self.size = vocab_size if ids is None else len(ids)
        self._places: Tensor | None = None
        if ids is not None:
            self._places = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
            self._places[ids] = torch.arange(len(ids), device=ids.device)

    @classmethod
    def beside(
        cls, location: str, target: Target, size: int | None, named: str | None = None
    ) -> Vocabulary:
        """The tokens that a file beside a head's weights names; all tokens without such a file.

        Args:
            size: only so many of them, the most frequent; None = all.
            named: another file, as FR-Spec publishes them; by `local_file`.

        Raises DrafterError: a size without a file, or a file with other things than token ids.
        """
        path = Path(location).expanduser()
        file = (path if path.is_dir() else path.parent) / FILE
        if named is not None:
            file = local_file(named)
        elif not (path.exists() and file.exists()):
            if size is None:
                return cls(None, target.vocab_size)
            raise DrafterError(
                f"draft_vocab is {size}, but {location} has no {FILE} that says which tokens are "
                "the most frequent. Leave it empty, or train the head with this program."
            )
        try:
            is_json = file.suffix == ".json"
            found = read_json(file) if is_json else read_pickle(file, torch.device("cpu"))
            ids = torch.as_tensor(found, dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DrafterError(
                f"{file} must be a list of token ids: {first_line(error)}."
            ) from error
        inside = ids.ndim == 1 and len(ids) > 0 and 0 <= ids.min() <= ids.max() < target.vocab_size
        if not inside or len(ids.unique()) < len(ids):
            raise DrafterError(
                f"{file} must list different token ids below {target.vocab_size}, the target's "
                "vocabulary."
            )
        return cls(ids[:size].to(target.device), target.vocab_size)

    @property
    def key(self) -> str:
        """A short name of just these tokens."""
        if self.ids is None:
            return "all"
        return hashlib.sha256(self.ids.cpu().numpy().tobytes()).hexdigest()[:16]

    def index(self, tokens: Tensor) -> Tensor:
        """Ids of the target → places, −1 for those outside."""
        return tokens if self._places is None else self._places[tokens]

    def target_ids(self, places: Tensor) -> Tensor:
        """Places → ids of the target."""
        return places if self.ids is None else self.ids[places]

    def rank_of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """As `texts.rank_of`, of tokens by the target's ids; `UNRANKED` for those outside."""
        places = self.index(tokens)
        return torch.where(places < 0, UNRANKED, rank_of(logits, places.clamp_min(0)))

    def spread(self, probs: Tensor) -> Tensor:
        """Probabilities `(n, size)` → of all tokens of the target, `(n, vocab)`."""
        if self.ids is None:
            return probs
        return probs.new_zeros(len(probs), self._vocab_size).index_copy_(1, self.ids, probs)
