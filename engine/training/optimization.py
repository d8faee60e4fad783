"""Learning rate schedule, moving average of weights, and memory allocation."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.training.recipe import TrainSettings


def learning_rate_at(step: int, num_steps: int, settings: TrainSettings) -> float:
    """The learning rate: linear warmup, then cosine decay."""
    warmup = max(1, round(settings.warmup_share * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    low = settings.final_rate_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


class AveragedWeights:
    """An exponential moving average of a module's parameters; none with decay 0."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self.values = self._copy() if decay else {}

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._module.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        # A smaller decay in the first steps, so that the initial weights fade.
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self.values.items():
            average.lerp_(self._module.get_parameter(name), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context within which the module has the averaged weights."""
        trained = self._copy() if self.values else {}
        self._module.load_state_dict(self.values, strict=False)
        try:
            yield
        finally:
            self._module.load_state_dict(trained, strict=False)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory in the process; False with another C library.

    glibc returns every block above a few hundred KiB to the system at once, and the next step,
    which allocates the same arrays, spends more time on page faults than on computing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, largest = -3, 32 << 20  # as much as glibc allows
    trim_threshold, never = -1, (1 << 31) - 1
    return bool(mallopt(mmap_threshold, largest) and mallopt(trim_threshold, never))
