"""Steps ↔ bytes, plain values ↔ JSON text. NaN and infinities survive."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from storage.records import StepRow

_TUPLES = tuple(
    name for name, kind in StepRow.__annotations__.items() if str(kind).startswith("tuple")
)


def dump(value: Any) -> str:
    """JSON text of plain values; mappings may be any Mapping."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=_plain)


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values, whatever the order of their keys."""
    return json.dumps(
        value, ensure_ascii=True, separators=(",", ":"), sort_keys=True, default=_plain
    )


def load(text: str) -> Any:
    """Plain values of JSON text."""
    return json.loads(text)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")


def pack_step(step: StepRow) -> bytes:
    """One step as compressed JSON: a 64-node tree takes one or two kilobytes."""
    return zlib.compress(dump(asdict(step)).encode(), 1)


def unpack_step(payload: bytes) -> StepRow:
    """The step that `pack_step` packed; fields that it did not have yet take their defaults."""
    values = load(zlib.decompress(payload).decode())
    for name in _TUPLES:
        if name in values:
            values[name] = tuple(values[name])
    return StepRow(**values)
