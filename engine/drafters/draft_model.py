"""Drafting with a second model: its settings, and a KV cache that follows the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from engine.drafters.base import BuildContext, Drafter, Start
from engine.model.target import Target

MODEL = "the draft model (a target preset, a local path or a hub id)"
HEADROOM = 512
"""Initial rows of the cache beyond the prompt."""

DraftDtype = Annotated[
    Literal["target", "float32", "bfloat16", "float16", "q8", "q4"],
    Field(
        title="Draft model's dtype",
        description="dtype of the draft model; target = the same as the target's",
    ),
]
DraftDevice = Annotated[
    str,
    Field(
        pattern=r"^(target|cpu|cuda(:\d{1,2})?)$",
        title="Draft model's device",
        description="where the draft model runs: cpu, cuda or cuda:N; target = where the target "
        "does",
    ),
]


def load_draft_model(context: BuildContext, name: str | None, dtype: str, device: str) -> Target:
    """The model with these settings; raises as `MethodConfig.build`."""
    settings = {"dtype": dtype, "device": device}
    changes = {key: value for key, value in settings.items() if value != "target"}
    return context.load(context.resolve(context.weights(name, MODEL)), **changes)


class ModelDrafter(Drafter):
    """Keeps a model's cache in step with the text, and between runs under prefix caching."""

    has_network = True
    _ids: list[int]
    """The text in the model's ids, as far as it may be in the cache."""

    def __init__(self, target: Target, model: Target, *, rewinds: int = 0) -> None:
        """`rewinds`: as `Target.new_cache`."""
        self.model, self._device, self._rewinds = model, target.device, rewinds
        self._cache, self._ids, self._keeps = model.new_cache(0), [], False

    def start(self, start: Start) -> None:
        super().start(start)
        self._ids = self._encode(self.text)
        rows = min(max(len(self._ids), len(self.text)) + HEADROOM, self.model.context_len)
        self._cache = self.model.new_cache(rows, rewinds=self._rewinds)
        self._keeps = start.num_cached is not None
        if self._keeps and self._ids:
            self.model.prefixes.restore(self._ids, self._cache)

    def _encode(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens in the model's ids; by default the same."""
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]

    def finish(self) -> None:
        if self._keeps:
            self.model.prefixes.keep(self._ids, self._cache)
        self._keeps = False
        self._cache.free()
