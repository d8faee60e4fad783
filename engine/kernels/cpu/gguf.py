"""Matrices in 4 or 8 bits, and those of a GGUF file as they are: codes, not floats.

    value = scale · code + minimum      one scale and one minimum per 32 columns

Q4_0, Q4_1, Q4_K (codes 0 … 15) and Q8_0 (0 … 255) all have this form. Only the header and the
matrices asked for are read: the format's own package takes seconds over a tokenizer's lists, and
gives floats.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import SourceError

BLOCK = 32
"""Columns that share a scale and a minimum."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix `(out, in)` in 4 or 8 bits: `scale · codes + minimum`, block by block.

    Attributes:
        codes: `(out, in)` uint8, below 2^bits.
        scale, minimum: `(out, in / 32)` float32.
        bits: 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int = 4

    @classmethod
    def quantised(cls, weight: Tensor, bits: int) -> Blocks:
        """The nearest codes of a float matrix, from each block's least to its largest value.

        Columns are filled up with zeros to whole blocks.
        """
        filled = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
        values = filled.unflatten(1, (-1, BLOCK))
        least, most = values.aminmax(dim=-1)
        # In the precision that scales and minima are kept in; never 0, so that codes are finite.
        scale = ((most - least) / (2**bits - 1)).half().float().clamp(min=2.0**-24)
        minimum = least.half().float()
        codes = ((values - minimum[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1)
        return cls(codes.to(torch.uint8).flatten(1), scale, minimum, bits)

    def dequantised(self) -> Tensor:
        """The values `(out, in)` float32, as every reader of the format computes them."""
        blocks = self.codes.float().unflatten(1, (-1, BLOCK))
        values = torch.addcmul(self.minimum[..., None], blocks, self.scale[..., None])
        return values.flatten(1)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Matrices of one width, one above the other; 4 bits among 8 are 8 bits too."""
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
            max(part.bits for part in parts),
        )

    def rows(self, index: Tensor) -> Blocks:
        return replace(
            self,
            codes=self.codes[index],
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

        Raises:
            SourceError: it is no GGUF file of version 2 or 3.
        """
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
            self.metadata, self._entries, self._begin = _Header(self._data.data).read()
        except (struct.error, OSError, LookupError, ValueError) as error:
            raise SourceError(f"{path} could not be read as a GGUF file: {error}.") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def bits(self) -> int | None:
        """4 if any matrix is held in 4 bits, 8 if any in 5 to 8 or fewer than 4; else None."""
        kinds = {entry.kind for entry in self._entries.values() if len(entry.shape) == 2}
        if any(kind in _FORMATS and _FORMATS[kind].bits == 4 for kind in kinds):
            return 4
        return 8 if kinds - _FLOATS else None

    def blocks(self, name: str) -> Blocks | None:
        """A matrix in codes; None if there is none of this name or it is of another type."""
        entry = self._entries.get(name)
        if entry is None or entry.kind not in _FORMATS or len(entry.shape) != 2:
            return None
        form = _FORMATS[entry.kind]
        columns, rows = entry.shape
        size = rows * columns // form.weights * form.size
        begin = self._begin + entry.offset
        raw = np.asarray(self._data[begin : begin + size]).reshape(rows, -1, form.size)
        codes, scale, minimum = form.unpack(raw)
        return Blocks(
            torch.from_numpy(codes.reshape(rows, columns)),
            torch.from_numpy(scale.reshape(rows, -1).astype(np.float32)),
            torch.from_numpy(minimum.reshape(rows, -1).astype(np.float32)),
            form.bits,
        )


class _Header:
    """Walks the header from field to field."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[Mapping[str, Any], Mapping[str, _Entry], int]:
        """Metadata without arrays, tensors by name, and where the tensors' bytes begin."""
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if self._one("I") not in (2, 3):
            raise ValueError("its version is not 2 or 3")
        num_tensors, num_fields = self._one("Q"), self._one("Q")
        fields = ((self._string(), self._value(self._one("I"))) for _ in range(num_fields))
        metadata = {name: value for name, value in fields if value is not None}
        entries = {}
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(self._one("Q") for _ in range(self._one("I")))
            entries[name] = _Entry(shape, self._one("I"), self._one("Q"))
        alignment = int(metadata.get(_ALIGNMENT, 32))
        return metadata, entries, -(-self._at // alignment) * alignment

    def _one(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._one("Q")
        self._at += length
        return bytes(self._data[self._at - length : self._at]).decode()

    def _value(self, kind: int) -> Any:
        """A field's value; arrays are skipped."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._one(_SCALARS[kind])
        inner, count = self._one("I"), self._one("Q")
        if inner in _SCALARS:
            self._at += count * struct.calcsize("<" + _SCALARS[inner])
        else:
            for _ in range(count):
                self._skip(inner)
        return None

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            length = self._one("Q")
            self._at += length
        else:
            self._value(kind)


_FLOATS = {0, 1, 30}
"""F32, F16 and BF16, by GGML's number of the type."""
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
    """Blocks of 256: eight scales and minima of 6 bits, in units of one float each.

    The 12 bytes hold the low 6 bits of four scales, of four minima, then the low 4 bits of the
    other four of each; their high 2 bits are the tops of the first eight bytes.
    """
    packed = raw[..., 4:16]
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)
    codes = _nibbles(raw[..., 16:].reshape(*raw.shape[:-1], 4, 32))
    scale = _half(raw[..., :2]) * scales.astype(np.float32)
    return codes, scale, -_half(raw[..., 2:4]) * minima.astype(np.float32)


_FORMATS = {
    2: _Format(32, 18, _q4_0),
    3: _Format(32, 20, _q4_1),
    8: _Format(32, 34, _q8_0, 8),
    12: _Format(256, 144, _q4_k),
}
"""By GGML's number of the type."""
