"""Checks what a page sent before anything runs. Every handler is open to anybody's payload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import ConfigDict, Field

from engine.config import Limits, Sampling, Settings
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError, one_of
from engine.model.loading import DtypeName
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog, Method
from playground.host.controls import settings_from
from playground.host.live import Message, RunId

Mode = Literal["chat", "raw"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
MAX_PROMPT_CHARS = 400_000
MAX_SYSTEM_CHARS = 20_000
MAX_FORM_CHARS = 400_000
MAX_FORM_DEPTH = 8


class AskedRun(Settings):
    """What the Generate page's components hold; what is empty there is left out."""

    target: Any = None
    dtype: DtypeName
    method: Any = None
    mode: Mode
    system: str = Field("", max_length=MAX_SYSTEM_CHARS)
    prompt: str = Field("", max_length=MAX_PROMPT_CHARS)
    form: Any = None
    parent: RunId | None = None
    repeats: RunId | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request for one run.

    Attributes:
        parent: run that this one continues as the next turn of its chat.
        repeats: run whose prompt and conversation are used again; prompt and parent are ignored.
        messages: the whole conversation, where it does not come from this program's own runs;
            prompt, system and parent are ignored.
        weighed: whether plain decoding is timed before and after it, for people who want to know
            what it is worth.
    """

    target: TargetSpec
    dtype: str
    method: Method
    config: MethodConfig
    sampling: Sampling
    limits: Limits
    mode: Mode
    system: str
    prompt: str
    parent: str | None = None
    repeats: str | None = None
    messages: tuple[Message, ...] = ()
    weighed: bool = False


def read_request(catalog: Catalog, raw: Mapping[str, Any]) -> GenerateRequest:
    """A request from what the page's components hold.

    Raises:
        ConfigError: a setting is unknown or out of range.
        PromptError: the prompt is empty.
    """
    asked = AskedRun.parse({key: value for key, value in raw.items() if value})
    method, form = catalog.method(asked.method), HeldForm.of(asked.form).values
    is_chat = asked.mode == "chat"
    if not asked.repeats and not (asked.prompt.strip() if is_chat else asked.prompt):
        raise PromptError("The prompt is empty. Write something, or pick an example.")
    return GenerateRequest(
        target=catalog.target(asked.target),
        dtype=asked.dtype,
        method=method,
        config=config_of(method, form.get("method", {})),
        sampling=settings_from(Sampling, form.get("sampling", {}), where="sampling"),
        limits=settings_from(Limits, form.get("limits", {}), where="limits"),
        mode=asked.mode,
        system=asked.system,
        prompt="" if asked.repeats else asked.prompt,
        parent=asked.parent if is_chat else None,
        repeats=asked.repeats,
        weighed=True,
    )


def read_dtype(raw: object) -> str:
    return one_of("dtype", raw, DTYPES)


def read_run_id(raw: object) -> str:
    return _RunLink.parse({"run": raw}).run


class _RunLink(Settings):
    run: RunId


def texts(raw: object) -> list[str]:
    """The texts that a picker of several holds, and nothing else that a caller may have sent."""
    items = raw if isinstance(raw, list | tuple) else ()
    return [item for item in items if isinstance(item, str)]


class HeldForm(Settings):
    """What a settings form holds, per group."""

    model_config = ConfigDict(extra="ignore")

    values: dict[str, dict[str, Any]] = {}

    @classmethod
    def of(cls, raw: object) -> Self:
        """Raises ConfigError: it is no form, or too large or too deep to look at."""
        if raw is not None and not isinstance(raw, Mapping):
            raise ConfigError(f"The form must be a mapping of settings, got {type(raw).__name__}.")
        held = {key: value for key, value in (raw or {}).items() if value is not None}
        check_size(held.get("values"))
        return cls.parse(held, where="a form")


def check_size(values: object) -> None:
    """Raises ConfigError: too large or too deep to look at."""
    try:
        size = len(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("The form must hold plain JSON values.") from error
    if size > MAX_FORM_CHARS or _depth(values) > MAX_FORM_DEPTH:
        raise ConfigError(f"The form must be at most {MAX_FORM_CHARS} characters of plain values.")


def _depth(value: object) -> int:
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    return 1 + max((_depth(item) for item in inner), default=0)


def config_of(method: Method, raw: object) -> MethodConfig:
    """The method's settings with those that a form changed.

    A size that was changed is taken as it is, not fitted, unless the form says that it is to be.

    Raises ConfigError: naming what is wrong.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"The method's settings must be a mapping, got {type(raw).__name__}.")
    kept = {k: v for k, v in method.config.model_dump().items() if k not in raw}
    if raw.get("decoding_type", method.config.decoding_type) != method.config.decoding_type:
        raise ConfigError("decoding_type is set by the method picker, not by a setting.")
    config = settings_from(type(method.config), {**kept, **raw})
    own = {name: getattr(config, name) for name in config.size_settings.split()}
    changed = any(value != getattr(method.config, name) for name, value in own.items())
    if changed and "size" not in raw:
        return config.replace(**own)
    return config
