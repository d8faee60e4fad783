"""A GGUF file: its header, and its tensors' bytes on demand.

Arrays are decoded on demand: the `gguf` package takes seconds to read a tokenizer's arrays. Nothing
is mapped into memory: where a mapped file is shortened, reading it kills the process.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Any

import gguf
import numpy as np

from engine.errors import SourceError, first_line
from engine.model.files import check_file, check_sizes
from engine.safe_text import short, visible

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
ALIGNMENTS = {1 << n for n in range(3, 17)}
MAX_HEADER_BYTES = 256 << 20
"""The largest vocabularies take 20 MiB."""
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in the header, by the offset of its items."""

    type_id: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in the header; `type_id` is GGML's, `file_idx` the file of a split model."""

    shape: tuple[int, ...]
    type_id: int
    offset: int
    file_idx: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor as stored in the file.

    Attributes:
        type_id: GGML's type.
        shape: in torch's order, the innermost dimension last.
        data: uint8 `(rows, bytes per row)`.
    """

    type_id: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]

    def floats(self) -> np.ndarray[Any, Any]:
        """Its values, dequantized to float32."""
        values = gguf.dequantize(self.data, gguf.GGMLQuantizationType(self.type_id))
        return values.reshape(self.shape).astype(np.float32, copy=False)


class GGUFFile:
    """The header of a GGUF file, and its tensors on demand.

    Attributes:
        metadata: all fields except arrays, which `array` reads.
        entries: the tensors by name.
        num_bytes: of all files.
        lock: to hold where several threads read tensors.
    """

    def __init__(self, path: Path) -> None:
        """Read the header, and those of the other files of a split model.

        Raises SourceError: it is not a GGUF file of version 2 or 3, or is damaged.
        """
        self.path, self.num_bytes, self.lock = path, 0, Lock()
        self._files: list[tuple[BufferedReader, int]] = []  # each with the offset of its tensors
        self.entries: dict[str, TensorInfo] = {}
        self.metadata, self._lists, self._header = self._read(path)
        check_sizes(self.metadata, str(path))
        self.architecture = str(self.metadata["general.architecture"])
        for other in self._other_files():
            self._read(other)
        if not self.entries:
            raise SourceError(f"{path} could not be read as a GGUF file: it has no tensors.")

    def _read(self, path: Path) -> tuple[Mapping[str, Any], Mapping[str, _Array], _Header]:
        """Add a file's tensors; return its fields, arrays and header."""
        num_bytes = check_file(path)
        self.num_bytes += num_bytes
        try:
            stream = path.open("rb")
            weakref.finalize(self, stream.close)
            header = _Header(stream, num_bytes)
            fields, entries, begin = header.read(len(self._files))
            metadata = {k: value for k, value in fields.items() if not isinstance(value, _Array)}
            lists = {k: value for k, value in fields.items() if isinstance(value, _Array)}
            _check(metadata if not self._files else self.metadata, entries, begin, num_bytes)
            for name, entry in entries.items():
                _add_unique(self.entries, name, entry)
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise SourceError(f"{path} could not be read as a GGUF file: {reason}.") from error
        self._files.append((stream, begin))
        return metadata, lists, header

    def _other_files(self) -> list[Path]:
        """The further files of a split model."""
        count = self.metadata.get("split.count") or 1
        if not isinstance(count, int) or count < 2:
            return []
        match = re.fullmatch(r"(.*)-00001-of-(\d{5})", self.path.stem)
        if match is None or int(match[2]) != count:
            raise SourceError(
                f"{self.path} is one of {count} files of a model. Give the first, whose name ends "
                f"with -00001-of-{count:05}.gguf."
            )
        names = (f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(2, count + 1))
        return [self.path.with_name(name) for name in names]

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The model's fields without the architecture's prefix, arrays included."""
        prefix = f"{self.architecture}."
        names = [name for name in (*self.metadata, *self._lists) if name.startswith(prefix)]
        return {
            name.removeprefix(prefix): self.metadata[name]
            if name in self.metadata
            else self.array(name)
            for name in names
        }

    @property
    def title(self) -> str:
        """The model's name and the file's; a generic file name is preceded by its folder's."""
        model = self.metadata.get("general.name")
        model = model.strip() if isinstance(model, str) else ""
        file = re.sub(r"-00001-of-\d{5}$", "", self.path.stem)
        if re.fullmatch(r"(ggml-)?model([-._]?(i?q\d\w*|b?f(16|32)))?", file, re.IGNORECASE):
            file = f"{self.path.resolve().parent.name}/{file}"
        words = [re.sub(r"[\W_]+", "", text).lower() for text in (model, file)]
        return visible(file if words[0] in ("", words[1]) else f"{model[:80]} ({file[-80:]})")

    @cached_property
    def weights_by_type(self) -> Mapping[int, int]:
        """Number of its matrices' weights per GGML type id, most first."""
        counts: Counter[int] = Counter()
        for entry in self.entries.values():
            if len(entry.shape) > 1:
                counts[entry.type_id] += math.prod(entry.shape)
        return dict(counts.most_common())

    @property
    def matrix_types(self) -> tuple[str, ...]:
        """Names of its matrices' types, by number of weights: Q4_K, Q6_K, …"""
        return tuple(GGML_TYPES[type_id].name for type_id in self.weights_by_type)

    @property
    def bits(self) -> int | None:
        """4 if any matrix has at most 4 bits, 8 if any has 5 to 8; None = floats."""
        bits = (GGML_TYPES[type_id].bits for type_id in self.weights_by_type)
        quantized = [width for width in bits if width < 16]
        return None if not quantized else 4 if min(quantized) <= 4 else 8

    @property
    def field_names(self) -> list[str]:
        """Names of all fields, arrays included."""
        return [*self.metadata, *self._lists]

    def array(self, name: str) -> list[Any]:
        """An array of the header; empty if there is none of this name."""
        array = self._lists.get(name)
        return [] if array is None else self._header.items(array)

    def tensor(self, name: str, index: int | None = None) -> RawTensor:
        """Read a tensor, or one item of its outermost dimension.

        Raises:
            SourceError: the file has become too short for it.
            IndexError: it has no such item.
        """
        entry = self.entries[name]
        shape, at = entry.shape[::-1], 0
        if index is not None:
            if not 0 <= index < shape[0]:
                raise IndexError(f"{name} has {shape[0]} items")
            shape, at = shape[1:], index
        (stream, begin), ggml_type = self._files[entry.file_idx], GGML_TYPES[entry.type_id]
        row_bytes = shape[-1] // ggml_type.block_size * ggml_type.type_size
        data = np.empty((math.prod(shape[:-1]), row_bytes), dtype=np.uint8)
        stream.seek(begin + entry.offset + at * data.nbytes)
        if stream.readinto(data.data) < data.nbytes:
            raise SourceError(f"{stream.name} was shortened while it was loaded. Load it again.")
        return RawTensor(entry.type_id, shape, data)

    def floats(self, name: str, index: int | None = None) -> np.ndarray[Any, Any]:
        """As `tensor`, dequantized to float32."""
        return self.tensor(name, index).floats()


