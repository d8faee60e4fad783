"""Single operators of `native.cpp`: products with packed matrices, and the most probable tokens.

The kernels read a matrix `(out, in)` in blocks of 16 of its rows, so that one instruction meets 16
columns of the product:

    bfloat16      (out / 16, in / 2, 16, 2)
    8 or 4 bits   (out / 16, bytes): scales and minima `(2, in / 32, 16)` in float16, then integers
                  `(in / 4, 16, 4)`; those of 4 bits two to a byte, `(in / 8, 16, 4)`: the low one
                  of the first four columns, the high one of the other four
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.kernels.cpu.compile import loaded_library
from engine.kernels.cpu.gguf import BLOCK, QuantizedMatrix
from engine.kernels.cpu.weights import PackedLinear, QuantizedWeights, replace_linears

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LANES = 16
EVEN = 32
"""Layers and heads must be a multiple of this wide."""
BLOCK_BYTES = 16
"""Of a `Block` in the kernels."""
MOST = 64
"""More than so many most probable tokens are sorted faster by torch."""


class MatrixStruct(Structure):
    """`Matrix` of the kernels."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("out", c_int32),
        ("columns", c_int32),
        ("bits", c_int32),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix; parts of it that begin at a whole block share its memory.

    Attributes:
        packed: `(out / 16, …)` bfloat16 or uint8, see above.
        bias: `(out,)` float32, filled up to whole blocks like the rows.
        columns: `in`, filled up to whole blocks.
        bits: of a stored number: 16, 8 or 4.
    """

    packed: Tensor
    bias: Tensor | None
    columns: int
    bits: int

    @classmethod
    def of(cls, weight: Tensor | QuantizedMatrix, bias: Tensor | None) -> Matrix:
        """Pack a matrix in bfloat16, or a quantized one as stored but for float16 scales."""
        filled = None if bias is None else _fill(bias.detach().float())
        if isinstance(weight, Tensor):
            weight = _fill_columns(weight)
        if isinstance(weight, QuantizedMatrix):
            return cls(_pack_quantized(weight), filled, weight.integers.shape[1], weight.bits)
        return cls(_pack_bfloat16(weight), filled, weight.shape[1], 16)

    @property
    def struct(self) -> MatrixStruct:
        """For the kernels; valid as long as this matrix is."""
        bias = None if self.bias is None else self.bias.data_ptr()
        out = len(self.packed) * LANES
        return MatrixStruct(self.packed.data_ptr(), bias, out, self.columns, self.bits, 0)

    def split(self, rows: Sequence[int]) -> list[Matrix]:
        """Parts of so many rows each; all but the last are whole blocks."""
        blocks = [-(-count // LANES) for count in rows]
        packed = self.packed.split(blocks)
        if self.bias is None:
            return [replace(self, packed=part) for part in packed]
        biases = self.bias.split([count * LANES for count in blocks])
        return [
            replace(self, packed=part, bias=bias) for part, bias in zip(packed, biases, strict=True)
        ]

    def product(self, kernels: ctypes.CDLL, x: Tensor) -> Tensor:
        """`(n, in)` bfloat16 → `(n, out)` float32, `out` filled up to whole blocks."""
        x = _fill_columns(x).contiguous()
        y = torch.empty(len(x), len(self.packed) * LANES)
        size = 0 if self.bits == 16 else x.numel()
        integers = torch.empty(size + size // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
        kernels.linear(
            ctypes.byref(self.struct),
            c_void_p(x.data_ptr()),
            c_void_p(integers.data_ptr()),
            c_void_p(integers.data_ptr() + size),
            c_void_p(y.data_ptr()),
            len(x),
            torch.get_num_threads(),
        )
        return y

    def unpacked(self) -> Tensor:
        """The plain matrix in bfloat16, rows that fill the last block included."""
        if self.bits == 16:
            return self.packed.transpose(1, 2).reshape(-1, self.columns)
        factors = self.packed[:, : 2 * self.columns].contiguous().view(torch.float16).float()
        scale, minimum = factors.view(-1, 2, self.columns // BLOCK, LANES).permute(1, 0, 3, 2)
        integers = self.packed[:, 2 * self.columns :]
        if self.bits == 4:
            pairs = integers.view(len(integers), -1, 1, LANES, 4)
            integers = torch.cat([pairs & 15, pairs >> 4], dim=2)
        integers = (
            integers.reshape(len(integers), -1, LANES, 4).transpose(1, 2).flatten(2).flatten(0, 1)
        )
        return (
            QuantizedMatrix(integers, scale.flatten(0, 1), minimum.flatten(0, 1), self.bits)
            .dequantize()
            .to(torch.bfloat16)
        )


class NativeLinear(PackedLinear):
    """A matrix that the compiled kernels multiply."""

    def __init__(
        self, plain: nn.Linear, kernels: ctypes.CDLL, matrix: Matrix, *, keep: bool = False
    ) -> None:
        super().__init__(plain, keep=keep)
        self._kernels, self.matrix = kernels, matrix

    def float_product(self, x: Tensor) -> Tensor:
        """As `product`, in float32."""
        return self.matrix.product(self._kernels, x)[:, : self.out_features]

    def product(self, x: Tensor) -> Tensor:
        return self.float_product(x).to(x.dtype)

    def unpacked(self) -> Tensor:
        return self.matrix.unpacked()[: self.out_features, : self.in_features]


def pack_quantized(
    model: PreTrainedModel, kernels: ctypes.CDLL, quantized: QuantizedWeights
) -> None:
    """Let the kernels multiply a model's matrices as quantized."""

    def make(name: str, plain: nn.Linear) -> NativeLinear:
        matrix = Matrix.of(quantized.of(name, plain), plain.bias)
        return NativeLinear(plain, kernels, matrix, keep=quantized.keeps_plain(plain))

    replace_linears(model, make)


