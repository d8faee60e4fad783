"""Single operators of `native.cpp`: matmuls with packed matrices, and top-k.

The kernels read a matrix in blocks of 16 of its rows; `formats.h` describes their layouts.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import threading
from contextlib import suppress
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from engine.kernels.cpu.compile import has_rare_formats, loaded_library
from engine.model.gguf.file import GGUFFile, RawTensor
from engine.model.packed import PackedLinear, PackedMatrix, replace_linears

LANES = 16
MULTIPLE = 32
"""Widths of layers and heads must be multiples of this."""
BLOCK, BLOCK_BYTES = 32, 16
"""Activations per scale, and bytes of a `Block` in the kernels."""
FORMATS = {16: 0, 4: 1, 8: 2}
"""Bits → `Format` in the kernels, for matrices quantized on loading."""
GGML_FORMATS = {0: 0, 1: 0, 30: 0, 2: 3, 3: 1, 8: 4, 6: 5, 7: 6}
GGML_FORMATS |= {10: 7, 11: 8, 12: 9, 13: 10, 14: 11, 20: 12, 23: 13, 39: 14}
"""GGML's type id → the `Format` of the same quantization."""
LAST_COMMON_FORMAT = 4
"""Formats up to this one are compiled with the forward, the others when a model needs one."""
FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""dtype → GGML's type id."""
MAX_K = 64
"""For a larger k, torch's topk is faster."""
HUGE_PAGE = 2 << 20
CHUNK = 32 * HUGE_PAGE
"""Bytes of a mapping shared by smaller matrices; it is freed with the last of them."""
LINE = 64

_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)


