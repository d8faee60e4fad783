"""Optimizers of a training run: AdamW, or Muon for matrices between hidden vectors.

Sources: arXiv:1711.05101 (AdamW); Muon: https://kellerjordan.github.io/posts/muon/ and
arXiv:2502.16982, section 2.2 (its rate, scaled so that updates are as large as AdamW's).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

Name = Literal["adamw", "muon"]
_VOCABULARY = ("lm_head", "output", "embed_tokens")
"""Modules with a row per token: their rows are vectors of their own, which AdamW suits better."""


class Optimizers:
    """All of a student's parameters, each with the optimizer that suits it."""

    def __init__(self, student: nn.Module, name: Name, *, weight_decay: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for key, parameter in student.named_parameters():
            inner = parameter.ndim == 2 and key.split(".")[-2:-1] not in [[v] for v in _VOCABULARY]
            (matrices if name == "muon" and inner else others).append(parameter)
        self._all: list[Optimizer] = []
        if matrices:
            muon = Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._all.append(muon)
        if others:
            self._all.append(_adamw(others, weight_decay))

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self._all:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: names are those of the optimizers."""
        return {type(one).__name__: one.state_dict() for one in self._all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave for the same student and settings."""
        for optimizer in self._all:
            optimizer.load_state_dict(state[type(optimizer).__name__])


def _adamw(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> AdamW:
    return AdamW(parameters, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
