"""What a sweep tries: per varied setting a range or a list of values, and all of their grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.experiments.sweeps.fields import Knob, Scalar, knobs_of, shown

Point = dict[str, Scalar]
"""One value per varied setting."""
MAX_GRID = 10_000
"""Combinations that a grid may have; also the largest space that is searched without repeats."""
MAX_VARIED = 16


class Vary(Settings):
    """One varied setting: a range (`low` to `high`, by `step` or by factors) or `values`."""

    field: str
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = Field(None, gt=0)
    log: bool = False
    values: tuple[Scalar, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _either(self) -> Self:
        ranged = self.low is not None and self.high is not None
        if ranged == bool(self.values) or (self.low is None) != (self.high is None):
            raise ValueError(f"{self.field} must have either a range (low and high) or values")
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise ValueError(f"{self.field} must list each value once, got {self}")
        if ranged:
            self._check_range(*self.ends)
        return self

    def _check_range(self, low: float, high: float) -> None:
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"{self.field} must have low ≤ high, got {self}")
        if self.log and (low <= 0 or self.step is not None):
            raise ValueError(f"{self.field} by factors must begin above 0 and has no step")

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high of a range."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def __str__(self) -> str:
        if self.values:
            return ",".join(map(shown, self.values))
        low, high = self.ends
        tail = ":log" if self.log else "" if self.step is None else f":{self.step:g}"
        return f"{low:g}:{high:g}{tail}"

    def holds(self, value: Scalar) -> bool:
        """Whether the value is one of those listed, or in the range and on its steps."""
        if self.values:
            return any(value == v and type(value) is type(v) for v in self.values)
        if value is None or isinstance(value, bool | str):
            return False
        low, high = self.ends
        steps = 0.0 if self.step is None else (value - low) / self.step
        return low <= value <= high and abs(steps - round(steps)) < 1e-8

    def count(self, *, whole: bool) -> int | None:
        """How many values a grid would have; None for a range of floats without a step."""
        if self.values:
            return len(self.values)
        low, high = self.ends
        if self.log:
            doublings = math.log2(high / low)
            return int(doublings + 1e-9) + 1 + (doublings % 1 > 1e-9)
        step = self.step or (1 if whole else None)
        return None if step is None else int((high - low) / step + 1e-9) + 1

    def grid(self, *, whole: bool) -> tuple[Scalar, ...]:
        """The values of a grid; by factors of two where the range is walked by factors.

        Raises:
            ConfigError: a range of floats has no step.
        """
        if self.values:
            return self.values
        count = self.count(whole=whole)
        if count is None:
            raise ConfigError(
                f"{self.field} is a number: a grid needs its step, such as {self}:0.1, or values."
            )
        low, high = self.ends
        if self.log:
            found = [min(high, low * 2**i) for i in range(count)]
        else:
            found = [low + i * (self.step or 1) for i in range(count)]
        return tuple(dict.fromkeys(round(x) if whole else float(f"{x:.12g}") for x in found))


def parse_vary(text: str) -> Vary:
    """`field=1:16`, `field=1:16:3`, `field=1:64:log` or `field=a,b,c`; values are read as YAML.

    Raises:
        ConfigError: saying what it should look like.
    """
    name, equals, given = text.partition("=")
    parts = given.split(":")
    if not equals or not name.strip() or not given.strip():
        raise ConfigError(
            f"--vary takes field=low:high, field=low:high:step, field=low:high:log or "
            f"field=a,b,c, got {text!r:.80}."
        )
    values: dict[str, Any] = {"field": name.strip()}
    numbers = [_number(part) for part in parts]
    if len(parts) > 3 and None not in numbers:
        raise ConfigError(f"--vary {text}: a range is low:high or low:high:step.")
    if len(parts) in (2, 3) and None not in numbers[:2]:
        values |= {"low": numbers[0], "high": numbers[1]}
        if parts[2:] == ["log"]:
            values["log"] = True
        elif len(parts) == 3 and numbers[2] is None:
            raise ConfigError(f"--vary {text}: the step must be a number or log.")
        elif len(parts) == 3:
            values["step"] = numbers[2]
    else:
        values["values"] = tuple(_scalar(part.strip(), text) for part in given.split(","))
    return Vary.parse(values, where=f"--vary {text}")


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _scalar(text: str, where: str) -> Scalar:
    number = _number(text)
    if number is not None or text == "none":
        return number
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--vary {where}: {text!r:.80} is not a YAML value.") from error
    return value if isinstance(value, Scalar) else text


class Space:
    """The varied settings of one method, checked against its class."""

    def __init__(self, base: MethodConfig, varied: Sequence[Vary]) -> None:
        """Raises ConfigError: an unknown setting, or a value that the method never takes."""
        self.base = base
        self.varied = tuple(varied)
        self.knobs = _chosen(base, self.varied)

    def config(self, point: Mapping[str, Any]) -> MethodConfig:
        """The method at a point.

        Raises:
            ConfigError: the settings do not go together; the sentence says which and why.
        """
        return self.base.replace(**point)

    @property
    def start(self) -> Point:
        """Where the method is now; may lie outside of what is varied."""
        return {vary.field: getattr(self.base, vary.field) for vary in self.varied}

    def holds(self, point: Mapping[str, Any]) -> bool:
        """Whether a search could come to a point."""
        return all(vary.holds(point[vary.field]) for vary in self.varied)

    @property
    def num_points(self) -> int | None:
        """How many combinations a search can try; None = without number."""
        axes = self._search_axes()
        return None if axes is None else math.prod(map(len, axes.values()))

    @property
    def num_grid(self) -> int:
        """How many combinations the grid has.

        Raises:
            ConfigError: a number without a step.
        """
        counts = [v.count(whole=k.kind == "int") for v, k in self._pairs()]
        return len(self.grid()) if None in counts else math.prod(c for c in counts if c)

    def points(self) -> tuple[Point, ...] | None:
        """All that a search can try; None where they are too many to list."""
        count = self.num_points
        axes = self._search_axes()
        return None if axes is None or count is None or count > MAX_GRID else _points(axes)

    def grid(self) -> tuple[Point, ...]:
        """Every combination, the last setting changing fastest.

        Raises:
            ConfigError: too many, or a number without a step.
        """
        counts = [v.count(whole=k.kind == "int") or 1 for v, k in self._pairs()]
        if math.prod(counts) > MAX_GRID:
            raise ConfigError(
                f"The grid has {math.prod(counts):,} combinations; at most {MAX_GRID:,} are "
                "taken. Narrow a range, set a step, or search instead."
            )
        return _points({v.field: v.grid(whole=k.kind == "int") for v, k in self._pairs()})

    def _pairs(self) -> Iterator[tuple[Vary, Knob]]:
        return zip(self.varied, self.knobs, strict=True)

    def _search_axes(self) -> dict[str, Sequence[Scalar]] | None:
        """Values that a search can give each setting; by factors it takes every integer between."""
        axes: dict[str, Sequence[Scalar]] = {}
        for vary, knob in self._pairs():
            if not vary.values and knob.kind == "int":
                low, high = vary.ends
                axes[vary.field] = range(int(low), int(high) + 1, int(vary.step or 1))
            elif vary.values or (not vary.log and (vary.count(whole=False) or MAX_GRID) < MAX_GRID):
                axes[vary.field] = vary.grid(whole=False)
            else:
                return None
        return axes


def _points(axes: Mapping[str, Sequence[Scalar]]) -> tuple[Point, ...]:
    combinations = itertools.product(*axes.values())
    return tuple(dict(zip(axes, values, strict=True)) for values in combinations)


def _chosen(base: MethodConfig, varied: Sequence[Vary]) -> tuple[Knob, ...]:
    known = {knob.field: knob for knob in knobs_of(base)}
    names = ", ".join(known) or "nothing"
    if not 1 <= len(varied) <= MAX_VARIED:
        raise ConfigError(
            f"A sweep must vary 1 to {MAX_VARIED} settings, got {len(varied)}. "
            f"{type(base).title} can vary {names}."
        )
    if len({vary.field for vary in varied}) < len(varied):
        raise ConfigError("Every setting can be varied once. Join the lists of its values.")
    for vary in varied:
        if vary.field not in known:
            raise ConfigError(
                f"{vary.field!r:.60} cannot be varied. {type(base).title} can vary {names}."
            )
        _check(vary, known[vary.field])
    return tuple(known[vary.field] for vary in varied)


def _check(vary: Vary, knob: Knob) -> None:
    """Refuse what the field never takes, whatever the other settings."""
    ranged = not vary.values
    if ranged and knob.kind not in ("int", "float"):
        raise ConfigError(f"{vary.field} must be {knob.rule}; it has no range. List its values.")
    for value in vary.ends if ranged else vary.values:
        if not knob.allows(value):
            raise ConfigError(
                f"{vary.field} must be {knob.rule}, got {shown(value)}. Set another range or list."
            )
    if ranged and knob.kind == "int" and not isinstance(vary.step or 1, int):
        raise ConfigError(f"{vary.field} is an integer, so its step must be one, got {vary}.")