def _check(
    metadata: Mapping[str, Any], entries: Mapping[str, TensorInfo], begin: int, num_bytes: int
) -> None:
    """ValueError unless the tensors are contiguous, and belong to the model's layers."""
    if not isinstance(architecture := metadata.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    num_layers = metadata.get(f"{architecture}.block_count")
    expected, alignment = 0, int(metadata.get(_ALIGNMENT, 32))
    for name, entry in entries.items():
        ggml_type = GGML_TYPES.get(entry.type_id)
        if ggml_type is None:
            raise ValueError(f"{short(name)} is of the unknown type {entry.type_id}")
        if entry.shape[0] % ggml_type.block_size:
            raise ValueError(f"{short(name)} is {entry.shape[0]} wide, not whole blocks")
        if entry.offset != expected:
            raise ValueError(f"{short(name)} does not begin where the tensor before it ends")
        end = entry.offset + math.prod(entry.shape) // ggml_type.block_size * ggml_type.type_size
        if begin + end > num_bytes:
            raise ValueError(f"{short(name)} ends behind the file's end; it was cut off")
        expected = -(-end // alignment) * alignment
        layer = re.match(r"blk\.(\d{1,9})\.", name)
        if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            raise ValueError(f"it has {short(name)}, but {num_layers} layers")


class _Header:
    """A file's beginning, read as far as needed."""

    def __init__(self, stream: BufferedReader, num_bytes: int) -> None:
        """`num_bytes`: of the file."""
        self._stream, self._num_bytes = stream, num_bytes
        self._data, self._at = bytearray(), 0

    def read(self, file_idx: int) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo], int]:
        """Fields, tensors by name, and the offset of the tensors' bytes.

        Args:
            file_idx: of a split model's files.
        """
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if self._scalar("I") not in (2, 3):
            raise ValueError("its version is not 2 or 3")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            _add_unique(metadata, self._string(), self._value(self._scalar("I")))
        entries: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name, dimensions = self._string(), self._scalar("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{short(name)} has {dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))
            if 0 in shape:
                raise ValueError(f"{short(name)} has no numbers")
            info = TensorInfo(shape, self._scalar("I"), self._scalar("Q"), file_idx)
            _add_unique(entries, name, info)
        alignment = metadata.get(_ALIGNMENT, 32)
        if alignment not in ALIGNMENTS:
            raise ValueError(f"its alignment is {short(alignment)}, no power of two")
        return metadata, entries, -(-self._at // alignment) * alignment

    def _take(self, size: int) -> bytearray:
        """The next bytes, which must be there."""
        self._at += size
        self._read_to(self._at)
        return self._data[self._at - size : self._at]

    def _read_to(self, end: int) -> None:
        if self._num_bytes >= end > MAX_HEADER_BYTES:
            raise ValueError(f"its header has over {MAX_HEADER_BYTES >> 20} MiB")
        if len(self._data) < end <= self._num_bytes:
            self._data += self._stream.read(max(end - len(self._data), 1 << 20))
        if end > len(self._data):
            raise ValueError("it ends in the middle of its header")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def _string(self) -> str:
        return bytes(self._take(self._scalar("Q"))).decode()

    def _value(self, type_id: int) -> Any:
        """A field's value; for an array, its location."""
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            array = _Array(self._scalar("I"), self._scalar("Q"), self._at)
            self._skip(array)
            return array
        if type_id not in _SCALARS:
            raise ValueError(f"it has a field of the unknown type {type_id}")
        return self._scalar(_SCALARS[type_id])

    def items(self, array: _Array) -> list[Any]:
        """An array's items; its bytes have been read."""
        self._at = array.offset
        if array.type_id in _SCALARS:
            code = _SCALARS[array.type_id]
            raw = self._take(array.count * struct.calcsize("<" + code))
            values: list[Any] = np.frombuffer(raw, dtype="<" + code).tolist()
            return values
        data, at, strings = bytes(self._data), array.offset, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(array.count):  # a vocabulary has hundreds of thousands
            begin = at + 8
            at = begin + length_at(data, at)[0]
            strings.append(data[begin:at].decode())
        return strings

    def _skip(self, array: _Array) -> None:
        """Skip an array in a time bounded by its bytes, not by its declared count."""
        if array.type_id in _SCALARS:
            self._take(array.count * struct.calcsize("<" + _SCALARS[array.type_id]))
        elif array.type_id == _STRING:  # a vocabulary has hundreds of thousands
            data, at = self._data, self._at
            length_at = struct.Struct("<Q").unpack_from
            for _ in range(array.count):
                if at + 8 > len(data):
                    self._read_to(at + 8)
                at += 8 + length_at(data, at)[0]
            self._at = at
            self._take(0)
        else:
            raise ValueError(f"it has an array of the type {array.type_id}, which no model has")


def _add_unique(values: dict[str, Any], name: str, value: Any) -> None:
    if name in values:
        raise ValueError(f"it has {short(name)} twice")
    values[name] = value


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One of GGML's types.

    Attributes:
        bits: per weight.
        block_size: weights per block.
        type_size: bytes per block.
    """

    name: str
    bits: int
    block_size: int
    type_size: int


def _type_of(kind: gguf.GGMLQuantizationType) -> GGMLType:
    sizes = gguf.GGML_QUANT_SIZES[kind]
    if sizes[0] == 1:
        return GGMLType(kind.name, 16 if kind.name in ("F16", "BF16") else 32, *sizes)
    (bits, *_) = re.findall(r"\d+", kind.name)
    return GGMLType(kind.name, int(bits), *sizes)


GGML_TYPES = {int(kind): _type_of(kind) for kind in gguf.GGML_QUANT_SIZES}
"""By GGML's type id."""
