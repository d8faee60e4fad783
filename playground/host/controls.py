"""Forms for settings classes: a control per field, and settings from the values of controls.

A bounded number is a slider, an unbounded one a number box, a Literal a choice, a bool a tick box.
Strings and optional numbers are texts, lists of strings have one per line, lists of numbers are
separated by commas, the paths of a choice tree are JSON. A setting that holds a method becomes that
method's controls, whose names have its own as prefix: `retrieval.max_draft_len`. Types and
constraints are read from the class's JSON schema alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import compress, takewhile
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from pydantic_core import to_jsonable_python

from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, validate_choice
from engine.safe_text import read_json

Kind = Literal["slider", "number", "choice", "flag", "text", "lines", "tree"]
Parsed = TypeVar("Parsed", bound=Settings)
MAX_SLIDER_RANGE = 4096
"""Wider integer ranges are number boxes: a slider could not select a single value."""
MAX_NUMBER = 2**53
"""JavaScript's integers are exact up to here; wider ranges are text boxes."""
MAX_TEXT_CHARS = 200_000
"""Longest value of a control."""
INNER_TYPE = "decoding_type"
OUTER_ONLY = ("drafting",)
"""Settings that an inner method takes from the outer one."""


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """A field as the JSON schema of its class describes it.

    Attributes:
        type: JSON type of its value; empty if several are allowed.
        items: JSON type of an array's items.
        optional: whether it may be None.
        constant: whether it can take one value only, as `decoding_type`.
    """

    name: str
    title: str
    description: str
    type: str
    items: str
    choices: tuple[Any, ...]
    min: float | None
    max: float | None
    optional: bool
    constant: bool

    @classmethod
    def of(cls, name: str, schema: Mapping[str, Any]) -> FieldSchema:
        variants = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
        value = variants[0] if len(variants) == 1 else {}
        description = schema.get("description", "")
        return cls(
            name,
            schema.get("title", name),
            description[:1].upper() + description[1:],
            value.get("type", ""),
            value.get("items", {}).get("type", ""),
            tuple(value.get("enum", ())),
            value.get("minimum", value.get("exclusiveMinimum")),
            value.get("maximum", value.get("exclusiveMaximum")),
            optional={"type": "null"} in schema.get("anyOf", ()),
            constant="const" in value,
        )


@cache
def field_schemas(cls: type[Settings]) -> Mapping[str, FieldSchema]:
    """Every field of a class by name."""
    properties = cls.model_json_schema()["properties"]
    return {name: FieldSchema.of(name, schema) for name, schema in properties.items()}


@dataclass(frozen=True, slots=True)
class Control:
    """One field of a form.

    Attributes:
        value: its default, as the control's value.
        main: whether it is always shown, not only on demand.
        section: title of the inner method that it belongs to.
    """

    name: str
    label: str
    help: str
    kind: Kind
    value: Any
    min: float | None = None
    max: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] = ()
    placeholder: str = ""
    main: bool = True
    section: str = ""


