"""The target's output matrix as draft heads use it: all of its rows, or those of some tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.drafters.heads.vocabulary import Vocabulary
from engine.kernels.cpu.operators import NativeLinear, packed_linear
from engine.model.target import Target


class DraftOutput:
    """Hidden vectors `(…, hidden)` → logits `(…, size)` of the tokens that are drafted.

    Attributes:
        packed: the matrix, where kernels multiply by it.
    """

    packed: NativeLinear | None

    def __init__(self, target: Target, vocabulary: Vocabulary | None = None) -> None:
        """`vocabulary`: None = all tokens."""
        self.vocabulary = vocabulary or Vocabulary(None, target.vocab_size)
        self._whole, self._part = target.output, torch.empty(0)
        head: nn.Module | None = target.lm_head
        if self.vocabulary.ids is not None:
            weight = target.lm_head.weight
            assert isinstance(weight, Tensor)
            self._part = weight.detach()[self.vocabulary.ids]
            head = packed_linear(self._part, None, target.kernels)
        self.packed = head if isinstance(head, NativeLinear) else None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.vocabulary.ids is None:
            return self._whole(hidden)
        if self.packed is None:
            return linear(hidden, self._part)
        rows = self.packed.float_product(hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], self.vocabulary.size)
