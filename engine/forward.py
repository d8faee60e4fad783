"""One forward of the target over new rows: by transformers' modules, or by something faster."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from engine.cache import TreeCache
from engine.features import FeatureTap
from engine.masks import MaskBuilder
from engine.proposal import Needs, Shown


class Forward(Protocol):
    """Runs the target over rows behind the cache's committed ones and stores their keys and values.

    Whoever makes one owns it; it reads the model's weights and changes the cache only.
    """

    name: str
    """What runs, for the log of a run."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> Shown:
        """Run it.

        Args:
            tokens, positions: `(n,)` int64; the cache has room for n rows.
            visible: `(n, n)` bool, who sees whom among the rows; None = causal.
            last_only: logits of the last row only.
        """

    def close(self) -> None:
        """Let go of the weights."""


class ModulesForward:
    """transformers' own modules: any model that it supports, on any device."""

    name = "transformers' modules"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: PreTrainedModel | None = model
        self._masks = MaskBuilder(model)
        self._features = FeatureTap(model)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> Shown:
        assert self._model is not None
        self._features.watch(needs)
        dtype = self._model.dtype
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._masks.build(positions, visible, cache.length, dtype),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        return Shown(out.logits[0], *self._features.take())

    def close(self) -> None:
        self._features.close()
        self._model = None
