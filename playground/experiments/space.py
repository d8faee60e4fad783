"""The settings that a sweep varies, and their values; derived from the method's class alone.

| field | can be varied over |
|---|---|
| bool | both values |
| Literal | some or all of its values |
| int, float | a range within the field's bounds, or listed values |
| str | listed values, such as two drafters |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.config import Settings, setting
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from playground.host.controls import NUMBERS, Control, fields_of
from presets.reading import parse_yaml

Scalar = bool | int | float | str | None
Point = dict[str, Scalar]
"""One value per varied setting."""
MAX_GRID = 10_000
"""Largest number of combinations of a grid, and of a space that is searched without repeats."""
MAX_VARIED = 16
MAX_TRIALS = 10_000
Objective = Literal["speedup", "mat"]
Mode = Literal["search", "grid"]


def tunables_of(config: MethodConfig) -> tuple[Control, ...]:
    """The settings that can be varied, in the order of the method's fields."""
    return tuple(
        control
        for control in fields_of(type(config)).values()
        if (control.choices or control.type in (*NUMBERS, "boolean", "string"))
        and not control.is_constant
    )


def suggested_range(tunable: Control, value: Scalar) -> str:
    """A suggested range, as `--vary` takes it; empty if there is none.

    For a number, from a quarter of its value to twice its value.
    """
    least, most = tunable.min, tunable.max
    if choices := (False, True) if tunable.type == "boolean" else tunable.choices:
        return ",".join(map(setting_text, choices))
    if not tunable.is_number or least is None or most is None:
        return ""
    middle = (value if isinstance(value, int | float) else 0) or most / 4
    low, high = max(least, middle / 4), min(most, middle * 2)
    if tunable.type == "integer":
        first = math.ceil(low)
        return f"{first}:{min(int(most), max(first + 3, round(high)))}"
    return f"{low:.1g}:{high:.1g}"


def check_value(config: MethodConfig, field: str, value: Scalar) -> None:
    """Raises ConfigError: the field cannot have this value, whatever the other settings."""
    info = type(config).model_fields[field]
    kind: Any = Annotated[info.annotation, info]
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].replace("Input should", "must")
        raise ConfigError(
            f"{field} {rule}, got {setting_text(value)}. Set another range or list."
        ) from error


