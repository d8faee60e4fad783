"""Damaged and hostile weight files: safetensors, pickles and GGUF."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.hostile.damages import (
    Case,
    Damage,
    as_folder,
    as_pipe,
    change,
    gone,
    linked,
    reshaped,
    rewrite,
    tensors,
    with_tensor,
    without,
)
from tests.models import tiny_model

WEIGHTS = "model.safetensors"


def header(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another header of a safetensors file."""

    def change_header(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + size])
        text = edit(values)
        text = text if isinstance(text, bytes) else json.dumps(text or values).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return change(WEIGHTS, change_header)


def entry(**fields: Any) -> Damage:
    name = "model.norm.weight"
    return header(lambda values: {**values, name: {**values[name], **fields}})


DAMAGED: dict[str, Damage] = {
    "empty": rewrite(WEIGHTS, b""),
    "a header of 2^63 bytes": change(WEIGHTS, lambda d: struct.pack("<Q", 1 << 63) + d[8:]),
    "a pickle": lambda folder: torch.save({"a": torch.ones(2)}, folder / WEIGHTS),
    "a list for a header": header(lambda values: b"[]"),
    "a deep header": header(lambda values: b'{"a":' * 50_000),
    "a header with a deep value": header(
        lambda values: b'{"x":' + b"[" * 9000 + b"]" * 9000 + b"," + json.dumps(values).encode()[1:]
    ),
    "offsets that overlap": entry(data_offsets=[0, 128]),
    "offsets beyond the end": entry(data_offsets=[1 << 60, (1 << 60) + 128]),
    "a shape that overflows": entry(shape=[1 << 32, 1 << 32, 2]),
    "a folder": as_folder(WEIGHTS),
    "a pipe": as_pipe(WEIGHTS),
    "endless": linked(WEIGHTS, "/dev/zero"),
    "gone": gone(WEIGHTS),
}


INDEXES: dict[str, bytes] = {
    "names no file": b'{"weight_map": {}}',
    "names a file that is not": b'{"weight_map": {"lm_head.weight": "gone.safetensors"}}',
    "names a file outside": b'{"weight_map": {"lm_head.weight": "../../../etc/passwd"}}',
    "is cut": b'{"weight_map": {',
    "is deep": b"[" * 100_000,
}


def weight_cases() -> Iterator[Case]:
    case, names = partial(Case, "target"), tuple(tiny_model().state_dict())
    for name in names[:4] + names[-2:]:
        yield case(f"it lacks {name}", without(name), refused=True)
        yield case(f"{name} has another shape", reshaped(name))
    yield case("it has no tensors", tensors(lambda found: {}))
    yield case("all names are others", tensors(lambda f: {f"x.{k}": v for k, v in f.items()}))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    yield case("it has a bias that is not added", tensors(lambda f: f | bias), refused=True)
    layer = {"model.layers.3.mlp.up_proj.weight": torch.ones(48, 32)}
    yield case("it has a layer more", tensors(lambda f: f | layer), refused=True)
    for kind in (torch.int64, torch.bool, torch.complex64, torch.float64):
        damage = with_tensor("lm_head.weight", partial(Tensor.to, dtype=kind))
        yield case(f"a matrix is {kind}", damage, another=True)
    for value in (float("nan"), float("inf"), float("-inf")):
        for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
            damage = with_tensor(name, partial(torch.full_like, fill_value=value))
            yield case(f"{name} is {value}", damage, refused=True)
    for what, damage in DAMAGED.items():
        yield case(f"its weights are {what}", damage)
    for what, text in INDEXES.items():
        yield case(f"its index {what}", partial(_with_index, text))


def _with_index(text: bytes, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_bytes(text)


class Runs:
    """Runs a command when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class Allocates:
    """Takes a terabyte when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


def pickled(name: str, value: Any) -> Damage:
    return lambda folder: torch.save(value, folder / name)


def bomb(name: str) -> Damage:
    """An archive whose parts are compressed a thousandfold."""

    def damage(folder: Path) -> None:
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (50 << 20))
            archive.writestr("archive/version", b"3\n")

    return damage


