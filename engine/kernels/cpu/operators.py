"""Single operators of `native.cpp`: products with packed matrices, and the most probable tokens.

The kernels read a matrix in blocks of 16 of its rows; `formats.h` says how each format lies there.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.kernels.cpu.compile import has_rare, loaded_library
from engine.kernels.cpu.gguf import GGUFFile, RawTensor
from engine.kernels.cpu.memory import zeros
from engine.kernels.cpu.weights import replace_linears
from engine.model.packed import PackedEmbedding, PackedLinear

if TYPE_CHECKING:  # seconds of importing, which the page's start does without
    from transformers import PreTrainedModel

LANES = 16
EVEN = 32
"""Layers and heads must be a multiple of this wide."""
BLOCK, BLOCK_BYTES = 32, 16
"""Activations under one scale, and bytes of a `Block` in the kernels."""
FORMATS = {16: 0, 4: 1, 8: 2}
"""Bits → `Format` in the kernels, of what is made on loading."""
FILE_FORMATS = {0: 0, 1: 0, 30: 0, 2: 3, 3: 1, 8: 4, 6: 5, 7: 6}
FILE_FORMATS |= {10: 7, 11: 8, 12: 9, 13: 10, 14: 11, 20: 12, 23: 13}
"""GGML's number of a type → the `Format` that holds it in its own width."""
COMMON = 4
"""Formats up to this one are compiled with the forward, the others when a model has one."""
FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""GGML's numbers of dtypes."""
MOST = 64
"""More than so many most probable tokens are sorted faster by torch."""