def setting_text(value: Scalar) -> str:
    """A setting's value as people write it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def point_text(point: Point) -> str:
    """`max_draft_len 4, lookup pool`."""
    return ", ".join(f"{field} {setting_text(value)}" for field, value in point.items())


class VariedSetting(Settings):
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
            low, high = self.ends
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"{self.field} must have low ≤ high, got {self}")
            if self.log and (low <= 0 or self.step is not None):
                raise ValueError(f"{self.field} by factors must start above 0 and take no step")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high of a range."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def __str__(self) -> str:
        if self.values:
            return ",".join(map(setting_text, self.values))
        low, high = self.ends
        tail = ":log" if self.log else "" if self.step is None else f":{self.step:g}"
        return f"{low:g}:{high:g}{tail}"

    def contains(self, value: Scalar) -> bool:
        """Whether the value is one of those listed, or in the range and on its steps."""
        if self.values:  # 1, 1.0 and true differ
            return (type(value), value) in [(type(listed), listed) for listed in self.values]
        if value is None or isinstance(value, bool | str):
            return False
        low, high = self.ends
        steps = 0.0 if self.step is None else (value - low) / self.step
        return low <= value <= high and abs(steps - round(steps)) < 1e-8

    def axis(self, *, whole: bool, search: bool) -> Sequence[Scalar] | None:
        """The values to try; None if there are infinitely many.

        In a grid, a range by factors has factors of two; a search tries every integer in between.
        """
        if self.values:
            return self.values
        low, high = self.ends
        if whole and (search or not self.log):
            return range(int(low), int(high) + 1, int(self.step or 1))
        if self.log:
            if search:
                return None
            doublings = math.ceil(math.log2(high / low) - 1e-9)
            values = [*(low * 2**i for i in range(doublings)), high]
        else:
            count = 0 if self.step is None else int((high - low) / self.step + 1e-9) + 1
            if not 0 < count < MAX_GRID:
                return None
            values = [low + i * (self.step or 1) for i in range(count)]
        return tuple(dict.fromkeys(round(x) if whole else float(f"{x:.12g}") for x in values))


def parse_vary(text: str) -> VariedSetting:
    """`field=1:16`, `field=1:16:3`, `field=1:64:log` or `field=a,b,c`; values are read as YAML."""
    name, _, value_text = (part.strip() for part in text.partition("="))
    if not name or not value_text:
        raise ConfigError(
            f"--vary takes field=low:high, field=low:high:step, field=low:high:log or "
            f"field=a,b,c, got {text!r:.80}."
        )
    parts = value_text.split(":")
    ends = [_number(part) for part in parts[:2]]
    values: dict[str, Any] = {"field": name}
    if len(parts) == 1 or None in ends:
        values["values"] = tuple(_scalar(part.strip(), text) for part in value_text.split(","))
    else:
        values |= dict(zip(("low", "high"), ends, strict=True))
        if len(parts) > 3:
            raise ConfigError(f"--vary {text}: a range is low:high or low:high:step.")
        if parts[2:] == ["log"]:
            values["log"] = True
        elif parts[2:] and (step := _number(parts[2])) is None:
            raise ConfigError(f"--vary {text}: the step must be a number or log.")
        elif parts[2:]:
            values["step"] = step
    return VariedSetting.parse(values, where=f"--vary {text}")


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
    value = parse_yaml(text, where=f"--vary {where:.80}")
    return value if isinstance(value, Scalar) else text


class Space:
    """The varied settings of one method, checked against its class."""

    def __init__(self, base: MethodConfig, varied: Sequence[VariedSetting]) -> None:
        """Raises ConfigError: an unknown setting, or a value that the method cannot have."""
        self.base, self.varied = base, tuple(varied)
        tunables = {tunable.name: tunable for tunable in tunables_of(base)}
        can = f"{type(base).title} can vary {', '.join(tunables) or 'nothing'}."
        fields = [vary.field for vary in varied]
        if not 1 <= len(fields) <= MAX_VARIED:
            raise ConfigError(
                f"A sweep must vary 1 to {MAX_VARIED} settings, got {len(fields)}. {can}"
            )
        if len(set(fields)) < len(fields):
            raise ConfigError(
                "Each setting can be varied only once. Merge the lists of its values."
            )
        for vary in varied:
            if vary.field not in tunables:
                raise ConfigError(f"{vary.field!r:.60} cannot be varied. {can}")
            if not vary.values and not tunables[vary.field].is_number:
                raise ConfigError(f"{vary.field} has no range. List its values.")
            for value in vary.values or vary.ends:
                check_value(base, vary.field, value)
            if tunables[vary.field].is_integer and not isinstance(vary.step or 1, int):
                raise ConfigError(
                    f"{vary.field} is an integer, so its step must be one, got {vary}."
                )
        self.tunables = tuple(tunables[field] for field in fields)

    def config(self, point: Mapping[str, Any]) -> MethodConfig:
        """The method at a point."""
        return self.base.replace(**point)

    @property
    def start(self) -> Point:
        """The point of the method's current settings; may lie outside the space."""
        return {vary.field: getattr(self.base, vary.field) for vary in self.varied}

    def contains(self, point: Mapping[str, Any]) -> bool:
        """Whether a point lies in the space."""
        return all(vary.contains(point[vary.field]) for vary in self.varied)

    @property
    def num_points(self) -> int | None:
        """Number of combinations that a search can try; None = infinitely many."""
        return _count(self._axes(search=True))

    @property
    def num_grid(self) -> int | None:
        """Number of combinations of the grid; None if a range lacks its step."""
        return _count(self._axes(search=False))

    def points(self) -> tuple[Point, ...] | None:
        """All points that a search can try; None if they are too many to list."""
        count = self.num_points
        return None if count is None or count > MAX_GRID else self._points(search=True)

    def grid(self) -> tuple[Point, ...]:
        """All combinations; the last setting changes fastest."""
        for vary, axis in zip(self.varied, self._axes(search=False), strict=True):
            if axis is None:
                raise ConfigError(
                    f"{vary.field} is a number: a grid needs its step, such as {vary}:0.1, or "
                    "values."
                )
        if (count := self.num_grid or 0) > MAX_GRID:
            raise ConfigError(
                f"The grid has {count:,} combinations; at most {MAX_GRID:,} are allowed. "
                "Narrow a range, set a step, or search instead."
            )
        return self._points(search=False)

    def log_values(self, *, search: bool) -> str:
        """The values of the settings with `:log`, in sentences."""
        words = []
        for vary, axis in zip(self.varied, self._axes(search=False), strict=True):
            if vary.log and search:
                low, high = vary.ends
                words.append(f" {vary.field} takes any value from {low:g} to {high:g}, by factors.")
            elif vary.log:
                words.append(f" {vary.field} takes {', '.join(map(setting_text, axis or ()))}.")
        return "".join(words)

    def _axes(self, *, search: bool) -> list[Sequence[Scalar] | None]:
        pairs = zip(self.varied, self.tunables, strict=True)
        return [vary.axis(whole=one.is_integer, search=search) for vary, one in pairs]

    def _points(self, *, search: bool) -> tuple[Point, ...]:
        fields = [vary.field for vary in self.varied]
        combinations = itertools.product(*(axis or () for axis in self._axes(search=search)))
        return tuple(dict(zip(fields, values, strict=True)) for values in combinations)


def _count(axes: Sequence[Sequence[Scalar] | None]) -> int | None:
    finite = [axis for axis in axes if axis is not None]
    return math.prod(map(len, finite)) if len(finite) == len(axes) else None


class SearchSettings(Settings):
    """How the trials of a sweep are chosen, whichever settings vary."""

    model_config = ConfigDict(strict=False)

    objective: Objective = "speedup"
    mode: Mode = setting("search", "Search or grid", "a grid measures every combination")
    trials: int = setting(
        20, "Trials", "how many combinations a search measures", ge=1, le=MAX_TRIALS
    )
    seed: int = setting(
        0, "Seed of the search", "the same seed tries the same combinations", ge=0, le=2**31
    )


class OptunaSearch(SearchSettings):
    """Optuna chooses one configuration after another, or a grid has all of them.

    Attributes:
        varied: the varied settings; texts as on the command line are parsed.
    """

    model_config = ConfigDict(extra="ignore")

    name: Literal["optuna"] = "optuna"
    varied: tuple[VariedSetting, ...]

    @field_validator("varied", mode="before")
    @classmethod
    def _read(cls, varied: Sequence[object]) -> list[object]:
        return [parse_vary(vary) if isinstance(vary, str) else vary for vary in varied]

    @field_validator("objective", mode="before")
    @classmethod
    def _current(cls, objective: object) -> object:
        """`tok_s`, of older versions, ranks trials as their speedup does."""
        return "speedup" if objective == "tok_s" else objective
