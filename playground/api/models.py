"""Names of models: a target, and after a colon the method that drafts for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.host.catalog import TYPE_PREFIX, Catalog, Method

SEPARATOR = ":"
DEFAULT = "ensemble"
"""Name of the default model, as Triton's tutorial calls it."""


class UnknownModelError(ConfigError):
    """No target or method is named so."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a name stands for."""

    name: str
    target: TargetSpec
    method: Method

    @property
    def drafts(self) -> bool:
        """Whether it is not plain decoding."""
        return not isinstance(self.method.config, AutoregressiveConfig)


def model_of(catalog: Catalog, name: str, *, drafts: bool = True) -> Model:
    """The model of a name: `TARGET`, `TARGET:METHOD`, or empty for what the page starts with.

    Args:
        drafts: False decodes plainly, whatever the method.

    Raises UnknownModelError: naming what is unknown.
    """
    asked = name if name not in ("", DEFAULT) else catalog.target_choices()[0][1]
    target, method = _split(catalog, asked)
    try:
        key = method or catalog.first_method(target)
        if key not in catalog.presets and not key.startswith(TYPE_PREFIX):
            key = TYPE_PREFIX + key
        found = catalog.method(key)
        if not drafts:
            found = catalog.method(f"{TYPE_PREFIX}{AutoregressiveConfig().decoding_type}")
        return Model(asked, catalog.target(target), found)
    except ConfigError as error:
        raise UnknownModelError(f"No model {name!r:.80}: {error}") from error


def _split(catalog: Catalog, name: str) -> tuple[str, str]:
    """Target and method; a target's own name may hold colons."""
    if name in catalog.targets:
        return name, ""
    target, _, method = name.partition(SEPARATOR)
    longest = max((t for t in catalog.targets if name.startswith(t + SEPARATOR)), default="")
    return (longest, name[len(longest) + 1 :]) if longest else (target, method)


def offered(catalog: Catalog, loaded: str | None) -> list[str]:
    """Names of what can be used without fetching it from a hub, and of what is loaded.

    Args:
        loaded: name of the target in memory.
    """
    targets = catalog.targets.items()
    near = [t for t, spec in targets if not (spec.hub or spec.random) or t == loaded]
    presets = {
        target: [key for _, key in catalog.method_choices(target) if key in catalog.presets]
        for target in near
    }
    return [n for t in near for n in (t, *(f"{t}{SEPARATOR}{key}" for key in presets[t]))]
