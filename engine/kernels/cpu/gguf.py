"""Matrices in 4 or 8 bits, and those of a GGUF file as they are: quantized, not floats.

    value = scale · integer + minimum      one scale and one minimum per 32 columns

Q4_0, Q4_1, Q4_K (integers 0 … 15) and Q8_0 (0 … 255) all have this form. Only the header and the
matrices asked for are read: the format's own package takes seconds over a tokenizer's lists, and
gives floats.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import SourceError, first_line
from engine.model.files import check_file, check_sizes
from engine.safe_text import short

BLOCK = 32
"""Columns that share a scale and a minimum."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
ALIGNMENTS = {1 << n for n in range(3, 17)}
MAX_DIMENSIONS = 4
MAX_NESTING = 4
"""Of arrays in arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix `(out, in)` in 4 or 8 bits: `scale · integers + minimum`, block by block.

    Attributes:
        integers: `(out, in)` uint8, below 2^bits.
        scale, minimum: `(out, in / 32)` float32.
        bits: 4 or 8.
    """

    integers: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int = 4

    @classmethod
    def quantize(cls, weight: Tensor, bits: int) -> QuantizedMatrix:
        """A float matrix, rounded, from each block's least to its largest value.

        Columns are filled up with zeros to whole blocks.
        """
        filled = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
        values = filled.unflatten(1, (-1, BLOCK))
        least, most = values.aminmax(dim=-1)
        # In the precision that scales and minima are kept in; never 0, so that integers are finite.
        scale = ((most - least) / (2**bits - 1)).half().float().clamp(min=2.0**-24)
        minimum = least.half().float()
        integers = ((values - minimum[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1)
        return cls(integers.to(torch.uint8).flatten(1), scale, minimum, bits)

    def dequantize(self) -> Tensor:
        """The values `(out, in)` float32, as every reader of the format computes them."""
        blocks = self.integers.float().unflatten(1, (-1, BLOCK))
        values = torch.addcmul(self.minimum[..., None], blocks, self.scale[..., None])
        return values.flatten(1)

    @classmethod
    def joined(cls, parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
        """Matrices of one width, one above the other; 4 bits among 8 are 8 bits too."""
        return cls(
            torch.cat([part.integers for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
            max(part.bits for part in parts),
        )

    def rows(self, index: Tensor) -> QuantizedMatrix:
        return replace(
            self,
            integers=self.integers[index],
            scale=self.scale[index],
            minimum=self.minimum[index],
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """The header of a GGUF file, and its matrices on demand."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises SourceError: it is no GGUF file of version 2 or 3, or it is damaged.
        """
        self.path, self.num_bytes = path, check_file(path)
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
            self.metadata, self._entries, self._begin = _Header(self._data.data).read()
            self._check()
        except (OSError, ValueError) as error:
            said = first_line(error)
            raise SourceError(f"{path} could not be read as a GGUF file: {said}.") from error
        check_sizes(self.metadata, str(path))

    def _check(self) -> None:
        """ValueError unless its tensors lie one behind the other, and are those of its layers."""
        if not isinstance(architecture := self.metadata.get("general.architecture"), str):
            raise ValueError("it names no architecture")
        if not self._entries:
            raise ValueError("it has no tensors")
        num_layers = self.metadata.get(f"{architecture}.block_count")
        expected = 0
        for name, entry in self._entries.items():
            weights, size = _SIZES.get(entry.kind, (1, 0))
            if not size:
                raise ValueError(f"{short(name)} is of the unknown type {entry.kind}")
            if entry.shape[0] % weights:
                raise ValueError(f"{short(name)} is {entry.shape[0]} wide, not whole blocks")
            if entry.offset != expected:
                raise ValueError(f"{short(name)} does not begin where the tensor before it ends")
            end = entry.offset + math.prod(entry.shape) // weights * size
            if self._begin + end > self.num_bytes:
                raise ValueError(f"{short(name)} ends behind the file's end; it was cut off")
            expected = -(-end // self._alignment) * self._alignment
            layer = re.match(r"blk\.(\d{1,9})\.", name)
            if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
                raise ValueError(f"it has {short(name)}, but {num_layers} layers")

    @property
    def _alignment(self) -> int:
        return int(self.metadata.get(_ALIGNMENT, 32))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    @property
    def bits(self) -> int | None:
        """4 if any matrix is held in 4 bits, 8 if any in 5 to 8 or fewer than 4; else None."""
        kinds = {entry.kind for entry in self._entries.values() if len(entry.shape) == 2}
        if any(kind in _FORMATS and _FORMATS[kind].bits == 4 for kind in kinds):
            return 4
        return 8 if kinds - _FLOATS else None

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """A quantized matrix; None if there is none of this name or it is of another type."""
        entry = self._entries.get(name)
        if entry is None or entry.kind not in _FORMATS or len(entry.shape) != 2:
            return None
        form = _FORMATS[entry.kind]
        columns, rows = entry.shape
        size = rows * columns // form.weights * form.size
        begin = self._begin + entry.offset
        raw = np.asarray(self._data[begin : begin + size]).reshape(rows, -1, form.size)
        integers, scale, minimum = form.unpack(raw)
        return QuantizedMatrix(
            torch.from_numpy(integers.reshape(rows, columns)),
            torch.from_numpy(scale.reshape(rows, -1).astype(np.float32)),
            torch.from_numpy(minimum.reshape(rows, -1).astype(np.float32)),
            form.bits,
        )


class _Header:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[Mapping[str, Any], Mapping[str, _Entry], int]:
        """Metadata without arrays, tensors by name, and where the tensors' bytes begin."""
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if self._one("I") not in (2, 3):
            raise ValueError("its version is not 2 or 3")
        num_tensors, num_fields = self._one("Q"), self._one("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            _add(metadata, self._string(), self._value(self._one("I")))
        entries: dict[str, _Entry] = {}
        for _ in range(num_tensors):
            name, dimensions = self._string(), self._one("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{short(name)} has {dimensions} dimensions")
            shape = tuple(self._one("Q") for _ in range(dimensions))
            if 0 in shape:
                raise ValueError(f"{short(name)} has no numbers")
            _add(entries, name, _Entry(shape, self._one("I"), self._one("Q")))
        alignment = metadata.get(_ALIGNMENT, 32)
        if alignment not in ALIGNMENTS:
            raise ValueError(f"its alignment is {short(alignment)}, no power of two")
        present = {name: value for name, value in metadata.items() if value is not None}
        return present, entries, -(-self._at // alignment) * alignment

    def _take(self, size: int) -> memoryview:
        """The next bytes, which must be there."""
        if size > len(self._data) - self._at:
            raise ValueError("it ends in the middle of its header")
        self._at += size
        return self._data[self._at - size : self._at]

    def _one(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def _string(self) -> str:
        return bytes(self._take(self._one("Q"))).decode()

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A field's value; arrays are skipped."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip(depth)
        if kind not in _SCALARS:
            raise ValueError(f"it has a field of the unknown type {kind}")
        return self._one(_SCALARS[kind])

    def _skip(self, depth: int) -> None:
        """Past an array, whose items take some bytes each: their number is no reason to wait."""
        inner, count = self._one("I"), self._one("Q")
        if depth == MAX_NESTING:
            raise ValueError(f"its arrays are nested more than {MAX_NESTING} deep")
        if inner in _SCALARS:
            self._take(count * struct.calcsize("<" + _SCALARS[inner]))
            return
        for _ in range(count):
            if inner == _STRING:
                self._take(self._one("Q"))
            else:
                self._value(inner, depth + 1)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found:
        raise ValueError(f"it has {short(name)} twice")
    found[name] = value


_FLOATS = {0, 1, 30}
"""F32, F16 and BF16, by GGML's number of the type."""
_BYTES = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98}
    | {19: 50, 21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66},
}
"""Numbers in a block → GGML's number of a type → bytes of a block."""
_SIZES = {kind: (n, size) for n, sizes in _BYTES.items() for kind, size in sizes.items()}
Arrays = tuple[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class _Format:
    """One block type: how many weights a block holds, its bytes, and how to take it apart."""

    weights: int
    size: int
    unpack: Callable[[Any], Arrays]
    bits: int = 4


def _nibbles(raw: Any) -> Any:
    """Low halves of all bytes, then high halves, per block."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _half(raw: Any) -> Any:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _q4_0(raw: Any) -> Arrays:
    scale = _half(raw[..., :2])
    return _nibbles(raw[..., 2:]), scale, -8.0 * scale


def _q4_1(raw: Any) -> Arrays:
    return _nibbles(raw[..., 4:]), _half(raw[..., :2]), _half(raw[..., 2:4])


def _q8_0(raw: Any) -> Arrays:
    scale = _half(raw[..., :2])
    return np.ascontiguousarray(raw[..., 2:]) ^ 128, scale, -128.0 * scale


def _q4_k(raw: Any) -> Arrays:
    """QuantizedMatrix of 256: eight scales and minima of 6 bits, in units of one float each.

    The 12 bytes hold the low 6 bits of four scales, of four minima, then the low 4 bits of the
    other four of each; their high 2 bits are the tops of the first eight bytes.
    """
    packed = raw[..., 4:16]
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)
    integers = _nibbles(raw[..., 16:].reshape(*raw.shape[:-1], 4, 32))
    scale = _half(raw[..., :2]) * scales.astype(np.float32)
    return integers, scale, -_half(raw[..., 2:4]) * minima.astype(np.float32)


_FORMATS = {
    2: _Format(32, 18, _q4_0),
    3: _Format(32, 20, _q4_1),
    8: _Format(32, 34, _q8_0, 8),
    12: _Format(256, 144, _q4_k),
}
"""By GGML's number of the type."""
