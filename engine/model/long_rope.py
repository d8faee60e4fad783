"""LongRoPE's rotary frequencies, chosen once per text.

A model with LongRoPE has one set of frequencies for texts within its original context, and one for
longer ones. transformers chooses at every forward, by its last position: a text that becomes longer
has cached keys of both sets, and a draft that reaches across changes the rows before it. Here a
text that may become longer has the long set from its start, as in vLLM and llama.cpp, which choose
by the session's context; any other text has the short set.

Dynamic NTK changes its frequencies beyond `max_position_embeddings` only, where every text ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.errors import TargetError


class LongRope:
    """The LongRoPE embeddings of a model; most models have none."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """Raises TargetError: scores are scaled by the length of the text, too (PhiMoE)."""
        modules: Iterator[Any] = model.modules()
        self._embeddings = [(m, kind) for m in modules for kind in _layer_types(m)]
        self._originals: set[int] = set()
        for module, kind in self._embeddings:
            rope = module.config.rope_parameters
            rope = rope[kind[0]] if kind else rope
            self._originals.add(rope["original_max_position_embeddings"])
            short, long = rope.get("short_mscale"), rope.get("long_mscale")
            if short != long:
                raise TargetError(
                    f"{name}'s long_mscale must be its short_mscale, {short}, got {long}. Choose "
                    "another model."
                )

    def shortest_alike(self, text_len: int) -> int:
        """The smallest length of a text with the same frequencies as one of `text_len`.

        Example: the original context is 4096; 100 → 1, 4096 → 1, 5000 → 4097.
        """
        return 1 + max((length for length in self._originals if length < text_len), default=0)

    @contextlib.contextmanager
    def using(self, text_len: int) -> Iterator[None]:
        """A context whose forwards have the frequencies of a text of this length."""
        types = {module: module.rope_type for module, _ in self._embeddings}
        for module, kind in self._embeddings:  # transformers chooses them
            last = torch.full((1, 1), text_len - 1, device=next(module.buffers()).device)
            module(last.float(), last, *kind)
        for module, name in types.items():  # and keeps them
            module.rope_type = (
                "default" if isinstance(name, str) else dict.fromkeys(name, "default")
            )
        try:
            yield
        finally:
            for module, name in types.items():
                module.rope_type = name


def _layer_types(module: Any) -> list[tuple[str, ...]]:
    """What selects each LongRoPE embedding of a module: its layer type, or nothing."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return [(layer_type,) for layer_type, name in rope_type.items() if name == "longrope"]
    return [()] if rope_type == "longrope" else []
