"""A run's settings as flat names and short texts, and which of them differ between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from engine.drafters.method import MethodConfig
from storage import RunDetail, RunSummary

MAX_VALUE_CHARS = 80
ABSENT = "–"
Types = Mapping[str, type[MethodConfig]]


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
    """A setting's value in at most `MAX_VALUE_CHARS`; different values give different texts."""
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


def chosen(run: RunSummary) -> dict[str, Any]:
    """All that was chosen for a run, flat: `method.max_draft_len`, `sampling.top_k`, `label.turn`.

    A greedy run comes without its seed, which decides nothing.
    """
    sampling = dict(run.sampling)
    if not sampling.get("temperature"):
        sampling.pop("seed", None)
    groups = {"method": run.method, "sampling": sampling, "limits": run.limits, "label": run.labels}
    return {"target": run.target, "dtype": run.dtype, "device": run.device} | flatten(
        {name: values for name, values in groups.items() if values}
    )


def machine(run: RunDetail) -> dict[str, Any]:
    """Where a run ran, flat: `versions.torch`, …"""
    shown_elsewhere = {"target", "dtype", "device"}
    return flatten({k: v for k, v in run.environment.items() if k not in shown_elsewhere})


def non_default(run: RunSummary, types: Types) -> str:
    """What tells a run's method and sampling from their defaults, in one line."""
    own = _changed(run.method, defaults(run.decoding_type, types), types)
    if temperature := run.sampling.get("temperature"):
        own["temperature"] = temperature
    return " · ".join(f"{key} {short(value)}" for key, value in own.items())


def _changed(
    method: Mapping[str, Any], usual: Mapping[str, Any], types: Types, prefix: str = ""
) -> dict[str, Any]:
    """A method's settings that are not `usual`, flat; of a method within first its type."""
    changes: dict[str, Any] = {}
    for key, value in method.items():
        if key == "decoding_type" or usual.get(key) == value:
            continue
        name, kind = f"{prefix}{key}", None
        if isinstance(value, Mapping):
            kind = value.get("decoding_type")
        changes[name] = kind or value
        if isinstance(kind, str):
            changes |= _changed(value, defaults(kind, types), types, f"{name}.")
    return changes


def defaults(decoding_type: str, types: Types) -> dict[str, Any]:
    """A method's default settings as stored; of an unknown one none."""
    cls = types.get(decoding_type)
    fields = cls.model_fields.items() if cls else ()
    usual = {name: field.get_default() for name, field in fields}
    return dict(to_jsonable_python(usual, serialize_unknown=True))


@dataclass(frozen=True, slots=True)
class SettingTexts:
    """The settings of some runs: the different values of each, as short texts.

    Attributes:
        usual: names whose value is their method's default; where others lack such a setting, that
            alone is no difference.
    """

    values: Mapping[str, Sequence[str]]
    usual: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, all_settings: Sequence[Mapping[str, Any]], usual: frozenset[str] = frozenset()
    ) -> SettingTexts:
        texts: dict[str, dict[str, None]] = {}
        for settings in all_settings:
            for name, value in settings.items():
                texts.setdefault(name, {})[short(value)] = None
        return cls({name: tuple(values) for name, values in texts.items()}, usual)


def differences(configurations: Sequence[SettingTexts]) -> dict[str, list[str]]:
    """The settings that are not the same in all configurations, or not in all runs of the only one.

    Returns:
        A text per configuration for each name; a dash where a configuration lacks it.
    """
    names = dict.fromkeys(name for each in configurations for name in each.values)
    return {
        name: [", ".join(sorted(each.values.get(name, (ABSENT,)))) for each in configurations]
        for name in names
        if _differs(name, configurations)
    }


def _differs(name: str, configurations: Sequence[SettingTexts]) -> bool:
    having = [each for each in configurations if name in each.values]
    different = {frozenset(each.values[name]) for each in having}
    if len(configurations) == 1:
        return any(len(values) > 1 for values in different)
    lacking = len(having) < len(configurations)
    return len(different) > 1 or (lacking and any(name not in each.usual for each in having))