def pack_linears(module: nn.Module, kernels: ctypes.CDLL | None) -> None:
    """Let the kernels multiply, in 8 bits, for a module that is done with training: a drafter's.

    Args:
        kernels: as `Target.kernels`; None = change nothing.
    """
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed = packed_linear(child.weight.detach(), child.bias, kernels)
            if packed is not None:
                setattr(owner, name, packed)


def packed_linear(
    weight: Tensor, bias: Tensor | None, kernels: ctypes.CDLL | None
) -> NativeLinear | None:
    """A linear module in 8 bits; None where the kernels do not multiply.

    Args:
        weight: `(out, in)`; in other dtypes than bfloat16 it stays as it is.
    """
    if kernels is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    plain = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return NativeLinear(plain, kernels, Matrix.of(QuantizedMatrix.quantize(weight, 8), bias))


def _pack_bfloat16(weight: Tensor) -> Tensor:
    filled = _fill(weight.to(torch.bfloat16))
    return filled.view(-1, LANES, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _pack_quantized(blocks: QuantizedMatrix) -> Tensor:
    count = blocks.integers.shape[1] // BLOCK
    integers = _fill(blocks.integers).view(-1, LANES, 8 * count, 4).transpose(1, 2)
    if blocks.bits == 4:
        integers = integers[:, 0::2] | integers[:, 1::2] << 4
    factors = torch.stack([_fill(blocks.scale), _fill(blocks.minimum)]).to(torch.float16)
    factors = factors.view(2, -1, LANES, count).permute(1, 0, 3, 2).contiguous()
    return torch.cat([factors.view(torch.uint8).flatten(1), integers.flatten(1)], dim=1)


def _fill_columns(x: Tensor) -> Tensor:
    """With zero columns up to a whole block."""
    lacking = -x.shape[1] % EVEN
    return x if not lacking else torch.nn.functional.pad(x, (0, lacking))


def _fill(rows: Tensor) -> Tensor:
    lacking = -len(rows) % LANES
    if not lacking:
        return rows
    return torch.cat([rows, rows.new_zeros(lacking, *rows.shape[1:])])


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """The best k of each row, best first.

    Attributes:
        logits: `(n, k)` float32.
        ids: `(n, k)` int64.
        logsumexp: `(n, 1)` float32, logsumexp of all of the row's logits; None if not asked for.
    """

    logits: Tensor
    ids: Tensor
    logsumexp: Tensor | None

    @property
    def log_probs(self) -> Tensor:
        """`(n, k)` natural log-probabilities."""
        assert self.logsumexp is not None
        return self.logits - self.logsumexp


def topk(logits: Tensor, k: int, *, with_logsumexp: bool = True) -> Ranked:
    """The k most probable tokens of each row of `logits` `(n, vocab)`, by any kernels there are.

    Args:
        with_logsumexp: whether to compute it.
    """
    kernels = loaded_library()
    logits = logits.float()
    fits = logits.device.type == "cpu" and logits.stride(-1) == 1
    if kernels is None or not fits or not 0 < k <= min(MOST, logits.shape[-1]):
        best, ids = logits.topk(k, dim=-1)
        return Ranked(best, ids, logits.logsumexp(dim=-1, keepdim=True) if with_logsumexp else None)
    n, vocab = logits.shape
    best, logsumexp = torch.empty(n, k), torch.empty(n, 1) if with_logsumexp else None
    ids = torch.empty(n, k, dtype=torch.int64)
    kernels.topk(
        c_void_p(logits.data_ptr()),
        c_int64(logits.stride(0)),
        n,
        vocab,
        k,
        c_void_p(best.data_ptr()),
        c_void_p(ids.data_ptr()),
        None if logsumexp is None else c_void_p(logsumexp.data_ptr()),
        torch.get_num_threads(),
    )
    return Ranked(best, ids, logsumexp)
