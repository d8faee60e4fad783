"""Requests of a page, validated before anything runs: their values are untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field

from engine.config import Limits, Sampling, Settings
from engine.drafters.method import MethodConfig
from engine.errors import PromptError, validate_choice
from engine.model.plan import DtypeName
from engine.model.sources import TargetSpec
from playground.host.catalog import Catalog
from playground.host.controls import Form, FormValues, changed_by, settings_from
from playground.host.live import Message, RunId

Mode = Literal["chat", "raw"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
MAX_PROMPT_CHARS = 400_000
MAX_SYSTEM_CHARS = 20_000


class RequestFields(Settings):
    """Values of the Generate page's components; empty ones are left out."""

    target: Any = None
    dtype: DtypeName
    method: Any = None
    mode: Mode
    system: str = Field("", max_length=MAX_SYSTEM_CHARS)
    prompt: str = Field("", max_length=MAX_PROMPT_CHARS)
    form: Form = FormValues()
    run_form: Form = FormValues()
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
    form = fields.form.values | fields.run_form.values
    is_chat = fields.mode == "chat"
    if not fields.repeats:
        require_prompt(fields.mode, fields.prompt)
    return GenerateRequest(
        target=catalog.target(fields.target),
        dtype=fields.dtype,
        title=method.title,
        config=changed_by(method.config, form.get("method", {})),
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
