"""Stacks matrices that read the same rows, and leaves shares of them in the model.

Query, key and value are one product instead of three, gate and up one instead of two. The model's
own `nn.Linear`s become shares of the stack: nothing is held twice, transformers' modules work as
before, and so does all that reads `weight`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.kernels.cpu.projections import Projection

Pack = Callable[[Tensor, Tensor | None], Projection]
"""Makes a projection of a matrix `(out, in)` and a bias `(out,)`."""


class Stack:
    """One projection that stands for several `nn.Linear`s.

    transformers calls the shares one after another with the same tensor: the product is made at
    the first call and let go after the last.
    """

    def __init__(self, projection: Projection, sizes: Sequence[int]) -> None:
        self.projection = projection
        self.sizes = tuple(sizes)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        """What the `index`-th of the stacked matrices makes of `x` `(…, in)`."""
        if self._input is not x:
            rows = self.projection(x.reshape(-1, x.shape[-1]))
            self._input, self._parts = x, rows.unflatten(0, x.shape[:-1]).split(self.sizes, dim=-1)
        part = self._parts[index]
        if index == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return part

    def weight(self, index: int) -> Tensor:
        start = sum(self.sizes[:index])
        return self.projection.weight()[start : start + self.sizes[index]]


class Share(nn.Module):
    """Stands where an `nn.Linear` was whose matrix is now part of a stack.

    A deep copy is a plain `nn.Linear` again. Moving it to another dtype or device is refused.
    """

    def __init__(self, stack: Stack, index: int, plain: nn.Linear, *, keep: bool) -> None:
        """`keep`: hold the plain matrix too, where others read it or hold it anyway."""
        super().__init__()
        self._stack, self._index = stack, index
        # In a tuple, so that it is no parameter of this module: somebody else's already is.
        self._kept = (plain.weight,) if keep else ()
        self.bias = plain.bias
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        return self._kept[0] if self._kept else self._stack.weight(self._index)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        return self._stack.part(x, self._index)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        if self._kept:
            plain.weight = copy.deepcopy(self._kept[0], memo)
        else:
            plain.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        plain.bias = copy.deepcopy(self.bias, memo)
        return plain

    def _apply(self, fn: Any, recurse: bool = True) -> Share:
        raise TypeError(
            "A model with packed weights cannot change its dtype or device. Load it again, or "
            "change a deep copy of it."
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach()


def stack(owner: nn.Module, names: Sequence[str], pack: Pack, *, keep: bool = False) -> Projection:
    """Stack these `nn.Linear`s of a module and put shares in their places."""
    linears: list[nn.Linear] = [getattr(owner, name) for name in names]
    weights = [one.weight.detach() for one in linears]
    biases = [one.bias for one in linears]
    bias = None
    if any(b is not None for b in biases):
        parts = zip(biases, weights, strict=True)
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for b, w in parts])
    whole = Stack(
        pack(weights[0] if len(weights) == 1 else torch.cat(weights), bias),
        [one.out_features for one in linears],
    )
    for index, (name, one) in enumerate(zip(names, linears, strict=True)):
        setattr(owner, name, Share(whole, index, one, keep=keep))
    return whole.projection
