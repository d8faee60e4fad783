"""Controls from a settings class, and the settings back from what the controls hold.

A slider per bounded number, a number box per unbounded one, a choice per Literal, a tick per bool,
text for strings and for numbers that may be left out, one line each for lists of strings, commas
between the numbers of a list, the paths of a choice tree as JSON. A setting that holds a method
becomes that method's controls; their names begin with its own, `retrieval.max_draft_len`.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

import presets
from engine.config import Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.safe_text import read_json

Kind = Literal["slider", "number", "choice", "ticks", "flag", "text", "lines", "tree"]
Parsed = TypeVar("Parsed", bound=Settings)
LONGEST_SLIDER = 4096
"""Integer ranges wider than this get a number box: a slider could not hit a value."""
WIDEST_NUMBER = 2**53
"""JavaScript's integers are exact up to here; wider ranges are typed as text."""
LONGEST_TEXT = 200_000
"""Characters taken from one control."""
KIND_WITHIN = "decoding_type"
OUTER_ONLY = ("adaptive", "size")
"""Settings of a method that a method within another leaves to the outer one."""
FITTED = (
    "Fitted to this machine when a run starts: the fastest of {} measured sizes; choose set to "
    "set it by hand"
)
FITTED_WITHIN = (
    "Both methods are fitted to this machine when a run starts, each by itself; choose set to set "
    "them by hand"
)
NOT_MEASURED = "No other sizes were measured with these settings: uses the size set below"


@dataclass(frozen=True, slots=True)
class Control:
    """One field as the page's form draws it.

    Attributes:
        value: its default in the control's own form.
        main: whether it is shown at once, not on demand.
        section: title of the method within the method that it belongs to.
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
    optional: bool = False
    placeholder: str = ""
    main: bool = True
    section: str = ""


@dataclass(frozen=True, slots=True)
class FormState:
    """What a form's values mean for the form itself.

    Attributes:
        hidden: controls without an effect; None where the values are refused.
        faults: what is wrong, by control; under an empty name what no control is to blame for.
        notes: what to say of a control in place of its description.
        badge: as the method's; empty where that is not known, or where it is no method.
    """

    hidden: frozenset[str] | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    badge: str = ""


def group_of(
    name: str,
    title: str,
    settings: Settings,
    *,
    is_open: bool = True,
    note: str | None = None,
    skip: Sequence[str] = (),
    held: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Settings as a group of a form, as `web.forms.SettingsForm` draws it.

    Args:
        held: what the controls will hold; a method within may be another than in `settings`.

    Raises ConfigError: `held` names a method that a setting does not hold.
    """
    kinds = {k: v for k, v in (held or {}).items() if k.endswith(f".{KIND_WITHIN}")}
    if kinds:
        settings = settings_from(type(settings), {**settings.model_dump(), **kinds})
    return {
        "name": name,
        "title": title,
        "open": is_open,
        "note": note,
        "settings": type(settings).__name__,
        "fields": controls_of(settings, skip=skip),
    }


