"""Matrix products `x Wᵀ + b` with W in the layout that the processor's kernels want.

oneDNN reorders a plain matrix on every call, which for few rows takes longer than the product.
Here it is reordered once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

PROBE = 48
"""Rows and columns of the matrix that tells whether packed products are right here."""


class Projection(Protocol):
    """A product with one matrix `(out, in)`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`(rows, in)` → `(rows, out)`."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual` `(rows, out)`."""

    def weight(self) -> Tensor:
        """The plain matrix, made anew where it is not held."""


class PlainProjection:
    """The matrix as it is: where there is no better kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias).add_(residual)

    def weight(self) -> Tensor:
        return self._weight


class PackedProjection:
    """The matrix in oneDNN's layout; bias and residual are added within the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return out

    def weight(self) -> Tensor:
        plain: Tensor = self._packed.to_dense()
        return plain


@torch.inference_mode()
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed products exist for this dtype here, and agree with plain ones."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(2, PROBE, PROBE, generator=generator).to(dtype).unbind()
    bias, residual = weight[0], weight[:3]
    try:
        packed = PackedProjection(weight, bias)
        found = packed.plus(x[:3], residual)
    except (RuntimeError, AttributeError):
        return False
    expected = linear(x[:3].float(), weight.float(), bias.float()) + residual.float()
    near = torch.allclose(found.float(), expected, rtol=0.02, atol=0.2)
    return near and torch.equal(packed.weight(), weight)
