"""Forms for settings classes: a control per field, and settings from the values of controls.

A bounded number is a slider, an unbounded one a number box, a Literal a choice, a bool a tick box.
Strings and optional numbers are texts, lists of strings have one per line, lists of numbers are
separated by commas, objects and the paths of a choice tree are JSON. A setting that holds a method
becomes that method's controls, whose names have its own as prefix: `retrieval.max_draft_len`. Types
and constraints are read from the class's JSON schema alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import to_jsonable_python

from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, validate_choice
from engine.safe_text import read_json

Kind = Literal["slider", "number", "choice", "flag", "text", "lines", "tree"]
Values = Mapping[str, Any]
"""Values of controls by name, or of settings by name."""
Parsed = TypeVar("Parsed", bound=Settings)
NUMBERS = ("integer", "number")
MAX_SLIDER_RANGE = 4096
"""Wider integer ranges are number boxes: a slider could not select a single value."""
MAX_NUMBER = 2**53
"""JavaScript's integers are exact up to here; wider ranges are text boxes."""
MAX_TEXT_CHARS = 200_000
"""Longest value of a control."""
MAX_FORM_CHARS, MAX_FORM_DEPTH = 400_000, 8
INNER_TYPE = "decoding_type"
OUTER_ONLY = ("drafting",)
"""Settings that an inner method takes from the outer one."""


@dataclass(frozen=True, slots=True)
class Control:
    """One field of a form, as the JSON schema of its class describes it.

    Attributes:
        type: JSON type of the field's value; empty if several are allowed.
        items: JSON type of an array's items.
        optional: whether it may be None.
        is_tree: whether it is a choice tree.
        is_constant: whether it can take one value only, as `decoding_type`, and needs no control.
        main: whether it is always shown, not only on demand.
        section: title of the inner method that it belongs to.
    """

    name: str
    label: str
    help: str
    type: str = "string"
    items: str = ""
    choices: tuple[Any, ...] = ()
    min: float | None = None
    max: float | None = None
    optional: bool = False
    is_tree: bool = False
    is_constant: bool = False
    main: bool = True
    section: str = ""

    @classmethod
    def of(cls, name: str, schema: Values, *, is_tree: bool = False) -> Control:
        variants = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
        value = variants[0] if len(variants) == 1 else {}
        about = schema.get("description", "")
        return cls(
            name,
            schema.get("title", name),
            about[:1].upper() + about[1:],
            value.get("type", ""),
            value.get("items", {}).get("type", ""),
            tuple(value.get("enum", ())),
            value.get("minimum", value.get("exclusiveMinimum")),
            value.get("maximum", value.get("exclusiveMaximum")),
            optional={"type": "null"} in schema.get("anyOf", ()),
            is_tree=is_tree,
            is_constant="const" in value,
        )

    @property
    def is_number(self) -> bool:
        return self.type in NUMBERS and not self.choices

    @property
    def is_integer(self) -> bool:
        return self.is_number and self.type == "integer"

    @property
    def kind(self) -> Kind:
        if self.type == "boolean":
            return "flag"
        if self.choices:
            return "choice"
        if self.type in NUMBERS:
            return self._number_kind
        if self.is_tree:
            return "tree"
        is_text = self.type in ("string", "object") or self.items == "integer"
        return "text" if is_text else "lines"

    @property
    def _number_kind(self) -> Kind:
        low, high, is_int = self.min, self.max, self.type == "integer"
        if self.optional or (is_int and high is not None and high > MAX_NUMBER):
            return "text"
        is_wide = low is None or high is None or (is_int and high - low > MAX_SLIDER_RANGE)
        return "number" if is_wide else "slider"

    @property
    def step(self) -> float:
        """Step of a slider with about a hundred positions: 0.01 for a range of 1, 0.05 for 10."""
        span = (self.max or 0) - (self.min or 0)
        if self.type == "integer":
            return 1
        return 0.01 if span <= 2 else 0.05 if span <= 10 else round(span / 100, 2)

    @property
    def placeholder(self) -> str:
        if self.items == "string":
            return "one per line"
        if self.type in NUMBERS or self.items == "integer":
            return "none"
        return "" if self.type in ("string", "object") else "[[0], [0, 0], [1]]"

    def show(self, value: Any) -> Any:
        """The control's value for a value of the field."""
        if self.kind not in ("text", "lines", "tree"):
            return bool(value) if self.kind == "flag" else value
        if value is None or value == {} or isinstance(value, str):
            return value or ""
        if self.items in ("string", "integer"):
            return ("\n" if self.items == "string" else ", ").join(map(str, value))
        return json.dumps(to_jsonable_python(value), separators=(",", ":"))

    def parse(self, value: Any) -> Any:
        """The field's value for one of the control; what does not parse is left to pydantic."""
        if not isinstance(value, str):
            return value
        if len(value) > MAX_TEXT_CHARS:
            fault = f"{self.name} must have at most {MAX_TEXT_CHARS} characters, got {len(value)}."
            raise ConfigError(fault, faults={self.name: fault})
        if self.optional and not value.strip():
            return None
        if self.type in NUMBERS:
            return _parse_number(value, self.type)
        if self.type == "string" or self.choices:
            return value
        is_json = value.lstrip().startswith("[")
        if self.items == "string" and not is_json:
            return [line for line in value.split("\n") if line]
        if self.items == "integer" and not is_json:
            return [_parse_number(part, self.items) for part in value.split(",") if part.strip()]
        if not value.strip():
            return {} if self.type == "object" else []
        example = "an object" if self.type == "object" else "a list such as [[0], [0, 0], [1]]"
        try:
            return read_json(value, what=f"{self.name} must be {example}; it")
        except ConfigError as error:
            raise ConfigError(str(error), faults={self.name: str(error)}) from error


