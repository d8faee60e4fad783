"""Requests of a page, validated before anything runs: their values are untrusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, Strict

from engine.config import Limits, Sampling, Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError, validate_choice
from engine.model.plan import DtypeName
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from playground.host.controls import settings_from
from playground.host.live import Message, RunId
from presets import MethodPreset

Mode = Literal["chat", "raw"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
MAX_PROMPT_CHARS = 400_000
MAX_SYSTEM_CHARS = 20_000
MAX_FORM_CHARS = 400_000
MAX_FORM_DEPTH = 8


class RequestFields(Settings):
    """Values of the Generate page's components; empty ones are left out."""

    target: Any = None
    dtype: DtypeName
    method: Any = None
    mode: Mode
    system: str = Field("", max_length=MAX_SYSTEM_CHARS)
    prompt: str = Field("", max_length=MAX_PROMPT_CHARS)
    form: Any = None
    run_form: Any = None
    parent: RunId | None = None
    repeats: RunId | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request for one run.

    Attributes:
        title: of the method.
        parent: run that this one continues as the next turn of its chat.
        repeats: run whose prompt and conversation are repeated; prompt and parent are ignored.
        prompt_ids: the prompt's tokens, in place of a raw prompt's text.
        messages: the whole conversation, if not from the log; prompt, system and parent are then
            ignored.
        compares_with_plain: whether plain decoding is timed before and after the run.
    """

    target: TargetSpec
    dtype: str
    title: str
    config: MethodConfig
    sampling: Sampling
    limits: Limits
    mode: Mode
    system: str = ""
    prompt: str = ""
    parent: str | None = None
    repeats: str | None = None
    prompt_ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    compares_with_plain: bool = False


def read_request(catalog: Catalog, raw: Mapping[str, Any]) -> GenerateRequest:
    """A request from the values of the page's components.

    Raises:
        ConfigError: a setting is unknown or out of range.
        PromptError: the prompt is empty.
    """
    fields = RequestFields.parse({key: value for key, value in raw.items() if value})
    method = catalog.method(fields.method)
    form = FormValues.of(fields.form).values | FormValues.of(fields.run_form).values
    is_chat = fields.mode == "chat"
    if not fields.repeats:
        require_prompt(fields.mode, fields.prompt)
    return GenerateRequest(
        target=catalog.target(fields.target),
        dtype=fields.dtype,
        title=method.title,
        config=config_of(method, form.get("method", {})),
        sampling=settings_from(Sampling, form.get("sampling", {})),
        limits=settings_from(Limits, form.get("limits", {})),
        mode=fields.mode,
        system=fields.system,
        prompt=fields.prompt,
        parent=fields.parent if is_chat else None,
        repeats=fields.repeats,
        compares_with_plain=True,
    )


def require_prompt(mode: Mode, prompt: str) -> None:
    """Raises PromptError: the prompt is empty; a text to continue may be blank."""
    if not (prompt.strip() if mode == "chat" else prompt):
        raise PromptError("The prompt is empty. Write something, or pick an example.")


def read_dtype(raw: object) -> str:
    return validate_choice("dtype", raw, DTYPES)


def read_run_id(raw: object) -> str:
    return _RunLink.parse({"run": raw}).run


class _RunLink(Settings):
    run: RunId


def texts(raw: object) -> list[str]:
    """The strings of a multiple-choice dropdown's value; anything else is dropped."""
    items = raw if isinstance(raw, list | tuple) else ()
    return [item for item in items if isinstance(item, str)]


class FormValues(Settings):
    """Values of a settings form's controls, by group; of every group, its name and method's key."""

    model_config = ConfigDict(extra="ignore")

    values: dict[str, dict[str, Any]] = {}
    groups: list[Annotated[tuple[str, Any], Strict(False)]] = Field([], max_length=64)

    @classmethod
    def of(cls, raw: object) -> Self:
        """Raises ConfigError: it is not a form, or too large or too deeply nested."""
        if raw is not None and not isinstance(raw, Mapping):
            raise ConfigError(f"The form must be a mapping of settings, got {type(raw).__name__}.")
        fields = {key: value for key, value in (raw or {}).items() if value is not None}
        check_size(fields.get("values"))
        return cls.parse(fields, where="a form")


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
    return 1 + max(
        map(_depth, [*value.values()] if isinstance(value, Mapping) else value), default=0
    )


def config_of(method: MethodPreset, changes: Mapping[str, Any]) -> MethodConfig:
    """The method's settings with a form's changes.

    Raises ConfigError: naming what is wrong.
    """
    return settings_from(type(method.config), {**method.config.model_dump(), **changes})
