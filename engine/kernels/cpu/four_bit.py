"""Products with matrices in 4 bits, by torch's packed kernel for few rows and in bfloat16 for many.

The kernel unpacks codes on the fly and multiplies in float32, so a plain step reads a quarter of
the bytes; from some number of rows on the bfloat16 product is faster. Both hold the same matrix:
the first with its scales rounded to bfloat16, the second with its values rounded to bfloat16.
Either way a value moves by at most 1/32 of the step between two codes and 1/256 of the block's
middle value; on random rows the products differ from the exact ones by 0.2 % (bfloat16: 0.14 %).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.projections import Projection
from engine.model.gguf import BLOCK, Blocks

MIDDLE = 8
"""The kernel's zero point: value = (code - 8) · scale + zero."""
CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Row counts at which the two kernels are timed."""
PASSES = 5
"""Each kernel's shortest of so many turns counts: a busy machine only ever adds time."""
EVERY = 1 << 30
"""More rows than any forward has."""


class FourBitProjection:
    """A matrix in 4 bits, and perhaps in bfloat16 for many rows.

    Attributes:
        many: the product for more than `few` rows; None = 4 bits for all.
    """

    def __init__(self, blocks: Blocks, bias: Tensor | None, many: Projection | None) -> None:
        codes = blocks.codes.to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        zero = blocks.minimum + MIDDLE * blocks.scale
        pairs = torch.stack([blocks.scale.t(), zero.t()], dim=-1)
        self._scales = pairs.to(torch.bfloat16).contiguous()
        self._bias = bias
        self.columns = blocks.codes.shape[1]
        self.many = many
        self.few = EVERY

    def __call__(self, x: Tensor) -> Tensor:
        if self.many is not None and len(x) > self.few:
            return self.many(x)
        return self._unpack(x)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.many is not None and len(x) > self.few:
            return self.many.plus(x, residual)
        return self._unpack(x).add_(residual)

    def weight(self) -> Tensor:
        if self.many is not None:
            return self.many.weight()
        return self._product(torch.eye(self.columns, dtype=torch.bfloat16)).t().contiguous()

    def _unpack(self, x: Tensor) -> Tensor:
        out = self._product(x)
        return out if self._bias is None else out.add_(self._bias)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, BLOCK, self._scales
        )
        return out


def fits_kernel(blocks: Blocks) -> bool:
    """Whether torch's kernel takes a matrix of this shape."""
    rows, columns = blocks.codes.shape
    return rows % 16 == 0 and columns % BLOCK == 0


@torch.inference_mode()
def crossover(matrices: Sequence[FourBitProjection]) -> int:
    """Up to how many rows 4 bits are faster, timed on these matrices one after another.

    0 = never, `EVERY` where there is no other kernel. Changes `few` of the matrices.
    """
    if any(matrix.many is None for matrix in matrices):
        return EVERY
    few = 0
    for rows in CANDIDATES:
        inputs = [torch.zeros(rows, matrix.columns, dtype=torch.bfloat16) for matrix in matrices]
        four, many = [], []
        for _ in range(PASSES):
            four.append(_seconds(matrices, inputs, few=EVERY))
            many.append(_seconds(matrices, inputs, few=0))
        if min(four) >= min(many):
            break
        few = rows
    return few


def _seconds(matrices: Sequence[FourBitProjection], inputs: Sequence[Tensor], *, few: int) -> float:
    for matrix in matrices:
        matrix.few = few
    begin = time.perf_counter()
    for matrix, x in zip(matrices, inputs, strict=True):
        matrix(x)
    return time.perf_counter() - begin
