"""Weights in the layout that a processor's kernels want, in the places of a model's own modules.

oneDNN reorders a plain matrix on every call, which for few rows takes longer than the product; here
it is reordered once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.model.packed import PackedLinear

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel


class OneDNNLinear(PackedLinear):
    """A matrix in oneDNN's layout."""

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        super().__init__(plain, keep=keep)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    @property
    def num_bytes(self) -> int:
        return int(self._packed.nbytes)

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def unpacked(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in this dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def replace_linears(
    model: PreTrainedModel, make: Callable[[str, nn.Linear], PackedLinear | None]
) -> None:
    """Put packed matrices in the places of a model's linear modules.

    Args:
        make: from a module's name within the model and itself; None = it stays.
    """
    for parent, owner in list(model.named_modules()):
        for name, plain in list(owner.named_children()):
            packed = make(f"{parent}.{name}", plain) if type(plain) is nn.Linear else None
            if packed is not None:
                setattr(owner, name, packed)


def pack(model: PreTrainedModel) -> None:
    """Let oneDNN reorder the model's matrices, where it has products in their dtype.

    The output matrix is held both packed and plain: embedding, drafters and trainers read its rows.
    """
    if can_pack(model.dtype):
        output = model.get_output_embeddings()
        replace_linears(model, lambda name, plain: OneDNNLinear(plain, keep=plain is output))
