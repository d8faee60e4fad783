"""One forward of the target over new rows: by transformers' modules, or by something faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from engine.model.cache import TreeCache
from engine.model.features import FeatureTap
from engine.model.masks import MaskBuilder
from engine.proposal import Needs, TargetOutput

if TYPE_CHECKING:
    from engine.kernels.cpu.native import SideBySide
    from engine.kernels.cuda.recorder import Recorder


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
    ) -> TargetOutput:
        """Run it.

        Args:
            tokens, positions: `(n,)` int64; the cache has room for n rows.
            visible: `(n, n)` bool, who sees whom among the rows; None = causal.
            last_only: logits of the last row only.
        """

    def close(self) -> None:
        """Let go of the weights."""


@runtime_checkable
class Capturing(Protocol):
    """A forward that is recorded over a cache of its own."""

    @property
    def recorder(self) -> Recorder | None:
        """What records; None where it was given up. Drafters may record theirs by it."""

    def new_cache(self, rows: int) -> TreeCache | None:
        """An empty cache with room for `rows` rows; None while the one there is is in use."""

    def environment(self) -> dict[str, Any]:
        """What the log of a run says about it: what is used, or why not, and memory in bytes."""


@runtime_checkable
class Together(Protocol):
    """A forward that can read many texts in one call, and has an output matrix of its own."""

    def output(self, hidden: Tensor) -> Tensor:
        """Logits `(…, vocab)` of hidden states `(…, hidden)`."""

    def texts(self, capacity: int) -> SideBySide:
        """Room for many texts, `capacity` tokens in all."""


class ModulesForward:
    """transformers' own modules: any model that it supports, on any device."""

    name = "transformers' modules"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: PreTrainedModel | None = model
        self._masks = MaskBuilder(model)
        self._features = FeatureTap(model)

    @property
    def adds_mask(self) -> bool:
        """Whether the model adds its mask to the scores; else it takes a boolean one."""
        return bool(self._masks.additive)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> TargetOutput:
        assert self._model is not None
        mask = self._masks.build(positions, visible, cache.length, self._model.dtype)
        return self.masked(tokens, positions, mask, cache, needs, last_only=last_only)

    def masked(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> TargetOutput:
        """The same with the mask that the model takes."""
        assert self._model is not None
        self._features.watch(needs)
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        return TargetOutput(out.logits[0], *self._features.take())

    def close(self) -> None:
        self._features.close()
        self._model = None