def controls_of(settings: Settings, *, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A control per field of the settings' class, set to the settings' values; main ones first."""
    return [asdict(control) for control in _controls(settings, skip)]


def changed_controls(settings: Settings, begun: Settings) -> dict[str, Any]:
    """What the controls hold where settings are not as the form begins."""
    before = {control.name: control.value for control in _controls(begun, ())}
    now = {control.name: control.value for control in _controls(settings, ())}
    return {name: v for name, v in now.items() if name not in before or v != before[name]}


def state_of(cls: type[Settings], raw: Mapping[str, Any]) -> FormState:
    """What values of controls mean: which controls have an effect, and which are wrong."""
    try:
        settings = settings_from(cls, raw)
    except ConfigError as error:
        return FormState(faults=error.faults or {"": str(error)})
    badge = settings.badge if isinstance(settings, MethodConfig) else ""
    return FormState(frozenset(_without_effect(settings)), {}, _notes(settings), badge)


def _without_effect(settings: Settings) -> set[str]:
    found = set(type(settings).model_fields) - settings.live_settings()
    if not isinstance(settings, MethodConfig):
        return found
    for name, method in settings.within().items():
        found |= {f"{name}.{inner}" for inner in _without_effect(method)} - {
            f"{name}.{KIND_WITHIN}"
        }
        if settings.size == "fit":
            found |= {f"{name}.{inner}" for inner in _fitted(method)}
    if settings.has_sizes:
        found.discard("size")
        if settings.size == "fit":
            found |= _fitted(settings)
    return found


def _fitted(method: MethodConfig) -> set[str]:
    """The settings that `size: fit` chooses."""
    return {*method.size_settings.split()} if presets.sizes(method) is not None else set()


def _notes(settings: Settings) -> dict[str, str]:
    """Where a size that is fitted comes from."""
    if not isinstance(settings, MethodConfig) or settings.size == "set":
        return {}
    if any(map(presets.sizes, settings.within().values())):
        return {"size": FITTED_WITHIN}
    table = presets.sizes(settings)
    return {"size": FITTED.format(len(table.sizes)) if table else NOT_MEASURED}


def _controls(settings: Settings, skip: Sequence[str]) -> list[Control]:
    cls = type(settings)
    main = settings.main_settings.split() or list(cls.model_fields)
    # Weights that are still to be named come first: without them nothing runs.
    if getattr(settings, "speculative_model", "") is None:
        main = ["speculative_model", *main]
    names = [*main, *(name for name in cls.model_fields if name not in main)]
    tree = cls.choices_field() if issubclass(cls, MethodConfig) else None
    found: list[Control] = []
    for name in names:
        info, value = cls.model_fields[name], getattr(settings, name)
        if name in skip or _is_constant(info.annotation):
            continue
        if isinstance(value, MethodConfig):
            found += _controls_within(cls, name, value)
            continue
        control = _control(name, info, value)
        kind = "tree" if name == tree else control.kind
        found.append(replace(control, kind=kind, main=name in main))
    return found


def controls_within(cls: type[Settings], name: str, kind: object) -> list[Control]:
    """Controls of the method that a setting of a class holds.

    Raises ConfigError: the setting holds no such method.
    """
    known = cls.methods_within(name) if issubclass(cls, MethodConfig) else {}
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {kind!r:.80}.")
    return _controls_within(cls, name, known[kind].parse({}))


def _controls_within(cls: type[Settings], name: str, method: MethodConfig) -> list[Control]:
    """Which method it is, and that method's controls."""
    info = cls.model_fields[name]
    section = info.title or name
    kinds = tuple(cls.methods_within(name)) if issubclass(cls, MethodConfig) else ()
    which = Control(
        f"{name}.{KIND_WITHIN}",
        "Method",
        _sentence(info),
        "choice",
        method.decoding_type,
        choices=kinds,
        section=section,
    )
    inner = _controls(method, OUTER_ONLY)
    return [which, *(replace(c, name=f"{name}.{c.name}", section=section) for c in inner)]


def settings_from(cls: type[Parsed], raw: object, *, where: str = "") -> Parsed:
    """Settings from what the form's controls hold.

    Raises ConfigError: naming the key, the value and what is allowed.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of settings.")
    values: dict[str, Any] = {}
    within: dict[str, dict[str, Any]] = {}
    for name, value in raw.items():
        outer, dot, inner = str(name).partition(".")
        if dot:
            within.setdefault(outer, {})[inner] = value
        else:
            info = cls.model_fields.get(outer)
            values[outer] = value if info is None else _read(outer, info, value)
    for name, changed in within.items():
        values[name] = _method_from(cls, name, values.get(name), changed)
    return cls.parse(values)


def _method_from(cls: type[Settings], name: str, held: Any, changed: Mapping[str, Any]) -> Any:
    """Settings of a method within another: those held, if any, with those that controls changed."""
    known = cls.methods_within(name) if issubclass(cls, MethodConfig) else {}
    if not isinstance(held, Mapping):
        held = _plain(cls.model_fields[name].default) if known else {}
    kind = changed.get(KIND_WITHIN, held.get(KIND_WITHIN))
    if not isinstance(kind, str) or kind not in known:
        return dict(changed)  # refused by the class, which names what is allowed
    kept = held if held.get(KIND_WITHIN) == kind else {}
    try:
        return settings_from(known[kind], {**kept, **changed})
    except ConfigError as error:
        faults = {f"{name}.{inner}": text for inner, text in error.faults.items()}
        raise ConfigError(f"{name}: {error}", faults=faults) from error


def _control(name: str, info: FieldInfo, value: Any) -> Control:
    inner, optional = _without_none(info.annotation)
    common: dict[str, Any] = {
        "name": name,
        "label": info.title or name.replace("_", " ").capitalize(),
        "help": _sentence(info),
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
    if _is_list_of(inner, str):
        text = "\n".join(value or ())
        return Control(kind="lines", value=text, placeholder="one per line", **common)
    if _is_list_of(inner, int):
        text = ", ".join(map(str, value or ()))
        return Control(kind="text", value=text, placeholder="none", **common)
    text = "" if value is None else json.dumps(_plain(value), separators=(",", ":"))
    return Control(kind="lines", value=text, placeholder="[[0], [0, 0], [1]]", **common)


def _sentence(info: FieldInfo) -> str:
    """A field's description, as the page writes it."""
    text = info.description or ""
    return text[:1].upper() + text[1:]


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


def _read(name: str, info: FieldInfo, raw: Any) -> Any:
    """As `_value`; a fault is the setting's."""
    try:
        return _value(name, info, raw)
    except ConfigError as error:
        raise ConfigError(str(error), faults={name: str(error)}) from error


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
    if _is_list_of(inner, str) and not raw.lstrip().startswith("["):
        return [line for line in raw.split("\n") if line]
    if _is_list_of(inner, int) and not raw.lstrip().startswith("["):
        return [_parsed_number(part.strip(), int) for part in raw.split(",") if part.strip()]
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


def _is_list_of(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) not in (list, tuple):
        return False
    return _without_none(get_args(annotation)[0])[0] is kind


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
