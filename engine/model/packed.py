"""Modules whose matrices are held in a layout of their own, in the places of a model's own modules.

No matrix is held twice, and a module's call and its `weight` work as before: who asks for floats
has them unpacked.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Packed(nn.Module, ABC):
    """Stands where a module of a model was, whose matrix is held in a layout of its own.

    A deep copy is a plain module again. Moving it to another dtype or device is refused.
    """

    by_kernels: bool

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of the packed matrix."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Numbers of the packed matrix."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The plain matrix, made anew unless it is held anyway."""

    def _apply(self, fn: Any, recurse: bool = True) -> Packed:
        raise TypeError(
            "A model with packed weights cannot change its dtype or device. Load it again, or "
            "change a deep copy of it."
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach()


class PackedLinear(Packed):
    """Stands where an `nn.Linear` was, whose matrix a kernel multiplies."""

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        """`keep`: hold the plain matrix too, where others read its rows or hold it anyway."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self._bias = None if plain.bias is None else plain.bias.detach()
        # In a tuple, so that it is no parameter of this module: somebody else's already is.
        self._kept = (plain.weight,) if keep else ()
        self.by_kernels = True

    @property
    def num_weights(self) -> int:
        return 0 if self._kept else self.in_features * self.out_features

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """`(rows, in)` → `(rows, out)`, bias included."""

    @abstractmethod
    def unpacked(self) -> Tensor:
        """The plain matrix, made anew."""

    @property
    def weight(self) -> Tensor:
        return self._kept[0] if self._kept else self.unpacked()

    def rows(self, ids: Tensor) -> Tensor:
        """`(n,)` outputs → `(n, in)`, their rows of the plain matrix."""
        return self.weight[ids]

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_kernels or (x.requires_grad and torch.is_grad_enabled()):
            return linear(x, self.weight, self.bias)
        rows = self.product(x.reshape(-1, self.in_features))
        return rows.view(*x.shape[:-1], self.out_features)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        if self._kept:
            plain.weight = copy.deepcopy(self._kept[0], memo)
        else:
            plain.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        plain.bias = copy.deepcopy(self.bias, memo)
        return plain


class PackedEmbedding(Packed):
    """Stands where an `nn.Embedding` was, or one that multiplies its rows by `embed_scale`."""

    def __init__(self, plain: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self._template = (plain,)  # in a tuple: no module of this one
        self.by_kernels = True

    @property
    def num_weights(self) -> int:
        return self.num_embeddings * self.embedding_dim

    @abstractmethod
    def rows(self, ids: Tensor | None) -> Tensor:
        """`(n,)` tokens → `(n, hidden)`, unscaled; None = all."""

    @property
    def weight(self) -> Tensor:
        return self.rows(None)

    @property
    def scale(self) -> float:
        return float(getattr(self._template[0], "scalar_embed_scale", 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids.flatten()).view(*ids.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Embedding:
        plain = copy.deepcopy(self._template[0], memo)
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        return plain


def weight_of(module: nn.Module) -> Tensor:
    """A module's matrix, as a constant; a packed one is unpacked for it."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def rows_of(module: nn.Module, ids: Tensor) -> Tensor:
    """Rows `(n, in)` of a module's matrix; of a packed one, only they are unpacked."""
    if isinstance(module, PackedLinear | PackedEmbedding):
        return module.rows(ids)
    return weight_of(module)[ids]


def num_weights(model: nn.Module) -> int:
    """Parameters of a model, packed ones included."""
    packed = sum(module.num_weights for module in _packed_once(model))
    return packed + sum(p.numel() for p in model.parameters())


def packed_bytes(model: nn.Module) -> int:
    """Bytes of a model's packed matrices."""
    return sum(module.num_bytes for module in _packed_once(model))


def _packed_once(model: nn.Module) -> Iterable[Packed]:
    """Packed modules; of those that share a matrix the first."""
    modules = [module for module in model.modules() if isinstance(module, Packed)]
    return {id(getattr(module, "matrix", module)): module for module in reversed(modules)}.values()
