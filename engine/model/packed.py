"""Modules with packed weight matrices, which replace a model's own linear and embedding modules.

No matrix is stored twice. Calling a module and reading its `weight` work as before: reading unpacks
the matrix.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.model.placement import in_memory


class Packed(nn.Module):
    """Replaces a module whose matrices are packed.

    A deep copy is a plain module again. Moving it to another dtype or device is refused.

    Attributes:
        num_weights: of the packed matrices; 0 if the plain ones are kept, too.
    """

    num_weights: int

    def _apply(self, fn: Any, recurse: bool = True) -> Packed:
        raise TypeError(
            "A model with packed weights cannot change its dtype or device. Load it again, or "
            "change a deep copy of it."
        )


class PackedMatrix(Packed, ABC):
    """Replaces a module whose `weight` is a packed matrix."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The plain matrix, unpacked unless it is kept."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the plain matrix: `(n,)` → `(n, in)`."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach()


class PackedLinear(PackedMatrix):
    """Replaces an `nn.Linear` whose matrix a kernel multiplies."""

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        """`keep`: keep the plain matrix too, which other modules read or share."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self._bias = None if plain.bias is None else plain.bias.detach()
        # In a tuple, so that it is not registered here: it is another module's parameter.
        self._kept = (plain.weight,) if keep else ()
        self.num_weights = 0 if keep else self.in_features * self.out_features
        self.uses_kernels = True  # else the unpacked matrix is multiplied

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """`(rows, in)` → `(rows, out)`, bias included."""

    @abstractmethod
    def unpack(self) -> Tensor:
        """The plain matrix, unpacked."""

    @property
    def weight(self) -> Tensor:
        return self._kept[0] if self._kept else self.unpack()

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    def forward(self, x: Tensor) -> Tensor:
        if not self.uses_kernels or (x.requires_grad and torch.is_grad_enabled()):
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


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A module's matrix, detached; a packed one is unpacked, one that is on disk is read."""
    with in_memory(module):
        weight = getattr(module, name)
    assert isinstance(weight, Tensor)
    return weight.detach()


def weight_rows(module: nn.Module, ids: Tensor, name: str = "weight") -> Tensor:
    """Rows `(n, …)` of a module's matrix, on the device of `ids`; only these are unpacked."""
    if isinstance(module, PackedMatrix) and name == "weight":
        return module.rows(ids)
    weight = weight_of(module, name)
    return weight[ids.to(weight.device)].to(ids.device)


def num_weights(model: nn.Module) -> int:
    """Number of a model's parameters, packed ones included; a shared matrix counts once."""
    modules = [module for module in model.modules() if isinstance(module, Packed)]
    once = {id(getattr(module, "matrix", module)): module for module in reversed(modules)}
    packed = sum(module.num_weights for module in once.values())
    return packed + sum(p.numel() for p in model.parameters())


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that checkpoints store, by name."""
    names = [
        f"{owner}.{name}".lstrip(".")
        for owner, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]
    return {name: value for name, value in model.named_buffers() if name not in names}


class OneDNNLinear(PackedLinear):
    """A matrix in oneDNN's layout.

    oneDNN reorders a plain matrix on every call, which for few rows takes longer than the product.
    """

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        super().__init__(plain, keep=keep)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def unpack(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], PackedLinear | None]) -> None:
    """Replace linear modules by packed ones; where `make` returns None, a module stays."""
    for owner in list(module.modules()):
        for name, plain in list(owner.named_children()):
            packed = make(plain) if type(plain) is nn.Linear else None
            if packed is not None:
                setattr(owner, name, packed)


def pack(model: transformers.PreTrainedModel) -> None:
    """Let oneDNN reorder the model's matrices, whose dtype it supports (`can_pack`).

    The output matrix is kept packed and plain: embedding, drafters and trainers read its rows.
    """
    output = model.get_output_embeddings()
    replace_linears(model, lambda plain: OneDNNLinear(plain, keep=plain is output))
