"""The target's output matrix as draft heads use it: over all tokens, or the most frequent ones.

Multiplying by the whole vocabulary is most of a small head's work, and almost all that it drafts is
among the most frequent tokens. Verification is the target's own, so nothing is lost but a rare
guess. Source: arXiv:2502.14856 (FR-Spec), section 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import DrafterError
from engine.kernels.cpu.operators import NativeLinear, pack_linears
from engine.model.target import Target

FILE = "draft_vocab.json"
"""Beside a head's weights: token ids, the most frequent first."""

DraftVocab = Annotated[
    int | None,
    Field(
        ge=16,
        le=1 << 20,
        description="most frequent tokens that are drafted (FR-Spec), of those that the head's "
        "files name; None = all that they name, else the whole vocabulary",
    ),
]


def frequent_ids(target: Target, location: str, size: int | None) -> Tensor | None:
    """The tokens that the files of a head name, `(size,)`; None = the whole vocabulary.

    Args:
        size: only so many of them, the most frequent; None = all.

    Raises:
        DrafterError: a size without a file, or a file with other things than token ids.
    """
    path = Path(location)
    file = (path if path.is_dir() else path.parent) / FILE
    if not file.is_file():
        if size is None:
            return None
        raise DrafterError(
            f"draft_vocab is {size}, but {location} has no {FILE} that says which tokens are "
            "the most frequent. Leave it empty, or train the head with this program."
        )
    try:
        ids = torch.tensor(json.loads(file.read_bytes()), dtype=torch.int64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DrafterError(f"{file} must be a list of token ids: {error}.") from error
    inside = ids.ndim == 1 and len(ids) > 0 and 0 <= ids.min() <= ids.max() < target.vocab_size
    if not inside or len(ids.unique()) < len(ids):
        raise DrafterError(
            f"{file} must list different token ids below {target.vocab_size}, the target's "
            "vocabulary."
        )
    return ids[:size].to(target.device)


class DraftOutput:
    """Hidden vectors `(…, hidden)` → logits `(…, size)` of the tokens that are drafted.

    Attributes:
        ids: `(size,)` int64, the target's id of each logit; None = all of its tokens.
        size: number of logits.
        packed: the matrix, where kernels multiply by it.
    """

    packed: NativeLinear | None

    def __init__(self, target: Target, ids: Tensor | None = None) -> None:
        self.ids = ids
        self.size = target.vocab_size if ids is None else len(ids)
        self._whole, self._vocab = target.output, target.vocab_size
        self._places: Tensor | None = None
        head = target.lm_head
        if self.ids is not None:
            weight = head.weight
            assert isinstance(weight, Tensor)
            part = nn.Linear(1, 1, bias=False)
            part.in_features, part.out_features = weight.shape[1], len(self.ids)
            part.weight = nn.Parameter(weight.detach()[self.ids], requires_grad=False)
            holder = nn.Sequential(part)
            pack_linears(holder, target.kernels)
            head = holder[0]
            self._weight = part.weight
        self.packed = head if isinstance(head, NativeLinear) else None

    @classmethod
    def of(cls, target: Target, location: str, size: int | None) -> DraftOutput:
        """Over the tokens that the files of a head name; see `frequent_ids`."""
        return cls(target, frequent_ids(target, location, size))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.ids is None:
            return self._whole(hidden)
        if self.packed is None:
            return linear(hidden, self._weight)
        rows = self.packed.float_product(hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], self.size)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Places among the logits → ids of the target."""
        return draft_ids if self.ids is None else self.ids[draft_ids]

    def places(self, target_ids: Tensor) -> Tensor:
        """Ids of the target → places among the logits; −1 where a token is not drafted."""
        if self.ids is None:
            return target_ids
        if self._places is None:
            self._places = torch.full((self._vocab,), -1, device=self.ids.device)
            self._places[self.ids] = torch.arange(self.size, device=self.ids.device)
        return self._places[target_ids]

    def spread(self, probs: Tensor) -> Tensor:
        """Probabilities `(n, size)` of the drafted tokens → of all, `(n, vocab)`."""
        if self.ids is None:
            return probs
        return probs.new_zeros(len(probs), self._vocab).index_copy_(1, self.ids, probs)