def expanded(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that say to be huge over a storage of one number."""
    return {name: torch.zeros(1).expand(1 << 20, 1 << 20) for name in found}


def pickle_cases(base: str, name: str) -> Iterator[Case]:
    for what, damage in {
        "runs a command": pickled(name, {"a": Runs()}),
        "takes a terabyte": pickled(name, {"a": Allocates()}),
        "is a list": pickled(name, [1, 2]),
        "has lists among tensors": pickled(name, {"a": torch.ones(2), "b": [1]}),
        "is expanded": lambda folder: torch.save(
            expanded(torch.load(folder / name)), folder / name
        ),
        "is on no device": pickled(name, {"a": torch.empty(4, device="meta")}),
        "is sparse": pickled(name, {"a": torch.eye(4).to_sparse()}),
        "is a bomb": bomb(name),
        "is empty": rewrite(name, b""),
        "is a plain pickle": rewrite(name, pickle.dumps({"a": Runs()})),
        "is deep": rewrite(name, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "is an old pickle": lambda folder: torch.save(
            {"a": Runs()}, folder / name, _use_new_zipfile_serialization=False
        ),
        "is endless": linked(name, "/dev/zero"),
        "is a pipe": as_pipe(name),
        "is a folder": as_folder(name),
    }.items():
        yield Case(base, f"{name} {what}", damage)


# ---- GGUF


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def gguf(*fields: bytes, tensors: int = 0, count: int | None = None, rest: bytes = b"") -> Damage:
    head = b"GGUF" + u32(3) + u64(tensors) + u64(len(fields) if count is None else count)
    return rewrite("tiny.gguf", head + b"".join(fields) + rest)


def with_field(field: bytes) -> Damage:
    """One more field, the first."""

    def edit(data: bytes) -> bytes:
        (count,) = struct.unpack_from("<Q", data, 16)
        return data[:16] + u64(count + 1) + field + data[24:]

    return change("tiny.gguf", edit)


def number(key: str, value: int) -> Damage:
    """Another value of a field of 32 bits."""

    def edit(data: bytes) -> bytes:
        at = data.index(text(key.encode())) + 8 + len(key) + 4
        return data[:at] + u32(value) + data[at + 4 :]

    return change("tiny.gguf", edit)


def tensor_field(offset: int, value: bytes) -> Damage:
    """Something else behind the name of a norm in the middle; 0 = its number of dimensions."""

    def edit(data: bytes) -> bytes:
        name = text(b"blk.0.attn_norm.weight")
        at = data.index(name) + len(name) + offset
        return data[:at] + value + data[at + len(value) :]

    return change("tiny.gguf", edit)


def renamed(old: bytes, new: bytes) -> Damage:
    assert len(old) == len(new)
    return change("tiny.gguf", lambda data: data.replace(old, new))


ARRAY, STRING = 9, 8
KEY = text(b"key")
NESTED = KEY + u32(ARRAY) + (u32(ARRAY) + u64(1)) * 50_000
GGUF_DAMAGES: dict[str, Damage] = {
    "is empty": rewrite("tiny.gguf", b""),
    "is text": rewrite("tiny.gguf", b"no gguf at all" * 50),
    "is of version 1": change("tiny.gguf", lambda d: d[:4] + u32(1) + d[8:]),
    "has 2^64 - 1 tensors": change("tiny.gguf", lambda d: d[:8] + b"\xff" * 8 + d[16:]),
    "has 2^64 - 1 fields": change("tiny.gguf", lambda d: d[:16] + b"\xff" * 8 + d[24:]),
    "has no tensors": gguf(),
    "has a text of 2^63 bytes": gguf(KEY + u32(STRING) + u64(1 << 63) + b"x"),
    "has a name that is no utf-8": with_field(text(b"\xff\xfe") + u32(4) + u32(1)),
    "has an array of 2^60 texts": gguf(KEY + u32(ARRAY) + u32(STRING) + u64(1 << 60)),
    "has an array of 2^60 empty arrays": with_field(
        KEY + u32(ARRAY) + u32(ARRAY) + u64(1 << 60) + (u32(0) + u64(0)) * 1000
    ),
    "is nested 50,000 deep": gguf(NESTED),
    "has alignment 0": with_field(text(b"general.alignment") + u32(4) + u32(0)),
    "has a text for alignment": with_field(text(b"general.alignment") + u32(8) + text(b"32")),
    "has a field twice": with_field(text(b"llama.block_count") + u32(4) + u32(3)),
    "has 0 layers": number("llama.block_count", 0),
    "has 4 layers of 3": number("llama.block_count", 4),
    "has 0 heads": number("llama.attention.head_count", 0),
    "has 5 heads": number("llama.attention.head_count", 5),
    "has 3 key heads": number("llama.attention.head_count_kv", 3),
    "is 2^31 wide": number("llama.embedding_length", 1 << 31),
    "has a vocabulary of 2^31": number("llama.vocab_size", 1 << 31),
    "is of no architecture": renamed(b"general.architecture", b"general.architectura"),
    "is of an unknown architecture": renamed(text(b"llama"), text(b"lalma")),
    "has no tokenizer": renamed(b"tokenizer.ggml.", b"tokenizer.ggnl."),
    "has an unknown tokenizer": renamed(text(b"gpt2"), text(b"gpt9")),
    "has no merges": renamed(b"ggml.merges", b"ggml.margas"),
    "lacks a norm": renamed(b"output_norm.weight", b"output_narm.weight"),
    "lacks a layer": renamed(b"blk.2.", b"blk.7."),
    "has a tensor twice": renamed(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
    "has a tensor of 0 dimensions": tensor_field(0, u32(0)),
    "has a tensor of 2^63 numbers": tensor_field(4, u64(1 << 63)),
    "has a tensor of 63 numbers": tensor_field(4, u64(63)),
    "has a tensor of an unknown type": tensor_field(12, u32(9999)),
    "has a tensor beyond the end": tensor_field(16, u64(1 << 40)),
    "has a tensor that is not aligned": tensor_field(16, u64(7)),
    "is a folder": as_folder("tiny.gguf"),
    "is a pipe": as_pipe("tiny.gguf"),
    "is endless": linked("tiny.gguf", "/dev/zero"),
}


def gguf_cases() -> Iterator[Case]:
    return (Case("gguf", what, damage) for what, damage in GGUF_DAMAGES.items())