class Group(Settings):
    """Controls under a title.

    Attributes:
        settings: name of the class that their values are parsed as; None if they are not checked.
        method: key of the method, where the group can be removed.
    """

    model_config = ConfigDict(extra="ignore", strict=False)

    name: str
    title: str
    open: bool
    fields: list[Control] = Field(max_length=200)
    settings: str | None = None
    note: str | None = None
    method: str | None = None

    def values(self, form_values: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
        """The value of every control."""
        own = (form_values or {}).get(self.name, {})
        return {control.name: own.get(control.name, control.value) for control in self.fields}

    def with_inner(self, setting: str, controls: Sequence[Control]) -> Group:
        """The group with the controls of another method in one of its settings."""
        is_outer = [not control.name.startswith(f"{setting}.") for control in self.fields]
        at = len([*takewhile(bool, is_outer)])
        rest = [*compress(self.fields, is_outer)]
        return self.replace(fields=[*rest[:at], *controls, *rest[at:]])


class FormSpec(Settings):
    """A form to draw: its groups, and the values of their controls so far."""

    model_config = ConfigDict(extra="ignore")

    groups: list[Group] = Field(max_length=64)
    values: dict[str, dict[str, Any]] | None = None
    method: Any = None


@dataclass(frozen=True, slots=True)
class FormState:
    """How a form's values change the form itself.

    Attributes:
        hidden: controls without an effect; None if the values are invalid.
        faults: error messages by control; under an empty name those of no single control.
        badge: the method's; empty if the values are invalid, or it is not a method.
    """

    hidden: frozenset[str] | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    badge: str = ""


def group_of(
    name: str,
    title: str,
    settings: Settings,
    *,
    is_open: bool = True,
    note: str | None = None,
    skip: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Settings as a group of a form, as `web.forms.SettingsForm` draws it.

    Args:
        values: of the controls; an inner method may be another than in `settings`.

    Raises ConfigError: `values` names a method that a setting does not hold.
    """
    inner = {k: v for k, v in (values or {}).items() if k.endswith(f".{INNER_TYPE}")}
    if inner:
        settings = settings_from(type(settings), {**settings.model_dump(), **inner})
    return {
        "name": name,
        "title": title,
        "open": is_open,
        "note": note,
        "settings": type(settings).__name__,
        "fields": [asdict(control) for control in controls_of(settings, skip=skip)],
    }


def controls_of(settings: Settings, *, skip: Sequence[str] = ()) -> list[Control]:
    """A control per field of the settings' class, set to the settings' values; main ones first."""
    cls = type(settings)
    main = settings.main_settings.split() or list(cls.model_fields)
    # Missing weights come first: without them nothing runs.
    if getattr(settings, "speculative_model", "") is None:
        main = ["speculative_model", *main]
    names = [*main, *(name for name in cls.model_fields if name not in main)]
    tree = cls.choices_field() if issubclass(cls, MethodConfig) else None
    controls: list[Control] = []
    for name in names:
        schema, value = field_schemas(cls)[name], getattr(settings, name)
        if name in skip or schema.constant:
            continue
        if isinstance(value, MethodConfig):
            controls += _inner_controls(cls, name, value)
            continue
        control = _control(schema, value)
        kind = "tree" if name == tree else control.kind
        controls.append(replace(control, kind=kind, main=name in main))
    return controls


def changed_controls(settings: Settings, start: Settings) -> dict[str, Any]:
    """Values of the controls that differ from the form's initial settings."""
    before = {control.name: control.value for control in controls_of(start)}
    now = {control.name: control.value for control in controls_of(settings)}
    return {name: v for name, v in now.items() if name not in before or v != before[name]}


def state_of(cls: type[Settings], values: Mapping[str, Any]) -> FormState:
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


def inner_controls(cls: type[Settings], name: str, decoding_type: object) -> list[Control]:
    """Controls of the method that a setting of a class holds.

    Raises ConfigError: the setting holds no such method.
    """
    types = _types_within(cls, name)
    return _inner_controls(cls, name, types[validate_choice(name, decoding_type, types)].parse({}))


def _types_within(cls: type[Settings], name: str) -> Mapping[str, type[MethodConfig]]:
    return cls.nested_choices(name) if issubclass(cls, MethodConfig) else {}


def _inner_controls(cls: type[Settings], name: str, method: MethodConfig) -> list[Control]:
    """The picker of an inner method, and the controls of that method."""
    schema = field_schemas(cls)[name]
    which = Control(
        f"{name}.{INNER_TYPE}",
        "Method",
        schema.description,
        "choice",
        method.decoding_type,
        choices=tuple(_types_within(cls, name)),
        section=schema.title,
    )
    own = controls_of(method, skip=OUTER_ONLY)
    return [which, *(replace(c, name=f"{name}.{c.name}", section=schema.title) for c in own)]


def settings_from(cls: type[Parsed], values: Mapping[str, Any]) -> Parsed:
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
            schema = field_schemas(cls).get(outer)
            own[outer] = value if schema is None else _parse(schema, value)
    for name, changes in inner.items():
        own[name] = _inner_method(cls, name, own.get(name), changes)
    return cls.parse(own)


def _inner_method(cls: type[Settings], name: str, start: Any, changes: Mapping[str, Any]) -> Any:
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


def _control(schema: FieldSchema, value: Any) -> Control:
    control = partial(Control, schema.name, schema.title, schema.description)
    if schema.type == "boolean":
        return control("flag", bool(value))
    if schema.choices:
        choices = (*((None,) if schema.optional else ()), *schema.choices)
        return control("choice", value, choices=choices)
    if schema.type in ("integer", "number"):
        return _number(schema, value, control)
    if schema.type == "string":
        return control("text", value or "")
    if schema.items == "string":
        return control("lines", "\n".join(value or ()), placeholder="one per line")
    if schema.items == "integer":
        return control("text", ", ".join(map(str, value or ())), placeholder="none")
    text = "" if value is None else json.dumps(to_jsonable_python(value), separators=(",", ":"))
    return control("lines", text, placeholder="[[0], [0, 0], [1]]")


def _number(schema: FieldSchema, value: Any, control: Callable[..., Control]) -> Control:
    low, high, is_int = schema.min, schema.max, schema.type == "integer"
    if schema.optional or (is_int and high is not None and high > MAX_NUMBER):
        return control("text", "" if value is None else str(value), placeholder="none")
    if low is None or high is None or (is_int and high - low > MAX_SLIDER_RANGE):
        return control("number", value, min=low, max=high)
    span = high - low  # about a hundred positions: 0.01 for 1, 0.05 for 10
    step = 1 if is_int else 0.01 if span <= 2 else 0.05 if span <= 10 else round(span / 100, 2)
    return control("slider", value, min=low, max=high, step=step)


def _parse(schema: FieldSchema, value: Any) -> Any:
    """A control's value in the field's type; values that do not parse are left to pydantic."""
    name = schema.name
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT_CHARS:
        fault = f"{name} must have at most {MAX_TEXT_CHARS} characters, got {len(value)}."
        raise ConfigError(fault, faults={name: fault})
    if schema.optional and not value.strip():
        return None
    if schema.type in ("integer", "number"):
        return _parse_number(value.strip(), schema.type)
    if schema.type == "string" or schema.choices:
        return value
    is_json = value.lstrip().startswith("[")
    if schema.items == "string" and not is_json:
        return [line for line in value.split("\n") if line]
    if schema.items == "integer" and not is_json:
        return [_parse_number(part.strip(), "integer") for part in value.split(",") if part.strip()]
    if not value.strip():
        return []
    try:
        return read_json(value, what=f"{name} must be a list such as [[0], [0, 0], [1]]; it")
    except ConfigError as error:
        raise ConfigError(str(error), faults={name: str(error)}) from error


def _parse_number(text: str, json_type: str) -> Any:
    try:
        return int(text) if json_type == "integer" else float(text)
    except ValueError:
        return text
