"""Matrices and forwards that the compiled kernels of `native.cpp` run, in bfloat16.

The kernels read a matrix `(out, in)` in blocks of 16 of its rows, so that one instruction meets 16
columns of the product:

    bfloat16  (out / 16, in / 2, 16, 2)
    4 bits    (out / 16, in / 32) of 320 bytes: codes, 16 scales, 16 minima (float16)
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.decoder import Decoder
from engine.kernels.cpu.rotary import RotaryTable
from engine.model.cache import TreeCache
from engine.model.gguf import BLOCK, Blocks
from engine.proposal import Needs, TargetOutput

LANES = 16
EVEN = 32
"""Heads and layers must be a multiple of this wide."""
ALIGNMENT = 64
_NOTHING = Needs()


class _Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("out", c_int32),
        ("columns", c_int32),
        ("bits", c_int32),
        ("unused", c_int32),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "width", "threads", "vocab")),
        ("eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(_Layer)),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("lm_head", _Matrix),
    ]


class _Call(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "context", "first_logit", "num_taps")),
        *((name, c_void_p) for name in ("tokens", "rotary", "visible", "cache")),
        ("capacity", c_int64),
        *((name, c_void_p) for name in ("begins", "columns")),
        *((name, c_void_p) for name in ("taps", "tapped", "normed", "logits")),
        *((name, c_void_p) for name in ("log_totals", "best", "scratch")),
    ]


class NativeProjection(ABC):
    """A matrix that the kernels multiply, whichever way it is stored.

    Attributes:
        bits: of a stored number, 16 or 4.
        columns: of the matrix.
    """

    bits: int

    def __init__(
        self, library: ctypes.CDLL, packed: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> None:
        self._library = library
        self._packed = packed
        self._rows, self.columns = shape
        self._padded = -(-self._rows // LANES) * LANES
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(self._padded)
            self._bias[: self._rows] = bias.float()
        self._struct = self._describe(self._bias)

    def _describe(self, bias: Tensor | None) -> _Matrix:
        at = None if bias is None else bias.data_ptr()
        return _Matrix(self._packed.data_ptr(), at, self._padded, self.columns, self.bits, 0)

    @property
    def struct(self) -> _Matrix:
        """For the kernels; valid as long as this object is."""
        return self._struct

    @property
    def padded(self) -> int:
        """Rows of the matrix, with those that fill its last block."""
        return self._padded

    def product(self, x: Tensor) -> Tensor:
        """`(n, in)` bfloat16 → `(n, out)` float32."""
        return self._multiply(self._struct, x)

    def _multiply(self, struct: _Matrix, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), self._padded)
        sums = torch.empty(len(x) * self.columns // BLOCK if self.bits == 4 else 0)
        self._library.linear(
            ctypes.byref(struct),
            c_void_p(x.data_ptr()),
            c_void_p(y.data_ptr()),
            c_void_p(sums.data_ptr()),
            len(x),
            torch.get_num_threads(),
        )
        return y[:, : self._rows]

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x).to(x.dtype)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.product(x).add_(residual).to(x.dtype)

    @abstractmethod
    def weight(self) -> Tensor:
        """The plain matrix, made anew."""


class HalfProjection(NativeProjection):
    """A matrix in bfloat16."""

    bits = 16

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        rows, columns = weight.shape
        filled = _fill(weight.to(torch.bfloat16))
        packed = filled.view(-1, LANES, columns // 2, 2).transpose(1, 2).contiguous()
        super().__init__(library, packed, (rows, columns), bias)

    def weight(self) -> Tensor:
        return self._packed.transpose(1, 2).reshape(-1, self.columns)[: self._rows]


class BlockProjection(NativeProjection):
    """A matrix in 4 bits; multiplied exactly as stored, with float16 scales and minima."""

    bits = 4

    def __init__(self, library: ctypes.CDLL, blocks: Blocks, bias: Tensor | None) -> None:
        rows, columns = blocks.codes.shape
        codes = _fill(blocks.codes).to(torch.int32)
        # Four codes to a word: group, nibble, pair.
        nibbles = codes.view(-1, LANES, columns // BLOCK, 4, 4, 2)
        shifts = torch.arange(4, dtype=torch.int32).view(4, 1) * 4
        words = (nibbles << shifts).sum(dim=4).to(torch.int32)
        words = words.permute(0, 2, 3, 1, 4).to(torch.uint16).contiguous().view(torch.uint8)
        scales = torch.stack([_fill(blocks.scale), _fill(blocks.minimum)])
        scales = scales.view(2, -1, LANES, columns // BLOCK).permute(1, 3, 0, 2)
        halves = scales.to(torch.float16).contiguous().view(torch.uint8)
        packed = torch.cat([words.flatten(2), halves.flatten(2)], dim=-1).contiguous()
        super().__init__(library, packed, (rows, columns), bias)

    def weight(self) -> Tensor:
        ones = torch.eye(self.columns, dtype=torch.bfloat16)
        rows = self._multiply(self._describe(None), ones)
        return rows.t().to(torch.bfloat16).contiguous()


def _fill(rows: Tensor) -> Tensor:
    """With zero rows up to a whole block."""
    lacking = -len(rows) % LANES
    if not lacking:
        return rows
    return torch.cat([rows, rows.new_zeros(lacking, *rows.shape[1:])])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the rows of a forward are kept, and what they see; see `Call` in the kernels."""

    buffer: Tensor
    capacity: int
    context: int
    visible: Tensor | None = None
    begins: Tensor | None = None
    columns: Tensor | None = None


