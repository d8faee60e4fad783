"""The learning rate schedule, the moving average of weights, and the process's memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.training.recipe import TrainSettings


def learning_rate_at(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Linear warmup, then half a cosine."""
    warmup = max(1, round(settings.warmup_share * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = settings.final_rate_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


class AveragedWeights:
    """An exponential moving average of a module's parameters; decay 0 keeps none."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self.values = self._copy() if decay else {}

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._module.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        # A young average follows faster, so that the first weights fade.
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self.values.items():
            average.lerp_(self._module.get_parameter(name), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module has the averaged weights within this context."""
        trained = self._copy() if self.values else {}
        self._module.load_state_dict(self.values, strict=False)
        try:
            yield
        finally:
            self._module.load_state_dict(trained, strict=False)


def keep_freed_memory() -> bool:
    """Keep freed memory in the process from now on; False where the C library is not glibc.

    glibc returns every block above a few hundred KiB to the system at once, and the next step,
    which allocates the same arrays, spends more time on fresh pages than on their contents.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, largest = -3, 32 << 20  # as much as glibc allows
    trim_threshold, never = -1, (1 << 31) - 1
    return bool(mallopt(mmap_threshold, largest) and mallopt(trim_threshold, never))
