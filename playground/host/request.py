"""Checks what a page sent before anything runs. Every handler is open to anybody's payload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError
from engine.model.loading import DtypeName
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog, Method
from playground.host.controls import settings_from

Mode = Literal["chat", "raw"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
MAX_PROMPT_CHARS = 400_000
MAX_SYSTEM_CHARS = 20_000
MAX_FORM_CHARS = 400_000
MAX_FORM_DEPTH = 8


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request for one run.

    Attributes:
        parent: run that this one continues as the next turn of its chat.
        repeats: run whose prompt and conversation are used again; prompt and parent are ignored.
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


def read_request(catalog: Catalog, raw: Mapping[str, Any]) -> GenerateRequest:
    """A request from what the page's components hold.

    Raises:
        ConfigError: a setting is unknown or out of range.
        PromptError: the prompt is empty or too long to look at.
    """
    method = catalog.method(raw.get("method"))
    repeats = read_run_id(raw["repeats"]) if raw.get("repeats") else None
    mode = _one_of("mode", raw.get("mode"), ("chat", "raw"))
    form = check_form(raw.get("form"))
    return GenerateRequest(
        target=catalog.target(raw.get("target")),
        dtype=read_dtype(raw.get("dtype")),
        method=method,
        config=config_of(method, form.get("method", {})),
        sampling=settings_from(Sampling, form.get("sampling", {}), where="sampling"),
        limits=settings_from(Limits, form.get("limits", {}), where="limits"),
        mode="chat" if mode == "chat" else "raw",
        system=_text("system prompt", raw.get("system"), MAX_SYSTEM_CHARS),
        prompt="" if repeats else _prompt(raw.get("prompt"), mode),
        parent=read_run_id(raw.get("parent")) if mode == "chat" and raw.get("parent") else None,
        repeats=repeats,
    )


def read_dtype(raw: object) -> str:
    return _one_of("dtype", raw, DTYPES)


def read_run_id(raw: object) -> str:
    """An id as it may stand in a link; whether such a run exists is the store's to say."""
    if isinstance(raw, str) and 0 < len(raw) <= 64 and raw.isascii() and raw.isprintable():
        return raw
    raise ConfigError(f"run must be the id of a run, got {raw!r:.80}.")


def read_count(name: str, raw: object, *, most: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 0 <= raw <= most:
        raise ConfigError(f"{name} must be an integer in [0, {most}], got {raw!r:.80}.")
    return raw


def check_form(raw: object) -> dict[str, Any]:
    """What a settings form holds, per group; refuses what is too large or too deep to look at."""
    values = raw.get("values", {}) if isinstance(raw, Mapping) else {} if raw is None else None
    if not isinstance(values, Mapping):
        raise ConfigError(f"The form must be a mapping of settings, got {type(raw).__name__}.")
    try:
        size = len(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("The form must hold plain JSON values.") from error
    if size > MAX_FORM_CHARS or _depth(values) > MAX_FORM_DEPTH:
        raise ConfigError(f"The form must be at most {MAX_FORM_CHARS} characters of plain values.")
    return dict(values)


def _depth(value: object) -> int:
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    return 1 + max((_depth(item) for item in inner), default=0)


def config_of(method: Method, raw: object) -> MethodConfig:
    """The method's settings with those that a form changed.

    Raises ConfigError: naming what is wrong.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"The method's settings must be a mapping, got {type(raw).__name__}.")
    kept = {k: v for k, v in method.config.model_dump().items() if k not in raw}
    if raw.get("decoding_type", method.config.decoding_type) != method.config.decoding_type:
        raise ConfigError("decoding_type is set by the method picker, not by a setting.")
    return settings_from(type(method.config), {**kept, **raw})


def _prompt(raw: object, mode: str) -> str:
    prompt = _text("prompt", raw, MAX_PROMPT_CHARS)
    if not (prompt.strip() if mode == "chat" else prompt):
        raise PromptError("The prompt is empty. Write something, or pick an example.")
    return prompt


def _text(name: str, raw: object, most: int) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, str):
        raise PromptError(f"The {name} must be text, got {type(raw).__name__}.")
    if len(raw) > most:
        raise PromptError(f"The {name} has {len(raw)} characters; at most {most} are taken.")
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"The {name} has half of a surrogate pair; it is no text.") from error
    return raw


def _one_of(name: str, raw: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(raw, str) or raw not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {raw!r:.80}.")
    return raw
