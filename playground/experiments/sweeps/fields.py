"""Which settings of a method a sweep can vary, read from the method's class alone.

| field | can be varied over |
|---|---|
| bool | both values |
| Literal | some or all of its values |
| int, float | a range within the field's bounds, or listed values |
| str | listed values, such as two drafters |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.drafters.method import MethodConfig

Scalar = bool | int | float | str | None
Kind = Literal["flag", "choice", "int", "float", "text"]
_KINDS: dict[str, Kind] = {"boolean": "flag", "integer": "int", "number": "float", "string": "text"}


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting that can be varied.

    Attributes:
        value: what the method has now.
        low, high: bounds of the field, None where it has none.
        above: whether `low` itself is excluded.
        choices: values of a flag or choice.
        optional: whether the setting may be none.
    """

    field: str
    kind: Kind
    help: str
    value: Scalar
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[Scalar, ...] = ()
    optional: bool = False

    def allows(self, value: object) -> bool:
        """Whether the field takes this value, other settings aside."""
        if value is None:
            return self.optional
        if self.choices:
            return any(value == c and type(value) is type(c) for c in self.choices)
        if self.kind == "text":
            return isinstance(value, str)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind == "int" and not isinstance(value, int):
            return False
        return math.isfinite(value) and self._within(value)

    def _within(self, value: float) -> bool:
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or value <= self.high

    @property
    def rule(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            words = "one of " + ", ".join(shown(choice) for choice in self.choices)
        elif self.kind == "text":
            words = "text"
        else:
            words = "an integer" if self.kind == "int" else "a number"
            words += self._bounds
        return words + (" or none" if self.optional else "")

    @property
    def _bounds(self) -> str:
        low, high = shown(_plain(self.low)), shown(_plain(self.high))
        if self.low is not None and self.high is not None:
            return f" in {'(' if self.above else '['}{low}, {high}]"
        if self.low is not None:
            return f" {'>' if self.above else '≥'} {low}"
        return "" if self.high is None else f" ≤ {high}"

    @property
    def suggested(self) -> tuple[float, float] | None:
        """A range to start from, around the value: a quarter to twice of it."""
        if self.kind not in ("int", "float") or self.low is None or self.high is None:
            return None
        middle = self.value if isinstance(self.value, int | float) and self.value else self.high / 4
        low, high = max(self.low, middle / 4), min(self.high, middle * 2)
        if self.kind == "int":
            first = math.ceil(low)
            return first, min(int(self.high), max(first + 3, round(high)))
        return float(f"{low:.1g}"), float(f"{high:.1g}")


def knobs_of(config: MethodConfig) -> tuple[Knob, ...]:
    """What can be varied, in the order of the method's fields."""
    properties: Mapping[str, Any] = type(config).model_json_schema()["properties"]
    made = (_knob(name, schema, getattr(config, name)) for name, schema in properties.items())
    return tuple(knob for knob in made if knob is not None)


def _knob(name: str, schema: Mapping[str, Any], value: Any) -> Knob | None:
    options = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    optional = len(options) < len(schema.get("anyOf", [schema]))
    if len(options) != 1 or "const" in options[0]:
        return None
    inner = options[0]
    kind = "choice" if "enum" in inner else _KINDS.get(inner.get("type", ""))
    if kind is None:
        return None
    return Knob(
        name,
        kind,
        schema.get("description", ""),
        value,
        low=inner.get("minimum", inner.get("exclusiveMinimum")),
        high=inner.get("maximum"),
        above="exclusiveMinimum" in inner,
        choices=(False, True) if kind == "flag" else tuple(inner.get("enum", ())),
        optional=optional,
    )


def _plain(value: float | None) -> float | None:
    """A whole number without its point."""
    return int(value) if value is not None and float(value).is_integer() else value


def shown(value: Scalar) -> str:
    """A setting's value as people write it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
