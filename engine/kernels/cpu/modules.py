"""Lets the compiled kernels multiply for other modules than the target's: a drafter's heads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from engine.kernels.cpu.native import EVEN, HalfProjection


class NativeLinear(nn.Module):
    """Stands where an `nn.Linear` in bfloat16 was; for inference only."""

    def __init__(self, plain: nn.Linear, kernels: ctypes.CDLL) -> None:
        super().__init__()
        bias = None if plain.bias is None else plain.bias.detach()
        self._projection = HalfProjection(kernels, plain.weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """`(…, in)` → `(…, out)`."""
        rows = self._projection(x.reshape(-1, x.shape[-1]))
        out: Tensor = rows.unflatten(0, x.shape[:-1])
        return out


def hasten(module: nn.Module, kernels: ctypes.CDLL | None) -> None:
    """Pack the linear layers of a module that is done with training.

    Args:
        kernels: as `Target.kernels`; None = change nothing.
    """
    if kernels is None:
        return
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, nn.Linear) and _fits(child):
                setattr(owner, name, NativeLinear(child, kernels))


def _fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    on_cpu = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return on_cpu and linear.in_features % EVEN == 0
