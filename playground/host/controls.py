"""Controls from a settings class, and the settings back from what the controls hold.

A slider per bounded number, a number box per unbounded one, a choice per Literal, a tick per bool,
text for strings and for numbers that may be left out, one line each for lists of strings, JSON for
any other list.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from engine.config import Settings
from engine.errors import ConfigError
from engine.plain import read_json

Kind = Literal["slider", "number", "choice", "ticks", "flag", "text", "lines"]
Parsed = TypeVar("Parsed", bound=Settings)
LONGEST_SLIDER = 4096
"""Integer ranges wider than this get a number box: a slider could not hit a value."""
WIDEST_NUMBER = 2**53
"""JavaScript's integers are exact up to here; wider ranges are typed as text."""
LONGEST_TEXT = 200_000
"""Characters taken from one control."""


@dataclass(frozen=True, slots=True)
class Control:
    """One field as the page's form draws it; `value` is its default in the control's own form."""

    name: str
    label: str
    help: str
    kind: Kind
    value: Any
    min: float | None = None
    max: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = False
    placeholder: str = ""


def controls_of(settings: Settings, *, skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A control per field of the settings' class, set to the settings' values."""
    fields = type(settings).model_fields
    return [
        asdict(_control(name, info, getattr(settings, name)))
        for name, info in fields.items()
        if name not in skip and not _is_constant(info.annotation)
    ]


def settings_from(cls: type[Parsed], raw: object, *, where: str = "") -> Parsed:
    """Settings from what the form's controls hold.

    Raises ConfigError: naming the key, the value and what is allowed.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of settings.")
    values = {}
    for name, value in raw.items():
        info = cls.model_fields.get(name) if isinstance(name, str) else None
        values[str(name)] = value if info is None else _value(name, info, value)
    return cls.parse(values)


def _control(name: str, info: FieldInfo, value: Any) -> Control:
    inner, optional = _without_none(info.annotation)
    common: dict[str, Any] = {
        "name": name,
        "label": name,
        "help": info.description or "",
        "optional": optional,
    }
    if inner is bool:
        return Control(kind="flag", value=bool(value), **common)
    if get_origin(inner) is Literal:
        choices = (*((None,) if optional else ()), *get_args(inner))
        return Control(kind="choice", value=value, choices=choices, **common)
    if inner in (int, float):
        return _number(info, inner, value, common)
    if inner is str:
        return Control(kind="text", value=value or "", **common)
    if _is_list_of_text(inner):
        text = "\n".join(value or ())
        return Control(kind="lines", value=text, placeholder="one per line", **common)
    text = "" if value is None else json.dumps(_plain(value), separators=(",", ":"))
    return Control(kind="lines", value=text, placeholder="[[0], [0, 0], [1]]", **common)


def _number(info: FieldInfo, kind: type, value: Any, common: dict[str, Any]) -> Control:
    low, high = _bounds(info)
    whole = kind is int
    bounded = low is not None and high is not None and value is not None
    if common["optional"] or (whole and high is not None and high > WIDEST_NUMBER):
        text = "" if value is None else str(value)
        return Control(kind="text", value=text, placeholder="none", **common)
    if not bounded or (whole and high - low > LONGEST_SLIDER):  # type: ignore[operator]
        return Control(kind="number", value=value, min=low, max=high, **common)
    step = 1 if whole else _nice_step(high - low)  # type: ignore[operator]
    return Control(kind="slider", value=value, min=low, max=high, step=step, **common)


def _nice_step(span: float) -> float:
    """About a hundred positions: 0.01 for 1, 0.05 for 10."""
    return 0.01 if span <= 2 else 0.05 if span <= 10 else round(span / 100, 2)


def _bounds(info: FieldInfo) -> tuple[float | None, float | None]:
    low: float | None = None
    high: float | None = None
    for mark in _marks(info):
        if isinstance(mark, Ge | Gt):
            low = typing.cast(float, mark.ge if isinstance(mark, Ge) else mark.gt)
        elif isinstance(mark, Le | Lt):
            high = typing.cast(float, mark.le if isinstance(mark, Le) else mark.lt)
    return low, high


def _marks(info: FieldInfo) -> list[Any]:
    """Constraints on the field and on the parts of its annotation (`Annotated[int, Ge(1)]`)."""
    marks = list(info.metadata)
    for part in get_args(info.annotation):
        marks.extend(getattr(part, "__metadata__", ()))
    return marks


def _value(name: str, info: FieldInfo, raw: Any) -> Any:
    """A control's raw value as the field's type; what does not parse is left for pydantic."""
    if isinstance(raw, str) and len(raw) > LONGEST_TEXT:
        raise ConfigError(f"{name} must have at most {LONGEST_TEXT} characters, got {len(raw)}.")
    inner, optional = _without_none(info.annotation)
    if not isinstance(raw, str):
        return raw
    if optional and not raw.strip():
        return None
    if inner in (int, float):
        return _parsed_number(raw.strip(), inner)
    if inner is str or get_origin(inner) is Literal:
        return raw
    if _is_list_of_text(inner) and not raw.lstrip().startswith("["):
        return [line for line in raw.split("\n") if line]
    return _parsed_json(name, raw)


def _parsed_number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _parsed_json(name: str, text: str) -> Any:
    if not text.strip():
        return []
    return read_json(text, what=f"{name} must be a list such as [[0], [0, 0], [1]]; what is there")


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """`int | None` → `(int, True)`; `Annotated[int, …]` → `(int, False)`."""
    if get_origin(annotation) is typing.Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) < len(get_args(annotation)) and len(rest) == 1:
            return _without_none(rest[0])[0], True
    return annotation, False


def _is_constant(annotation: Any) -> bool:
    """Whether a field can take one value only, as `decoding_type` does."""
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def _is_list_of_text(annotation: Any) -> bool:
    if get_origin(annotation) not in (list, tuple):
        return False
    return _without_none(get_args(annotation)[0])[0] is str


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
