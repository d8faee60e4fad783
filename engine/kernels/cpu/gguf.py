"""A GGUF file: its header, and its tensors' bytes on demand.

Only what is asked for is read: the format's own package takes seconds over a tokenizer's lists.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
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
_NUMPY = {"I": "u4", "i": "i4", "Q": "u8", "q": "i8", "f": "f4", "d": "f8", "H": "u2", "h": "i2"}
MAX_DIMENSIONS = 4
MAX_NESTING = 4
"""Of arrays in arrays."""


@dataclass(frozen=True, slots=True)
class _Array:
    """A list in the header: where its items begin."""

    kind: int
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]
    kind: int
    offset: int
    part: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor as the file has it.

    Attributes:
        kind: GGML's number of its type.
        shape: as torch has it, the innermost dimension last.
        data: uint8 `(rows, bytes of a row)`, mapped from the file.
    """

    kind: int
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class GGUFFile:
    """The header of a GGUF file, and its tensors on demand.

    Attributes:
        metadata: all fields but lists, which `values` reads.
    """

    def __init__(self, path: Path) -> None:
        """Read the header; a file that is the first of several reads theirs too.

        Raises SourceError: it is no GGUF file of version 2 or 3, or it is damaged.
        """
        self.path, self.num_bytes = path, 0
        self._data: list[np.memmap[Any, Any]] = []
        self._begins: list[int] = []
        self._entries: dict[str, _Entry] = {}
        self.metadata, self._lists = self._read(path)
        check_sizes(self.metadata, str(path))
        for other in self._others():
            self._read(other)

    def _read(self, path: Path) -> tuple[Mapping[str, Any], Mapping[str, _Array]]:
        """Add a file's tensors; its fields."""
        num_bytes = check_file(path)
        self.num_bytes += num_bytes
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
            fields, entries, begin = _Header(data.data).read(len(self._data))
            metadata = {k: value for k, value in fields.items() if not isinstance(value, _Array)}
            lists = {k: value for k, value in fields.items() if isinstance(value, _Array)}
            _check(metadata if not self._data else self.metadata, entries, begin, num_bytes)
            for name, entry in entries.items():
                _add(self._entries, name, entry)
        except (OSError, ValueError) as error:
            said = first_line(error)
            raise SourceError(f"{path} could not be read as a GGUF file: {said}.") from error
        self._data.append(data)
        self._begins.append(begin)
        return metadata, lists

    def _others(self) -> list[Path]:
        """The files that go on where this one ends."""
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

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def title(self) -> str:
        """What its maker calls the model, and which file it is: of a name that says nothing, the
        folder's."""
        model = self.metadata.get("general.name")
        model = model.strip() if isinstance(model, str) else ""
        file = re.sub(r"-00001-of-\d{5}$", "", self.path.stem)
        if re.fullmatch(r"(ggml-)?model([-._]?(i?q\d\w*|b?f(16|32)))?", file, re.IGNORECASE):
            file = f"{self.path.resolve().parent.name}/{file}"
        words = [re.sub(r"[\W_]+", "", text).lower() for text in (model, file)]
        return visible(file if words[0] in ("", words[1]) else f"{model[:80]} ({file[-80:]})")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.metadata.get("tokenizer.chat_template"))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(entry.shape) for entry in self._entries.values())

    @cached_property
    def weights_by_type(self) -> Mapping[str, int]:
        """How many weights matrices have in each type, most first: {"Q4_K": 20_000_000, …}."""
        counts: Counter[str] = Counter()
        for entry in self._entries.values():
            if len(entry.shape) > 1:
                counts[TYPES[entry.kind].name] += math.prod(entry.shape)
        return dict(counts.most_common())

    @property
    def matrix_kinds(self) -> set[int]:
        """GGML's numbers of the types of its matrices."""
        return {entry.kind for entry in self._entries.values() if len(entry.shape) > 1}

    @property
    def bits(self) -> int | None:
        """4 if any matrix is held in at most 4 bits, 8 if any in 5 to 8; else None: floats."""
        bits = {TYPES[kind].bits for kind in self.matrix_kinds}
        quantized = [width for width in bits if width < 16]
        return None if not quantized else 4 if min(quantized) <= 4 else 8

    def values(self, name: str) -> list[Any]:
        """A list of the header; empty if there is none of this name."""
        found = self._lists.get(name)
        return [] if found is None else _Header(self._data[0].data, found.at).items(found)

    def kind(self, name: str) -> int:
        """GGML's number of a tensor's type."""
        return self._entries[name].kind

    @contextlib.contextmanager
    def tensor(self, name: str) -> Iterator[RawTensor]:
        """A tensor, mapped while the context lasts: its pages are not held afterwards."""
        entry = self._entries[name]
        data, form = self._data[entry.part], TYPES[entry.kind]
        rows = math.prod(entry.shape[1:])
        row_bytes = entry.shape[0] // form.weights * form.size
        begin = self._begins[entry.part] + entry.offset
        try:
            raw = np.asarray(data[begin : begin + rows * row_bytes]).reshape(rows, row_bytes)
            yield RawTensor(entry.kind, entry.shape[::-1], raw)
        finally:
            mapped = data._mmap  # type: ignore[attr-defined]
            if hasattr(mapped, "madvise"):
                first = begin // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, first, begin + rows * row_bytes - first)

    def floats(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's values in float32."""
        with self.tensor(name) as raw:
            values = gguf.dequantize(raw.data, gguf.GGMLQuantizationType(raw.kind))
            return values.reshape(raw.shape).astype(np.float32, copy=True)

    def as_reader(self) -> Any:
        """The file as `gguf.GGUFReader` has it, as far as transformers makes use of it."""
        fields = {}
        for name, value in self.metadata.items():
            is_text = isinstance(value, str)
            parts = [value.encode() if is_text else [value]]
            kind = 8 if is_text else 7 if isinstance(value, bool) else 6
            kind = 4 if type(value) is int else kind
            fields[name] = SimpleNamespace(parts=parts, data=[0], types=[kind])
        for name, held in self._lists.items():
            items = self.values(name)
            is_text = held.kind == _STRING
            parts = [item.encode() if is_text else [item] for item in items]
            fields[name] = SimpleNamespace(
                parts=parts, data=range(len(parts)), types=[_ARRAY, held.kind]
            )
        tensors = [_Lazy(self, name) for name in self._entries]
        return SimpleNamespace(fields=fields, tensors=tensors)


class _Lazy:
    """A tensor as `gguf.ReaderTensor`, mapped when it is looked at."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self._file, self.name = file, name

    @property
    def tensor_type(self) -> Any:
        return gguf.GGMLQuantizationType(self._file.kind(self.name))

    @property
    def data(self) -> Any:
        with self._file.tensor(self.name) as raw:
            if TYPES[raw.kind].bits == 32:
                return raw.data.view(np.float32).reshape(raw.shape)
            return raw.data.reshape(*raw.shape[:-1], -1)


def _check(
    metadata: Mapping[str, Any], entries: Mapping[str, _Entry], begin: int, num_bytes: int
) -> None:
    """ValueError unless the tensors lie one behind the other, and are those of its layers."""
    if not isinstance(architecture := metadata.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    if not entries:
        raise ValueError("it has no tensors")
    num_layers = metadata.get(f"{architecture}.block_count")
    expected, alignment = 0, int(metadata.get(_ALIGNMENT, 32))
    for name, entry in entries.items():
        form = TYPES.get(entry.kind)
        if form is None:
            raise ValueError(f"{short(name)} is of the unknown type {entry.kind}")
        if entry.shape[0] % form.weights:
            raise ValueError(f"{short(name)} is {entry.shape[0]} wide, not whole blocks")
        if entry.offset != expected:
            raise ValueError(f"{short(name)} does not begin where the tensor before it ends")
        end = entry.offset + math.prod(entry.shape) // form.weights * form.size
        if begin + end > num_bytes:
            raise ValueError(f"{short(name)} ends behind the file's end; it was cut off")
        expected = -(-end // alignment) * alignment
        layer = re.match(r"blk\.(\d{1,9})\.", name)
        if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            raise ValueError(f"it has {short(name)}, but {num_layers} layers")


class _Header:
    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data, self._at = data, at

    def read(self, part: int) -> tuple[Mapping[str, Any], Mapping[str, _Entry], int]:
        """Fields, tensors by name, and where the tensors' bytes begin.

        Args:
            part: which of a model's files this is.
        """
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
            _add(entries, name, _Entry(shape, self._one("I"), self._one("Q"), part))
        alignment = metadata.get(_ALIGNMENT, 32)
        if alignment not in ALIGNMENTS:
            raise ValueError(f"its alignment is {short(alignment)}, no power of two")
        return metadata, entries, -(-self._at // alignment) * alignment

    def _take(self, size: int) -> memoryview:
        """The next bytes, which must be there."""
        if self._at + size > len(self._data):
            raise ValueError("it ends in the middle of its header")
        self._at += size
        return self._data[self._at - size : self._at]

    def _one(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def _string(self) -> str:
        return bytes(self._take(self._one("Q"))).decode()

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A field's value; of a list, where it is."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count, at = *self._peek("IQ"), self._at + 12
            self._skip(depth)
            return _Array(inner, count, at)
        if kind not in _SCALARS:
            raise ValueError(f"it has a field of the unknown type {kind}")
        return self._one(_SCALARS[kind])

    def _peek(self, codes: str) -> tuple[Any, ...]:
        at = self._at
        values = tuple(self._one(code) for code in codes)
        self._at = at
        return values

    def items(self, array: _Array) -> list[Any]:
        """What a list holds, from its first item on."""
        if array.kind in _SCALARS:
            code = _SCALARS[array.kind]
            raw = self._take(array.count * struct.calcsize("<" + code))
            values: list[Any] = np.frombuffer(raw, dtype="<" + _NUMPY.get(code, code)).tolist()
            return values
        if array.kind == _STRING:
            return [self._string() for _ in range(array.count)]
        return [self._value(array.kind) for _ in range(array.count)]

    def _skip(self, depth: int) -> None:
        """Past an array, whose items take some bytes each: their number is no reason to wait."""
        inner, count = self._one("I"), self._one("Q")
        if depth == MAX_NESTING:
            raise ValueError(f"its arrays are nested more than {MAX_NESTING} deep")
        if inner in _SCALARS:
            self._take(count * struct.calcsize("<" + _SCALARS[inner]))
            return
        if inner == _STRING:
            return self._skip_strings(count)
        for _ in range(count):
            self._value(inner, depth + 1)

    def _skip_strings(self, count: int) -> None:
        """Past strings, of which a vocabulary has hundreds of thousands."""
        data, at, end = self._data, self._at, len(self._data) - 8
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise ValueError("it ends in the middle of its header")
            at += 8 + length_at(data, at)[0]
        self._at = at
        self._take(0)


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found:
        raise ValueError(f"it has {short(name)} twice")
    found[name] = value


@dataclass(frozen=True, slots=True)
class Type:
    """One of GGML's types.

    Attributes:
        bits: of a number.
        weights: in a block.
        size: bytes of a block.
    """

    name: str
    bits: int
    weights: int
    size: int


def _type_of(kind: gguf.GGMLQuantizationType) -> Type:
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if weights == 1:
        return Type(kind.name, 16 if kind.name in ("F16", "BF16") else 32, weights, size)
    (bits, *_) = re.findall(r"\d+", kind.name)
    return Type(kind.name, int(bits), weights, size)


TYPES = {int(kind): _type_of(kind) for kind in gguf.GGML_QUANT_SIZES}
"""By GGML's number of the type."""
