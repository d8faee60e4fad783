"""Drafting with a second model: its settings, and a cache that follows the text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field

from engine.drafters.base import BuildContext, Drafter, Start
from engine.model.target import Target

MODEL = "the draft model (a target preset, a local path or a hub id)"
HEADROOM = 512
"""Rows of the cache beyond the prompt, to begin with."""

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


class ModelSettings(Protocol):
    """Settings of a method that drafts with a second model."""

    @property
    def speculative_model(self) -> str | None: ...
    @property
    def draft_dtype(self) -> str: ...
    @property
    def draft_device(self) -> str: ...


def load_draft_model(config: ModelSettings, context: BuildContext) -> Target:
    """The model, dtype and device of these settings; errors as `MethodConfig.build`."""
    settings = {"dtype": config.draft_dtype, "device": config.draft_device}
    changes = {name: value for name, value in settings.items() if value != "target"}
    return context.load(
        context.resolve(context.weights(config.speculative_model, MODEL)), **changes
    )


class ModelDrafter(Drafter):
    """Keeps a model's cache in step with the text, and from run to run where that is allowed."""

    has_network = True
    _ids: list[int]
    """The text in the model's ids, as far as the cache may hold it."""

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

    @abstractmethod
    def _encode(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the target in the model's ids."""

    def finish(self) -> None:
        if self._keeps:
            self.model.prefixes.keep(self._ids, self._cache)
        self._keeps = False
        self._cache.free()
