"""A stored run as a request: to run it again as it was, or to change it on the Generate page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError
from playground.host.catalog import TYPE_PREFIX, Catalog, Method
from playground.host.request import DTYPES, GenerateRequest, Mode
from storage import RunDetail


@dataclass(frozen=True, slots=True)
class GenerateFields:
    """What the Generate page's components are to hold; `method` is a key of the catalog."""

    target: str
    dtype: str
    method: str
    settings: Mapping[str, Any]
    sampling: Sampling
    limits: Limits
    mode: Mode
    system: str
    prompt: str


def request_again(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """The same prompt, conversation and settings once more.

    Raises:
        ConfigError: the target or a setting is not known here any more.
        PromptError: the run has no text to ask again.
    """
    if not run.messages and not run.prompt_text:
        raise PromptError(
            "This run's prompt was given as token ids. Repeat it with "
            "`app.py generate --prompt-ids …`; the ids are in its export."
        )
    config = config_of(catalog, run)
    return GenerateRequest(
        target=catalog.target(run.target),
        dtype=_dtype(run),
        method=Method(run.method_title, type(config).summary, config),
        config=config,
        sampling=Sampling.parse(run.sampling),
        limits=Limits.parse(run.limits),
        mode="chat" if run.messages else "raw",
        system="",
        prompt="",
        repeats=run.id,
    )


def config_of(catalog: Catalog, run: RunDetail) -> MethodConfig:
    """The run's method.

    Raises:
        ConfigError: no such method, or it refuses a setting.
    """
    cls = catalog.types.get(run.decoding_type)
    if cls is None:
        raise ConfigError(
            f"The method {run.decoding_type!r:.60} of this run is not known here. "
            "Update the program to run it again."
        )
    return cls.parse(run.method)


def fields_of(catalog: Catalog, run: RunDetail) -> GenerateFields:
    """The run's settings and prompt for the Generate page; of a chat, its last question.

    Raises:
        ConfigError: the target, the method or a setting is not offered here.
    """
    target = catalog.target(run.target).name
    config = config_of(catalog, run)
    system = next((m["content"] for m in run.messages if m.get("role") == "system"), "")
    return GenerateFields(
        target=target,
        dtype=_dtype(run),
        method=_method_key(catalog, target, run.method_title, config),
        settings={k: v for k, v in config.model_dump().items() if k != "decoding_type"},
        sampling=Sampling.parse(run.sampling),
        limits=Limits.parse(run.limits),
        mode="chat" if run.messages or not run.prompt_text else "raw",
        system=system,
        prompt=run.prompt_text,
    )


def _dtype(run: RunDetail) -> str:
    return run.dtype if run.dtype in DTYPES else "auto"


def _method_key(catalog: Catalog, target: str, title: str, config: MethodConfig) -> str:
    """The entry of the method picker that is nearest to these settings.

    Raises:
        ConfigError: the picker has none of this method.
    """
    keys = [key for _, key in catalog.method_choices(target)]
    same = [key for key in keys if type(catalog.method(key).config) is type(config)]
    if not same:
        raise ConfigError(
            f"The method {config.decoding_type} is not offered for {target}. "
            "Its weights may have to be named on the command line."
        )
    own_type = TYPE_PREFIX + config.decoding_type

    def rank(key: str) -> tuple[bool, bool, bool]:
        method = catalog.method(key)
        return method.config != config, method.title != title, key != own_type

    return min(same, key=rank)
