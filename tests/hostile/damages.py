"""What may be done to a copy of a valid model folder, and what is then expected of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Damage = Callable[[Path], None]
MISSING = object()


@dataclass(frozen=True, slots=True)
class Case:
    """One damage to a copy of a valid folder.

    Attributes:
        base: which folder, as `BASES` names them.
        another: what is left may be another valid model, whose text is its own.
        refused: what is left must not load, even if it writes the same text.
    """

    base: str
    name: str
    damage: Damage
    another: bool = False
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.base}: {self.name}"


def rewrite(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def change(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(edit((folder / name).read_bytes()))

    return damage


def setting(name: str, key: str, value: Any) -> Damage:
    """A key of a JSON file, dots between its levels."""

    def edit(data: bytes) -> bytes:
        values = json.loads(data)
        *path, last = key.split(".")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {})
        if value is MISSING:
            inner.pop(last, None)
        else:
            inner[last] = value
        return json.dumps(values).encode()

    return change(name, edit)


def with_tensor(name: str, edit: Callable[[Tensor], Tensor]) -> Damage:
    """Another tensor under a name of the weight file."""
    return tensors(lambda found: {**found, name: edit(found[name])})


def tensors(edit: Callable[[dict[str, Tensor]], Mapping[str, Any]]) -> Damage:
    """Another set of tensors in the weight file of a folder."""

    def damage(folder: Path) -> None:
        file = next(f for f in sorted(folder.iterdir()) if f.suffix in (".safetensors", ".bin"))
        if file.suffix == ".bin":
            torch.save(dict(edit(torch.load(file))), file)
        else:
            save_file(dict(edit(load_file(file))), file, metadata={"format": "pt"})

    return damage


def without(*names: str) -> Damage:
    return tensors(lambda found: {k: v for k, v in found.items() if k not in names})


def reshaped(name: str) -> Damage:
    return tensors(lambda found: {**found, name: found[name].flatten()[:-1].clone()})


def as_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def linked(name: str, to: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return damage


def as_pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


JSON_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a list of lists": b"[[1, 2], [3]]",
    "a number": b"7",
    "a text": b'"model"',
    "deep lists": b"[" * 100_000,
    "deep mappings": b'{"a":' * 100_000,
    "deep and closed": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "deep within": b'{"model_type": "llama", "x": ' + b"[" * 600 + b"]" * 600 + b"}",
    "no utf-8": b"\xff\xfe{\x00}\x00",
    "zeros": bytes(1000),
    "5,000 digits": b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"model_type": "\\ud800"}',
    "spaces by the million": b" " * (20 << 20),
    "a terminal's commands": b'{"model_type": "\\u001b[2J\\u0007\\r\\n"}',
}


FEW_TEXTS = {name: JSON_TEXTS[name] for name in ("a list", "deep lists", "no utf-8", "zeros")}
"""One of each kind, for files that are read as the first is."""


def json_cases(base: str, name: str, texts: Mapping[str, bytes] = FEW_TEXTS) -> Iterator[Case]:
    for what, text in texts.items():
        yield Case(base, f"{name} is {what}", rewrite(name, text))
    yield Case(base, f"{name} is cut", change(name, lambda data: data[: len(data) // 2]))
    yield Case(base, f"{name} is a pipe", as_pipe(name))
    yield Case(base, f"{name} is endless", linked(name, "/dev/zero"))