def _parse_number(text: str, json_type: str) -> Any:
    try:
        return int(text) if json_type == "integer" else float(text)
    except ValueError:
        return text.strip()


@cache
def fields_of(cls: type[Settings]) -> Mapping[str, Control]:
    """The control of every field of a class, by name."""
    tree = cls.choices_field() if issubclass(cls, MethodConfig) else None
    properties = cls.model_json_schema()["properties"]
    return {n: Control.of(n, schema, is_tree=n == tree) for n, schema in properties.items()}


def values_of(settings: Settings, *, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The values of the controls that show these settings."""
    values: dict[str, Any] = {}
    for name, control in fields_of(type(settings)).items():
        value = getattr(settings, name)
        if name in skip or control.is_constant:
            continue
        if isinstance(value, MethodConfig):
            values |= _inner_values(name, value)
        else:
            values[name] = control.show(value)
    return values


def _inner_values(name: str, method: MethodConfig) -> dict[str, Any]:
    inner = {INNER_TYPE: method.decoding_type, **values_of(method, skip=OUTER_ONLY)}
    return {f"{name}.{key}": value for key, value in inner.items()}


def controls_of(cls: type[Settings], values: Values) -> list[Control]:
    """The controls that these values are of; main ones first.

    Raises ConfigError: a setting holds no such method.
    """
    main = cls.main_settings.split() or list(cls.model_fields)
    if values.get("speculative_model") == "":  # missing weights first: without them nothing runs
        main = ["speculative_model", *main]
    controls: list[Control] = []
    for name in dict.fromkeys([*main, *cls.model_fields]):
        control = fields_of(cls)[name]
        if types := _types_within(cls, name):
            inner = {k[len(name) + 1 :]: v for k, v in values.items() if k.startswith(f"{name}.")}
            controls += _inner_controls(control, types, inner)
        elif name in values:
            controls.append(replace(control, main=name in main))
    return controls


def _inner_controls(
    outer: Control, types: Mapping[str, type[MethodConfig]], values: Values
) -> list[Control]:
    """The picker of an inner method, and the controls of that method."""
    picker = Control(INNER_TYPE, "Method", outer.help, choices=tuple(types))
    cls = types[validate_choice(outer.name, values.get(INNER_TYPE), types)]
    inside = [picker, *controls_of(cls, values)]
    return [replace(one, name=f"{outer.name}.{one.name}", section=outer.label) for one in inside]


def _types_within(cls: type[Settings], name: str) -> Mapping[str, type[MethodConfig]]:
    return cls.nested_choices(name) if issubclass(cls, MethodConfig) else {}


# ---- settings from values


def settings_from(cls: type[Parsed], values: Values) -> Parsed:
    """Settings from the values of a form's controls.

    Raises ConfigError: naming the key, the value and what is allowed.
    """
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        outer, dot, rest = str(name).partition(".")
        if dot:
            inner.setdefault(outer, {})[rest] = value
        else:
            control = fields_of(cls).get(outer)
            own[outer] = value if control is None else control.parse(value)
    for name, changes in inner.items():
        own[name] = _inner_method(cls, name, own.get(name), changes)
    return cls.parse(own)


def _inner_method(cls: type[Settings], name: str, start: Any, changes: Values) -> Any:
    """Settings of an inner method: its initial ones, if any, changed by those of its controls."""
    types = _types_within(cls, name)
    if not isinstance(start, Mapping):
        start = to_jsonable_python(cls.model_fields[name].default) if types else {}
    decoding_type = changes.get(INNER_TYPE, start.get(INNER_TYPE))
    if not isinstance(decoding_type, str) or decoding_type not in types:
        return dict(changes)  # refused by the class, which names what is allowed
    same = start if start.get(INNER_TYPE) == decoding_type else {}
    try:
        return settings_from(types[decoding_type], {**same, **changes})
    except ConfigError as error:
        faults = {f"{name}.{inner}": text for inner, text in error.faults.items()}
        raise ConfigError(f"{name}: {error}", faults=faults) from error


def changed_by(start: Parsed, values: Values) -> Parsed:
    """Settings with values of controls. Raises ConfigError: as `settings_from`."""
    return settings_from(type(start), {**start.model_dump(), **values})


def from_controls(start: Settings) -> BeforeValidator:
    """Validator of a pydantic field: values of controls become settings, `start` with changes."""
    return BeforeValidator(lambda v: changed_by(start, v) if isinstance(v, Mapping) else v)


@dataclass(frozen=True, slots=True)
class FormState:
    """How a group's values change the group itself.

    Attributes:
        hidden: controls without an effect; None if the values are invalid.
        faults: error messages by control; under an empty name those of no single control.
        badge: the method's; empty if the values are invalid, or it is not a method.
    """

    hidden: frozenset[str] | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    badge: str = ""


def state_of(cls: type[Settings], values: Values) -> FormState:
    """Which controls have an effect, and which have an invalid value."""
    try:
        settings = settings_from(cls, values)
    except ConfigError as error:
        return FormState(faults=error.faults or {"": str(error)})
    badge = settings.badge if isinstance(settings, MethodConfig) else ""
    return FormState(frozenset(_without_effect(settings)), {}, badge)


def _without_effect(settings: Settings) -> set[str]:
    names = set(type(settings).model_fields) - settings.live_settings()
    if not isinstance(settings, MethodConfig):
        return names
    for name, method in settings.nested().items():
        names |= {f"{name}.{inner}" for inner in _without_effect(method) - {INNER_TYPE}}
    return names


# ---- what pages and browser exchange


class Group(Settings):
    """Settings under a title.

    Attributes:
        settings: name of their class; None if there is none.
        values: initial ones of its controls.
        texts: text boxes of no setting, which come first: label and explanation by name.
        method: key of the method, where the group can be removed.
    """

    model_config = ConfigDict(extra="ignore", strict=False)

    name: str
    title: str
    open: bool = True
    note: str | None = None
    settings: str | None = None
    values: dict[str, Any] = Field({}, max_length=200)
    texts: dict[str, tuple[str, str]] = Field({}, max_length=200)
    method: str | None = None

    @classmethod
    def of(
        cls, name: str, title: str, settings: Settings, *, skip: Sequence[str] = (), **more: Any
    ) -> Self:
        """A group of settings, without those in `skip`; `more`: its other attributes."""
        more["values"] = {**more.get("values", {}), **values_of(settings, skip=skip)}
        return cls(name=name, title=title, settings=type(settings).__name__, **more)

    def current(self, form_values: Mapping[str, Values] | None) -> dict[str, Any]:
        """The values of its controls in a form, by name."""
        own = (form_values or {}).get(self.name, {})
        return {name: own.get(name, value) for name, value in self.values.items()}

    def controls(self, cls: type[Settings] | None) -> list[Control]:
        """Its controls; `cls`: the class of its settings."""
        texts = [Control(name, *about) for name, about in self.texts.items()]
        return texts if cls is None else texts + controls_of(cls, self.values)

    def with_inner(self, cls: type[Settings], setting: str, decoding_type: object) -> Self:
        """The group with another method in one of its settings.

        Raises ConfigError: the setting of `cls` holds no such method.
        """
        types = _types_within(cls, setting)
        method = types[validate_choice(setting, decoding_type, types)].parse({})
        kept = {k: v for k, v in self.values.items() if not k.startswith(f"{setting}.")}
        return self.replace(values={**kept, **_inner_values(setting, method)})


class FormSpec(Settings):
    """A form to draw: its groups, and the values of their controls so far."""

    model_config = ConfigDict(extra="ignore")

    groups: list[Group] = Field(max_length=64)
    values: dict[str, dict[str, Any]] | None = None
    method: Any = None


class FormValues(Settings):
    """Values of a form's controls, by group; of every group, its name and method's key."""

    model_config = ConfigDict(extra="ignore")

    values: dict[str, dict[str, Any]] = {}
    groups: list[Annotated[tuple[str, Any], Strict(False)]] = Field([], max_length=64)

    @classmethod
    def of(cls, raw: object) -> Self:
        """Raises ConfigError: it is not a form, or too large or too deeply nested."""
        if isinstance(raw, cls):
            return raw
        if raw is not None and not isinstance(raw, Mapping):
            raise ConfigError(f"The form must be a mapping of settings, got {type(raw).__name__}.")
        fields = {key: value for key, value in (raw or {}).items() if value is not None}
        check_size(fields.get("values"))
        return cls.parse(fields, where="a form")


Form = Annotated[FormValues, BeforeValidator(FormValues.of)]


def spec_of(*groups: Group, values: Any = None, method: Any = None) -> dict[str, Any]:
    """A `FormSpec` as JSON, for `web.forms.SettingsForm`. Raises ConfigError: too many groups."""
    spec = FormSpec.parse({"groups": list(groups), "values": values, "method": method})
    return spec.model_dump(mode="json")


def check_size(values: object) -> None:
    """Raises ConfigError: the values are not JSON, too large or too deeply nested."""
    try:
        size = len(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("The form must hold plain JSON values.") from error
    if size > MAX_FORM_CHARS or _depth(values) > MAX_FORM_DEPTH:
        raise ConfigError(f"The form must be at most {MAX_FORM_CHARS} characters of plain values.")


def _depth(value: object) -> int:
    if not isinstance(value, Mapping | list):
        return 1
    inside = [*value.values()] if isinstance(value, Mapping) else value
    return 1 + max(map(_depth, inside), default=0)
