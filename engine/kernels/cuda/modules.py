"""The recorded forward of any other model: transformers' own modules over the static cache."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.cuda.inputs import RowInputs
from engine.kernels.cuda.static_cache import StaticCache
from engine.model.forward import ModulesForward
from engine.proposal import Needs, TargetOutput


class ModulesPass:
    """Launches transformers' modules over the rows of its inputs."""

    name = "transformers' modules"

    def __init__(self, forward: ModulesForward, dtype: torch.dtype) -> None:
        self._forward = forward
        self._dtype = dtype

    def __call__(
        self, inputs: RowInputs, context: int, cache: StaticCache, needs: Needs
    ) -> TargetOutput:
        """What the rows of `inputs` show; their keys and values go into the cache."""
        with cache.fixed(inputs.places(), context):
            return self._forward.masked(
                inputs.tokens,
                inputs.positions,
                self._mask(inputs, context),
                cache,
                needs,
                last_only=False,
            )

    def _mask(self, inputs: RowInputs, context: int) -> Tensor:
        if self._forward.adds_mask:
            return inputs.added(context, self._dtype)[None, None]
        return inputs.visible(context)[None, None]