class SideBySide:
    """Keys and values of many texts, each in a stretch of one buffer, for reading them together."""

    def __init__(
        self, run: Callable[[Tensor, Tensor, _Place, Needs, int], TargetOutput], buffer: Tensor
    ) -> None:
        self._run = run
        self._buffer = buffer

    @property
    def capacity(self) -> int:
        """Tokens of all texts together."""
        return self._buffer.shape[2]

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        begins: Tensor,
        *,
        needs: Needs = _NOTHING,
        num_logits: int = 0,
    ) -> TargetOutput:
        """Read new tokens of any texts; a text's earlier ones were read before, or come before.

        A row's results are bit by bit those of its text alone.

        Args:
            tokens: `(n,)` int64.
            positions: `(n,)` int64, within each row's text.
            begins: `(n,)` int64, where the row's text begins in the buffer.
            num_logits: the last so many rows get logits.
        """
        begins = begins.contiguous()
        columns = begins + positions
        longest = int(positions.max()) + 1
        context = max(0, longest - len(tokens))
        place = _Place(self._buffer, self.capacity, context, begins=begins, columns=columns)
        return self._run(tokens, positions, place, needs, len(tokens) - num_logits)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeForward:
    """Runs a decoder whose projections are all native, in one call per forward.

    A row's logits are the same, bit by bit, whatever rows are computed with it: a draft tree is
    verified with exactly the logits of plain decoding.

    Attributes:
        kernels: the library that it calls.
    """

    def __init__(
        self, library: ctypes.CDLL, decoder: Decoder, rotary: RotaryTable, *, name: str
    ) -> None:
        """`rotary` must be in float32."""
        self.name = name
        self.kernels = library
        self._decoder: Decoder | None = decoder
        self._rotary = rotary
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._layers = (_Layer * len(decoder.layers))()
        self._model = self._describe(decoder)

    def _describe(self, decoder: Decoder) -> _Model:
        for struct, layer in zip(self._layers, decoder.layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
            for name in ("input_norm", "mlp_norm", "query_norm", "key_norm"):
                weight = getattr(layer, name)
                setattr(struct, name, None if weight is None else weight.data_ptr())
        lm_head = decoder.lm_head
        assert isinstance(lm_head, NativeProjection)
        first = decoder.layers[0].down
        assert isinstance(first, NativeProjection)
        heads = decoder.heads
        return _Model(
            len(decoder.layers),
            decoder.embedding.shape[1],
            heads.query,
            heads.key,
            heads.dim,
            first.columns,
            torch.get_num_threads(),
            decoder.embedding.shape[0],
            decoder.eps,
            heads.scale,
            self._layers,
            decoder.norm.data_ptr(),
            decoder.embedding.data_ptr(),
            lm_head.struct,
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        cache: TreeCache,
        needs: Needs,
        *,
        last_only: bool,
    ) -> TargetOutput:
        decoder = self._decoder
        assert decoder is not None
        buffer = cache.whole(decoder.heads.key, decoder.heads.dim, decoder.embedding.dtype)
        first = len(tokens) - 1 if last_only else 0
        if visible is not None:
            visible = visible.contiguous()
        place = _Place(buffer, cache.capacity, cache.length, visible=visible)
        return self._run(tokens, positions, place, needs, first)

    def output(self, hidden: Tensor) -> Tensor:
        """Logits `(…, vocab)` float32 of hidden states `(…, hidden)`."""
        decoder = self._decoder
        assert decoder is not None
        lm_head = decoder.lm_head
        assert isinstance(lm_head, NativeProjection)
        rows = hidden.to(torch.bfloat16).reshape(-1, hidden.shape[-1])
        logits: Tensor = lm_head.product(rows).unflatten(0, hidden.shape[:-1])
        return logits

    def texts(self, capacity: int) -> SideBySide:
        """Room for many texts that are read together; `capacity` tokens in all."""
        decoder = self._decoder
        assert decoder is not None
        shape = (2 * len(decoder.layers), decoder.heads.key, capacity, decoder.heads.dim)
        return SideBySide(self._run, torch.empty(shape, dtype=decoder.embedding.dtype))

    def _run(
        self, tokens: Tensor, positions: Tensor, place: _Place, needs: Needs, first: int
    ) -> TargetOutput:
        """One forward; logits of the rows from `first` on."""
        decoder = self._decoder
        assert decoder is not None
        n, hidden, vocab = len(tokens), decoder.embedding.shape[1], decoder.embedding.shape[0]
        tokens = tokens.contiguous()
        rotary = self._rotary.halves(positions)
        taps = torch.tensor(needs.layers, dtype=torch.int32)
        tapped = torch.empty(n, len(needs.layers) * hidden, dtype=torch.bfloat16)
        normed = torch.empty(n, hidden, dtype=torch.bfloat16)
        logits = torch.empty(n - first, self._model.lm_head.out)
        totals, best = torch.empty(n - first), torch.empty(n - first, dtype=torch.int64)
        self._model.threads = torch.get_num_threads()
        call = _Call(
            n,
            place.context,
            first,
            len(needs.layers),
            tokens.data_ptr(),
            rotary.data_ptr(),
            _address(place.visible),
            place.buffer.data_ptr(),
            place.capacity,
            _address(place.begins),
            _address(place.columns),
            taps.data_ptr(),
            tapped.data_ptr(),
            normed.data_ptr(),
            logits.data_ptr(),
            totals.data_ptr(),
            best.data_ptr(),
            self._room(n, place.context + n),
        )
        self.kernels.forward(ctypes.byref(self._model), ctypes.byref(call))
        return TargetOutput(
            logits[:, :vocab],
            normed if needs.hidden else None,
            tapped if needs.layers else None,
            totals,
            best,
        )

    def _room(self, n: int, keys: int) -> int:
        """Address of scratch memory for a forward."""
        size = self.kernels.scratch_bytes(ctypes.byref(self._model), n, c_int64(keys))
        if len(self._scratch) < size + ALIGNMENT:
            self._scratch = torch.empty(size + size // 4 + ALIGNMENT, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // ALIGNMENT) * ALIGNMENT

    def close(self) -> None:
        self._decoder = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
