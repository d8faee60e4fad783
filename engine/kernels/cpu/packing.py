"""Chooses the kernels of a model's matrices and packs them: floats as they are, or 4-bit blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import TargetError
from engine.kernels.cpu.four_bit import EVERY, FourBitProjection, crossover, fits_kernel
from engine.kernels.cpu.gguf_matrices import GGUFMatrices
from engine.kernels.cpu.native import BlockProjection, HalfProjection
from engine.kernels.cpu.projections import PackedProjection, PlainProjection, Projection, can_pack
from engine.kernels.cpu.shares import Pack, stack

TIMED = 32
"""Matrices that kernels are timed on: enough to exceed a core's own cache, done in a blink."""


NOTHING_IN_4_BITS = (
    "dtype q4 runs matrices that a GGUF file holds in 4 bits (Q4_0, Q4_1, Q4_K), but this one has "
    "none that fit. Choose bfloat16 or float32."
)


class Packer:
    """Chooses the kernels of a model's matrices.

    Attributes:
        pack: of a matrix that is held as floats.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.pack: Pack = PackedProjection if can_pack(dtype) else PlainProjection

    def layer(self, owner: Any, layer: int, names: Sequence[str]) -> Projection:
        """Stack these linear modules of a decoder layer."""
        return stack(owner, names, self.pack)

    def finish(self) -> str:
        """Settle what all matrices together decide; returns what the log calls the result."""
        return "fused, packed" if self.pack is PackedProjection else "fused"


class NativePacker(Packer):
    """For the compiled kernels; matrices that a GGUF file has in 4 bits stay that way."""

    def __init__(self, kernels: ctypes.CDLL, matrices: GGUFMatrices | None = None) -> None:
        self.pack = lambda weight, bias: HalfProjection(kernels, weight, bias)
        self.kernels = kernels
        self._matrices = matrices
        self._num_four_bit = 0

    def layer(self, owner: Any, layer: int, names: Sequence[str]) -> Projection:
        blocks = None if self._matrices is None else self._matrices.find(owner, layer, names)
        if blocks is None:
            return super().layer(owner, layer, names)
        self._num_four_bit += 1
        found = blocks
        return stack(owner, names, lambda _, bias: BlockProjection(self.kernels, found, bias))

    def finish(self) -> str:
        """Raises TargetError: nothing is in 4 bits, but should be."""
        if self._matrices is None:
            return "native"
        if not self._num_four_bit:
            raise TargetError(NOTHING_IN_4_BITS)
        return "native, q4"


class FourBitPacker(Packer):
    """Keeps the matrices that a GGUF file has in 4 bits that way, for torch's kernel."""

    def __init__(self, matrices: GGUFMatrices, *, keep_many: bool) -> None:
        """`keep_many`: hold them in bfloat16 too, for forwards over many rows."""
        super().__init__(torch.bfloat16)
        self._matrices = matrices
        self._keep_many = keep_many
        self._packed: list[FourBitProjection] = []

    def layer(self, owner: Any, layer: int, names: Sequence[str]) -> Projection:
        blocks = self._matrices.find(owner, layer, names)
        if blocks is None or not fits_kernel(blocks):
            return super().layer(owner, layer, names)

        def pack(weight: Tensor, bias: Tensor | None) -> Projection:
            many = self.pack(weight, bias) if self._keep_many else None
            self._packed.append(FourBitProjection(blocks, bias, many))
            return self._packed[-1]

        return stack(owner, names, pack)

    def finish(self) -> str:
        """Choose the kernel of every number of rows.

        Raises:
            TargetError: there is nothing in 4 bits, or no kernel for it that is worth using.
        """
        if not self._packed:
            raise TargetError(NOTHING_IN_4_BITS)
        few = crossover(self._packed[:TIMED])
        for matrix in self._packed:
            matrix.few = few
        if few == 0:
            raise TargetError(
                "dtype q4 is slower than bfloat16 on this processor even for one row. "
                "Choose bfloat16 or float32."
            )
        return "fused, q4" if few == EVERY else f"fused, q4 up to {few} rows"
