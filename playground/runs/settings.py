"""A run's settings as flat names and short texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from engine.errors import ConfigError
from playground.host.catalog import MethodTypes, stored_config
from storage import RunDetail, RunSummary

MAX_VALUE_CHARS = 80


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: `{"a": {"b": 1}}` → `{"a.b": 1}`; an empty one stays as it is."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{name}.")
        else:
            flat[name] = inner
    return flat


def short(value: Any) -> str:
    """A setting's value in at most `MAX_VALUE_CHARS`; different values have different texts."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, list | tuple) for item in value):
            return f"{len(value)} paths #{_digest(value)}"
        if all(isinstance(item, str) for item in value):
            value = ", ".join(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[: MAX_VALUE_CHARS - 7]}… #{_digest(text)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:4]


def machine(run: RunDetail) -> dict[str, Any]:
    """The environment of a run, flat: `versions.torch`, …"""
    shown_elsewhere = {"target", "dtype", "device"}
    return flatten({k: v for k, v in run.environment.items() if k not in shown_elsewhere})


def non_default(run: RunSummary, types: MethodTypes) -> str:
    """The settings of a run that differ from their defaults, in one line."""
    own = changed_settings(run, types)
    if temperature := run.sampling.get("temperature"):
        own["temperature"] = temperature
    return " · ".join(f"{key} {short(value)}" for key, value in own.items())


def changed_settings(run: RunSummary, types: MethodTypes) -> dict[str, Any]:
    """The method's settings that differ from their defaults, flat; all of an unknown method's."""
    with suppress(ConfigError):  # as of another version
        return stored_config(run.method, types).changed_flat
    return {name: v for name, v in flatten(run.method).items() if name != "decoding_type"}
