"""What options stand for: settings, the run log, folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config import THINKING, Limits, Sampling
from engine.errors import ConfigError
from engine.safe_text import read_text
from playground.cli.options import DeviceOptions, LogOptions, SamplingOptions
from playground.host import paths
from storage import RunLog


def split_list(text: str | None) -> tuple[str, ...]:
    """The items of `a,b`."""
    return tuple(part for item in (text or "").split(",") if (part := item.strip()))


def cache_of(options: DeviceOptions) -> Path:
    """The folder of the weights."""
    return options.cache_dir or paths.cache_dir()


def sampling_of(options: SamplingOptions) -> Sampling:
    """Raises ConfigError: a value is out of range, or a file cannot be read."""
    names = ("temperature", "top_k", "top_p", "min_p", "verification", "seed")
    values = {name: getattr(options, name) for name in names} | _structure(options)
    return Sampling.parse({**values, "chat_template_kwargs": _template(options)})


def _template(options: SamplingOptions) -> dict[str, Any]:
    """The settings of the chat template; a value that is not JSON is a text."""
    settings: dict[str, Any] = {}
    if options.thinking is not None:
        settings[THINKING] = options.thinking
    for words in options.chat_template_kwarg:
        name, separator, value = words.partition("=")
        if not separator:
            raise ConfigError(f"--chat-template-kwarg must be NAME=VALUE, got {words!r:.80}.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _structure(options: SamplingOptions) -> dict[str, str]:
    """The settings of structured output, if any."""
    named = ("json_schema", "regex", "grammar")
    values = {name: text for name in named if (text := getattr(options, name)) is not None}
    if len(values) > 1:
        raise ConfigError("Give one of --json-schema, --regex and --grammar.")
    for kind, text in values.items():
        is_inline = kind == "regex" or ("{" if kind == "json_schema" else ":") in text
        grammar = text if is_inline else read_text(Path(text))
        return {"structured_output": kind, "grammar": grammar}
    return {}


def limits_of(options: SamplingOptions, **more: Any) -> Limits:
    """Raises ConfigError: a value is out of range."""
    own = {"max_new_tokens": options.max_new_tokens, "ignore_eos": options.ignore_eos}
    return Limits.parse({**own, **more})


def log_url(options: LogOptions) -> str:
    return options.db or str(paths.run_log())


def open_log(options: LogOptions) -> RunLog:
    """A context manager, as every `RunLog`."""
    return RunLog.open(log_url(options))
