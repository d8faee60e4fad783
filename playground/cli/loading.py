"""The method of a command, and its target and drafters, loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import presets
from engine.drafters.method import MethodConfig
from engine.model.sources import TargetSpec
from playground.cli.inputs import cache_of
from playground.cli.options import DeviceOptions, MethodOptions
from playground.cli.streams import note
from playground.cli.terminal import Terminal, plain
from playground.host.methods import choose_method
from playground.host.models import Models


def method_of(options: MethodOptions) -> MethodConfig:
    """Raises ConfigError: an unknown method or setting."""
    return choose_method(options.method, options.settings, options.drafter, report=note)


@contextmanager
def loaded_models(options: DeviceOptions, spec: TargetSpec, dtype: str) -> Iterator[Models]:
    """The loaded target and its drafters; freed at the end."""
    models = Models(cache_dir=cache_of(options), device=options.device, resolve=presets.resolve)
    try:
        with Terminal(stderr=True).status(plain(f"loading {spec.name}")) as status:
            tell = lambda message, _: status.update(plain(message))  # noqa: E731
            models.target(spec, dtype, tell)
        yield models
    finally:
        models.close()
