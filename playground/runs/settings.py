"""A run's settings as flat names and short words, and which of them differ between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.drafters.method import MethodConfig
from storage import RunDetail, RunSummary

MAX_WORD_CHARS = 80
ABSENT = "–"
Types = Mapping[str, type[MethodConfig]]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: `{"a": {"b": 1}}` → `{"a.b": 1}`; an empty one stays as it is."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            found |= flat(inner, f"{name}.")
        else:
            found[name] = inner
    return found


def words(value: Any) -> str:
    """A setting's value in a few words; different values have different words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, int | str):
        return _clipped(str(value))
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(v, list | tuple) for v in value)
    ):
        return f"{len(value)} paths #{_mark(value)}"
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        return _clipped(", ".join(value))
    return _clipped(json.dumps(value, ensure_ascii=False, default=str))


def _clipped(text: str) -> str:
    if len(text) <= MAX_WORD_CHARS:
        return text
    return f"{text[: MAX_WORD_CHARS - 7]}… #{_mark(text)}"


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:4]


def settings_of(run: RunSummary) -> dict[str, Any]:
    """Everything that was chosen for a run, flat: `method.max_draft_len`, `sampling.seed`, …"""
    chosen = {"target": run.target, "dtype": run.dtype, "device": run.device}
    return chosen | flat({"method": run.method, "sampling": run.sampling, "limits": run.limits})


def surroundings_of(run: RunDetail) -> dict[str, Any]:
    """Where a run ran, flat: `environment.versions.torch`, …"""
    known = {"target", "dtype", "device"}
    return flat({"environment": {k: v for k, v in run.environment.items() if k not in known}})


def changed(run: RunSummary, types: Types) -> str:
    """What tells a run's method and sampling from their defaults, in one line."""
    usual = defaults(run.decoding_type, types)
    own = {k: v for k, v in run.method.items() if k != "decoding_type" and usual.get(k) != v}
    parts = [f"{key} {words(value)}" for key, value in own.items()]
    temperature = run.sampling.get("temperature")
    if temperature:
        parts.append(f"temperature {words(temperature)}")
    return " · ".join(parts)


def defaults(decoding_type: str, types: Types) -> dict[str, Any]:
    """A method's default settings as stored; of an unknown one none."""
    cls = types.get(decoding_type)
    if cls is None:
        return {}
    usual = {name: field.get_default() for name, field in cls.model_fields.items()}
    return dict(json.loads(json.dumps(usual, default=_plain)))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


@dataclass(frozen=True, slots=True)
class Column:
    """The settings of some runs: the different values of each, in words.

    Attributes:
        usual: names whose value is their method's default; where others lack such a setting, that
            alone is no difference.
    """

    values: Mapping[str, Sequence[str]]
    usual: frozenset[str] = frozenset()


def differences(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """The names whose values are not the same in all columns; of one column, not in all its runs.

    Returns:
        Rows of `name` and `values`, one per column; a name that a column lacks has a dash there.
    """
    names = dict.fromkeys(name for column in columns for name in column.values)
    rows = []
    for name in names:
        if _differs(name, columns):
            values = [", ".join(sorted(column.values.get(name, (ABSENT,)))) for column in columns]
            rows.append({"name": name, "values": values})
    return rows


def _differs(name: str, columns: Sequence[Column]) -> bool:
    having = [column for column in columns if name in column.values]
    different = {frozenset(column.values[name]) for column in having}
    if len(columns) == 1:
        return any(len(values) > 1 for values in different)
    lacking = len(having) < len(columns)
    return len(different) > 1 or (lacking and any(name not in c.usual for c in having))


def values_in_words(all_settings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """The different values of each name over several runs, in the order in which they came."""
    found: dict[str, dict[str, None]] = {}
    for settings in all_settings:
        for name, value in settings.items():
            found.setdefault(name, {})[words(value)] = None
    return {name: tuple(values) for name, values in found.items()}
