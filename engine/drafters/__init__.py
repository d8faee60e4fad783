"""Drafting methods, one file each (a family: one folder): the config class and its drafter.

Adding a method is adding a file: `methods` finds every config class in this folder.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, did_you_mean


def methods() -> dict[str, type[MethodConfig]]:
    """The config class of every method by `decoding_type`, plain decoding first."""
    return dict(_methods_in(tuple(__path__)))


@functools.cache
def _methods_in(folders: tuple[str, ...]) -> dict[str, type[MethodConfig]]:
    """Cached, because importing the files takes longer than parsing a method."""
    classes: dict[str, type[MethodConfig]] = {}
    for info in pkgutil.walk_packages(folders, f"{__name__}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, MethodConfig):
                kind = value.model_fields["decoding_type"]
                if value.__module__ == module.__name__ and not kind.is_required():
                    classes[kind.default] = value
    return dict(sorted(classes.items(), key=lambda item: (item[0] != "Autoregressive", item[0])))


def parse_method(values: object, *, where: str = "") -> MethodConfig:
    """A method's settings from plain data; `decoding_type` names the method.

    Raises ConfigError: no or unknown `decoding_type`, or an invalid setting.
    """
    classes = methods()
    at = f" (in {where})" if where else ""
    if not isinstance(values, Mapping):
        raise ConfigError(f"A method must be a mapping with decoding_type, got {values!r:.80}{at}.")
    name = values.get("decoding_type")
    if not isinstance(name, str) or name not in classes:
        hint = did_you_mean(name, classes) or f"Allowed: {', '.join(classes)}."
        raise ConfigError(f"decoding_type must name a method, got {name!r:.80}{at}. {hint}")
    return classes[name].parse(values, where=where)