class MatrixStruct(Structure):
    """`Matrix` of the kernels."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("out", c_int32),
        ("columns", c_int32),
        ("format", c_int32),
        ("unused", c_int32),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix.

    Attributes:
        shape: `(out, in)` without what fills up the last blocks.
        format: `Format` in the kernels.
        bias: `(out,)` float32, filled up to whole blocks like the rows.
        packed: uint8.
    """

    kernels: ctypes.CDLL
    shape: tuple[int, int]
    format: int
    bias: Tensor | None
    packed: Tensor

    @classmethod
    def of(
        cls, kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, bits: int = 16
    ) -> Matrix:
        """Pack floats `(out, in)`: in bfloat16, or rounded to 8 or 4 bits.

        Quantized ones have a scale and a minimum per 32 columns, from least to largest value.
        """
        weight = weight.detach().contiguous()
        if weight.dtype not in FLOATS:
            weight = weight.float()
        matrix = cls._empty(kernels, (len(weight), weight.shape[1]), FORMATS[bits], bias)
        matrix._fill(FLOATS[weight.dtype], weight.data_ptr(), weight.stride(0) * weight.itemsize)
        return matrix

    @classmethod
    def of_file(
        cls,
        kernels: ctypes.CDLL,
        tensor: RawTensor,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
    ) -> Matrix | None:
        """Pack a matrix of a file in its own width; None if the kernels do not have its type.

        Args:
            order: `(out,)` int64, the file's row that each row is; None = as they are.
        """
        form = FILE_FORMATS.get(tensor.kind)
        if form is None or (form > COMMON and not has_rare(kernels)):
            return None
        out, columns = tensor.shape
        matrix = cls._empty(kernels, (out, columns), form, bias)
        order = None if order is None else order.contiguous()
        matrix._fill(tensor.kind, tensor.data.ctypes.data, tensor.data.shape[1], order)
        return matrix

    @classmethod
    def _empty(
        cls, kernels: ctypes.CDLL, shape: tuple[int, int], form: int, bias: Tensor | None
    ) -> Matrix:
        filled = None
        if bias is not None:
            filled = torch.nn.functional.pad(bias.detach().float(), (0, -shape[0] % LANES))
        none = cls(kernels, shape, form, filled, torch.empty(0, dtype=torch.uint8))
        return replace(none, packed=zeros(kernels.packed_bytes(ctypes.byref(none.struct))))

    def _fill(self, kind: int, data: int, row_bytes: int, order: Tensor | None = None) -> None:
        self.kernels.pack(
            ctypes.byref(self.struct),
            kind,
            c_void_p(data),
            c_int64(row_bytes),
            *self.shape,
            None if order is None else c_void_p(order.data_ptr()),
            torch.get_num_threads(),
        )

    @property
    def columns(self) -> int:
        """`in`, filled up to whole blocks."""
        return -(-self.shape[1] // EVEN) * EVEN

    @property
    def struct(self) -> MatrixStruct:
        """For the kernels; valid as long as this matrix is."""
        bias = None if self.bias is None else self.bias.data_ptr()
        out = -(-self.shape[0] // LANES) * LANES
        return MatrixStruct(self.packed.data_ptr(), bias, out, self.columns, self.format, 0)

    def product(self, x: Tensor) -> Tensor:
        """`(n, in)` bfloat16 → `(n, out)` float32."""
        lacking = self.columns - x.shape[1]
        x = torch.nn.functional.pad(x, (0, lacking)) if lacking else x.contiguous()
        struct = self.struct
        y = torch.empty(len(x), struct.out)
        size = 0 if self.format == FORMATS[16] else x.numel()
        integers = torch.empty(size + size // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
        self.kernels.linear(
            ctypes.byref(struct),
            c_void_p(x.data_ptr()),
            c_void_p(integers.data_ptr()),
            c_void_p(integers.data_ptr() + size),
            c_void_p(y.data_ptr()),
            len(x),
            torch.get_num_threads(),
        )
        return y[:, : self.shape[0]]

    def rows(self, index: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Rows `(n, in)`, unpacked to bfloat16 or float32; None = all.

        Raises IndexError: there is no such row.
        """
        if index is not None and len(index):
            least, most = index.aminmax()
            if least < 0 or most >= self.shape[0]:
                raise IndexError(f"rows must be in [0, {self.shape[0]})")
        count = self.shape[0] if index is None else len(index)
        index = None if index is None else index.to(torch.int64).contiguous()
        values = torch.empty(count, self.shape[1], dtype=dtype)
        at = c_void_p(values.data_ptr())
        self.kernels.unpack(
            ctypes.byref(self.struct),
            None if index is None else c_void_p(index.data_ptr()),
            c_int64(count),
            self.shape[1],
            None if dtype == torch.float32 else at,
            at if dtype == torch.float32 else None,
            torch.get_num_threads(),
        )
        return values


class NativeLinear(PackedLinear):
    """A matrix that the compiled kernels multiply."""

    def __init__(self, plain: nn.Linear, matrix: Matrix, *, keep: bool = False) -> None:
        super().__init__(plain, keep=keep)
        self.matrix = matrix

    @property
    def num_bytes(self) -> int:
        return self.matrix.packed.nbytes

    def float_product(self, x: Tensor) -> Tensor:
        """As `product`, in float32."""
        return self.matrix.product(x)

    def product(self, x: Tensor) -> Tensor:
        return self.float_product(x).to(x.dtype)

    def unpacked(self) -> Tensor:
        return self.matrix.rows()

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(ids) if self._kept else self.matrix.rows(ids)


class NativeEmbedding(PackedEmbedding):
    """An embedding whose rows the compiled kernels unpack."""

    def __init__(self, plain: nn.Embedding, matrix: Matrix) -> None:
        super().__init__(plain)
        self.matrix = matrix

    @property
    def num_bytes(self) -> int:
        return self.matrix.packed.nbytes

    def rows(self, ids: Tensor | None) -> Tensor:
        return self.matrix.rows(ids)


def wants_rare(file: GGUFFile) -> bool:
    """Whether a file has matrices in formats that `whole_library` has and `library` has not."""
    return any(FILE_FORMATS.get(kind, 0) > COMMON for kind in file.matrix_kinds)


def pack_native(model: PreTrainedModel, kernels: ctypes.CDLL, bits: int) -> None:
    """Let the kernels multiply a model's matrices, in bfloat16 or rounded to 8 or 4 bits.

    The output matrix has 8 bits at least: it moves the probabilities most.
    """
    output = model.get_output_embeddings()
    embedding = getattr(model.get_input_embeddings(), "weight", None)

    def make(_name: str, plain: nn.Linear) -> NativeLinear:
        own_bits = max(bits, 8) if plain is output else bits
        matrix = Matrix.of(kernels, plain.weight, plain.bias, bits=own_bits)
        keep = plain.weight is embedding or (plain is output and bits == 16)
        return NativeLinear(plain, matrix, keep=keep)

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
    return NativeLinear(plain, Matrix.of(kernels, weight, bias, bits=8))


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
