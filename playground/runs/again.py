"""A stored run as a request: to run it again as it was, or to change it on the Generate page."""

from __future__ import annotations

from dataclasses import replace

from engine.config import Limits, Sampling
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError
from playground.host.catalog import TYPE_PREFIX, Catalog
from playground.host.request import DTYPES, GenerateRequest
from storage import RunDetail


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
    return replace(
        request_of(catalog, run), system="", prompt="", repeats=run.id, compares_with_plain=True
    )


def request_of(catalog: Catalog, run: RunDetail) -> GenerateRequest:
    """A run's settings and prompt; of a chat, its last question.

    Raises ConfigError: the target, the method or a setting is not known here any more.
    """
    cls = catalog.types.get(run.decoding_type)
    if cls is None:
        raise ConfigError(
            f"The method {run.decoding_type!r:.60} of this run is not known here. "
            "Update the program to run it again."
        )
    config = cls.parse(run.method)
    system = next((m["content"] for m in run.messages if m.get("role") == "system"), "")
    return GenerateRequest(
        target=catalog.target(run.target),
        dtype=run.dtype if run.dtype in DTYPES else "auto",
        title=run.method_title,
        config=config,
        sampling=Sampling.parse(run.sampling),
        limits=Limits.parse(run.limits),
        mode="chat" if run.messages or not run.prompt_text else "raw",
        system=system,
        prompt=run.prompt_text,
    )


def nearest_method(catalog: Catalog, target: str, title: str, config: MethodConfig) -> str:
    """The entry of the method picker that is nearest to these settings.

    Raises ConfigError: the picker has none of this method.
    """
    keys = [key for _, key in catalog.method_choices(target)]
    same = [key for key in keys if type(catalog.method(key).config) is type(config)]
    if not same:
        raise ConfigError(
            f"The method {config.decoding_type} is not offered for {target}. "
            "Its weights may have to be named on the command line."
        )

    def rank(key: str) -> tuple[bool, bool, bool]:
        method = catalog.method(key)
        other_title = method.title != title
        other, is_type = method.config != config, key.startswith(TYPE_PREFIX)
        return other, other_title, is_type != other  # the picker hides a type that equals a preset

    return min(same, key=rank)