def fields(ctype: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Fields of one C type, for `_fields_`; `names` are separated by blanks."""
    return [(name, ctype) for name in names.split()]


class Struct(Structure):
    """A struct of the kernels, from values by the names of its fields; others are 0 or null.

    Tensors are passed by address, and matrices by their own structs; all live as long as it.
    """

    def __init__(self, **values: Any) -> None:
        self._alive = values
        super().__init__(**{name: _converted(value) for name, value in values.items()})


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of the kernels; tensors are passed by address, structs by reference."""
    return function(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return c_void_p(value.data_ptr())
    if isinstance(value, Matrix):
        value = value.struct
    return ctypes.byref(value) if isinstance(value, Structure) else value


def _converted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, Matrix):
        return value.struct
    return tuple(map(_converted, value)) if isinstance(value, list) else value


class MatrixStruct(Structure):
    """`Matrix` of the kernels."""

    _fields_ = [*fields(c_void_p, "data bias"), *fields(c_int32, "out columns format")]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix.

    Attributes:
        shape: `(out, in)`, without padding to whole blocks.
        format: `Format` in the kernels.
        bias: `(out,)` float32, padded to whole blocks like the rows.
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
        """Pack floats `(out, in)`: in bfloat16, or quantized to 8 or 4 bits.

        Quantized ones have a scale and a minimum per 32 columns.
        """
        weight = weight.detach().contiguous()
        if weight.dtype not in FLOAT_TYPES:
            weight = weight.float()
        bytes_of_rows = weight.view(torch.uint8).numpy()
        raw = RawTensor(FLOAT_TYPES[weight.dtype], tuple(weight.shape), bytes_of_rows)
        return cls._packed(kernels, raw, FORMATS[bits], bias)

    @classmethod
    def from_gguf(
        cls,
        kernels: ctypes.CDLL,
        tensor: RawTensor,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
    ) -> Matrix | None:
        """Pack a file's matrix in its own quantization; None if the kernels lack its type.

        Args:
            order: `(out,)` int64, the file's row for each row; None = the same.
        """
        format = GGML_FORMATS.get(tensor.type_id)
        if format is None or (format > LAST_COMMON_FORMAT and not has_rare_formats(kernels)):
            return None
        return cls._packed(kernels, tensor, format, bias, order)

    @classmethod
    def _packed(
        cls,
        kernels: ctypes.CDLL,
        tensor: RawTensor,
        format: int,
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> Matrix:
        out, columns = tensor.shape
        if bias is not None:
            bias = torch.nn.functional.pad(bias.detach().float(), (0, -out % LANES))
        empty = cls(kernels, (out, columns), format, bias, torch.empty(0, dtype=torch.uint8))
        matrix = replace(empty, packed=aligned_zeros(call(kernels.packed_bytes, empty)))
        order = None if order is None else order.contiguous()
        data, row_bytes = c_void_p(tensor.data.ctypes.data), c_int64(tensor.data.shape[1])
        rows = (data, row_bytes, out, columns, order)
        call(kernels.pack, matrix, tensor.type_id, *rows, torch.get_num_threads())
        return matrix

    @property
    def columns(self) -> int:
        """`in`, padded to whole blocks."""
        return -(-self.shape[1] // MULTIPLE) * MULTIPLE

    @property
    def struct(self) -> MatrixStruct:
        """For the kernels; valid for this matrix's lifetime."""
        bias = None if self.bias is None else self.bias.data_ptr()
        out = -(-self.shape[0] // LANES) * LANES
        return MatrixStruct(self.packed.data_ptr(), bias, out, self.columns, self.format)

    def product(self, x: Tensor) -> Tensor:
        """`(n, in)`, rounded to bfloat16 → `(n, out)` float32."""
        x, padding = x.to(torch.bfloat16), self.columns - x.shape[1]
        x = torch.nn.functional.pad(x, (0, padding)) if padding else x.contiguous()
        struct = self.struct
        y = torch.empty(len(x), struct.out)
        size = 0 if self.format == FORMATS[16] else x.numel()
        integers = torch.empty(size + size // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
        scratch = (integers, integers[size:])
        call(self.kernels.linear, struct, x, *scratch, y, len(x), torch.get_num_threads())
        return y[:, : self.shape[0]]

    def rows(self, index: Tensor | None = None) -> Tensor:
        """Rows `(n, in)`, unpacked to bfloat16; None = all.

        Raises IndexError: there is no such row.
        """
        if index is not None and len(index):
            least, most = index.aminmax()
            if least < 0 or most >= self.shape[0]:
                raise IndexError(f"rows must be in [0, {self.shape[0]})")
        count = self.shape[0] if index is None else len(index)
        index = None if index is None else index.to(torch.int64).contiguous()
        values = torch.empty(count, self.shape[1], dtype=torch.bfloat16)
        sizes = (c_int64(count), self.shape[1])
        call(self.kernels.unpack, self, index, *sizes, values, torch.get_num_threads())
        return values


def aligned_zeros(num_bytes: int) -> Tensor:
    """Zeros `(num_bytes,)` uint8, aligned to cache lines, in huge pages where the system has them.

    A plain step reads all weights once. In pages of 4 KiB every 64th cache line waits for the page
    table, prefetched or not.
    """
    global _free
    size = -(-num_bytes // LINE) * LINE
    if size > CHUNK // 2:
        return _mapped(size)[:num_bytes]
    with _lock:
        if size > len(_free):
            _free = _mapped(CHUNK)
        memory, _free = _free[:num_bytes], _free[size:]
    return memory


def _mapped(size: int) -> Tensor:
    """Zeros `(size,)` uint8, aligned to a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[begin : begin + size]


class NativeLinear(PackedLinear):
    """A linear module that the compiled kernels run."""

    def __init__(self, plain: nn.Linear, matrix: Matrix, *, keep: bool = False) -> None:
        super().__init__(plain, keep=keep)
        self.matrix = matrix

    def product(self, x: Tensor) -> Tensor:
        return self.matrix.product(x).to(x.dtype)

    def unpack(self) -> Tensor:
        return self.matrix.rows()

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(ids) if self._kept else self.matrix.rows(ids)


class NativeEmbedding(PackedMatrix):
    """An embedding whose rows the compiled kernels unpack, scaled by its `embed_scale`."""

    def __init__(self, plain: nn.Embedding, matrix: Matrix) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.matrix = matrix
        self.num_weights = self.num_embeddings * self.embedding_dim
        self._template = (plain,)  # in a tuple, so that it is not registered as a submodule

    def rows(self, ids: Tensor) -> Tensor:
        """`(n,)` tokens → `(n, hidden)`, unscaled."""
        return self.matrix.rows(ids)

    @property
    def weight(self) -> Tensor:
        return self.matrix.rows()

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


def needs_rare_formats(file: GGUFFile) -> bool:
    """Whether a file has matrices in formats that only `full_library` has."""
    return any(GGML_FORMATS.get(kind, 0) > LAST_COMMON_FORMAT for kind in file.weights_by_type)


def pack_native(model: transformers.PreTrainedModel, kernels: ctypes.CDLL, bits: int) -> None:
    """Pack a model's matrices for the kernels, in bfloat16 or quantized to 8 or 4 bits.

    The output matrix has at least 8 bits: it affects the probabilities most.
    """
    output = model.get_output_embeddings()
    embedding = getattr(model.get_input_embeddings(), "weight", None)

    def make(plain: nn.Linear) -> NativeLinear:
        own_bits = max(bits, 8) if plain is output else bits
        matrix = Matrix.of(kernels, plain.weight, plain.bias, bits=own_bits)
        keep = plain.weight is embedding or (plain is output and bits == 16)
        return NativeLinear(plain, matrix, keep=keep)

    replace_linears(model, make)


def pack_linears(module: nn.Module, kernels: ctypes.CDLL | None, *, bits: int = 8) -> None:
    """Pack a drafter's linear modules in 8 or 4 bits, for inference only.

    Args:
        kernels: as `Target.kernels`; None = change nothing.
    """
    replace_linears(
        module, lambda plain: packed_linear(plain.weight.detach(), plain.bias, kernels, bits=bits)
    )


def packed_linear(
    weight: Tensor, bias: Tensor | None, kernels: ctypes.CDLL | None, *, bits: int = 8
) -> NativeLinear | None:
    """A linear module in 8 or 4 bits; None where the kernels cannot run it.

    Args:
        weight: `(out, in)`; only bfloat16 is packed.
    """
    if kernels is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    plain = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return NativeLinear(plain, Matrix.of(kernels, weight, bias, bits=bits))


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The k most probable tokens of each row, best first.

    Attributes:
        logits: `(n, k)` float32.
        ids: `(n, k)` int64.
        logsumexp: `(n, 1)` float32, over all of the row's logits; None = not computed.
    """

    logits: Tensor
    ids: Tensor
    logsumexp: Tensor | None

    @property
    def log_probs(self) -> Tensor:
        """`(n, k)` natural log-probabilities."""
        assert self.logsumexp is not None
        return self.logits - self.logsumexp


def topk(logits: Tensor, k: int, *, with_logsumexp: bool = True) -> TopK:
    """The k most probable tokens per row of `logits` `(n, vocab)`, by the kernels if loaded.

    Args:
        with_logsumexp: whether to compute it.
    """
    kernels = loaded_library()
    logits = logits.float()
    fits = logits.device.type == "cpu" and logits.stride(-1) == 1
    if kernels is None or not fits or not 0 < k <= min(MAX_K, logits.shape[-1]):
        best, ids = logits.topk(k, dim=-1)
        return TopK(best, ids, logits.logsumexp(dim=-1, keepdim=True) if with_logsumexp else None)
    n, vocab = logits.shape
    best, logsumexp = torch.empty(n, k), torch.empty(n, 1) if with_logsumexp else None
    ids = torch.empty(n, k, dtype=torch.int64)
    sizes = (c_int64(logits.stride(0)), n, vocab, k)
    call(kernels.topk, logits, *sizes, best, ids, logsumexp, torch.get_num_threads())
    return TopK(best, ids, logsumexp)
