"""A run's settings as flat names and short texts, and their differences between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine.errors import ConfigError
from playground.host.catalog import MethodTypes
from storage import RunDetail, RunSummary

MAX_VALUE_CHARS = 80
ABSENT = "–"


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


def run_settings(run: RunSummary) -> dict[str, Any]:
    """All settings of a run, flat: `method.max_draft_len`, `sampling.top_k`, `label.turn`.

    Without the seed of a greedy run, which has no effect.
    """
    sampling = dict(run.sampling)
    if not sampling.get("temperature"):
        sampling.pop("seed", None)
    groups = {"method": run.method, "sampling": sampling, "limits": run.limits, "label": run.labels}
    return {"target": run.target, "dtype": run.dtype, "device": run.device} | flatten(
        {name: values for name, values in groups.items() if values}
    )


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
    cls = types.get(run.decoding_type)
    with suppress(ConfigError):  # as of another version
        if cls is not None:
            return cls.parse(run.method).changed_flat
    return {name: v for name, v in flatten(run.method).items() if name != "decoding_type"}


Texts = Mapping[str, Collection[str]]
"""The distinct values of each setting in the runs of a configuration, as short texts."""


def setting_texts(all_settings: Iterable[Mapping[str, Any]]) -> Texts:
    texts: dict[str, set[str]] = {}
    for settings in all_settings:
        for name, value in settings.items():
            texts.setdefault(name, set()).add(short(value))
    return texts


def differences(
    configurations: Sequence[Texts], ignored: Collection[str] = ()
) -> dict[str, list[str]]:
    """The settings that differ between configurations, or between the runs of a single one.

    Returns:
        A text per configuration for each name; a dash where a configuration lacks it.
    """
    names = dict.fromkeys(name for each in configurations for name in each if name not in ignored)
    rows = {name: [sorted(each.get(name, [ABSENT])) for each in configurations] for name in names}
    return {
        name: [", ".join(texts) for texts in row]
        for name, row in rows.items()
        if any(texts != row[0] for texts in row) or (len(row) == 1 and len(row[0]) > 1)
    }
