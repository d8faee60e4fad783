"""Names of models: a target, and after a colon the method that drafts for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.drafters.autoregressive import AutoregressiveConfig
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.host.catalog import TYPE_PREFIX, Catalog, Method

SEPARATOR = ":"
DEFAULTS = ("ensemble", "tensorrt_llm_bls")
"""Names of the default model, as Triton's tutorials call theirs."""


class UnknownModelError(ConfigError):
    """There is no target or method of this name."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target and the method that drafts for it."""

    name: str
    target: TargetSpec
    method: Method

    @property
    def drafts(self) -> bool:
        """False for plain decoding."""
        return not isinstance(self.method.config, AutoregressiveConfig)

    def drafting(self, length: int | None, draws: bool | None) -> Model:
        """It with drafts of at most `length` tokens, drawn by the draft model or its likeliest.

        None leaves a setting as it is; of a combination both are of every method that has it.

        Raises ConfigError: the method has no such setting, or not of this value.
        """
        config = self.method.config
        if length is not None:
            config = _changed(config, "max_draft_len", length, asked="num_draft_tokens")
        if draws is not None:
            config = _changed(config, "use_draft_probs", draws, asked="use_draft_logits")
        return replace(self, method=replace(self.method, config=config))


def _changed(config: MethodConfig, name: str, value: object, *, asked: str) -> MethodConfig:
    """A method's settings with one changed, or those of the methods within it.

    Args:
        asked: what the request calls it.

    Raises ConfigError: none of them has it, or not of this value.
    """
    if name in type(config).model_fields:
        return config.replace(**{name: value})
    inner = {
        part: one.replace(**{name: value})
        for part, one in config.within().items()
        if name in type(one).model_fields
    }
    if not inner:
        raise ConfigError(f"{asked} must be left out, {config.title} has no {name}.")
    return config.replace(**inner)


def model_of(catalog: Catalog, name: str, *, drafts: bool = True) -> Model:
    """The model of a name: `TARGET`, `TARGET:METHOD`, or empty for the page's default.

    Args:
        drafts: False selects plain decoding, whatever the method.

    Raises UnknownModelError: naming what is unknown.
    """
    full_name = name if name not in ("", *DEFAULTS) else catalog.target_choices()[0][1]
    target, key = _split(catalog, full_name)
    try:
        key = key or catalog.first_method(target)
        if key not in catalog.presets and not key.startswith(TYPE_PREFIX):
            key = TYPE_PREFIX + key
        method = catalog.method(key)
        if not drafts:
            method = catalog.method(f"{TYPE_PREFIX}{AutoregressiveConfig().decoding_type}")
        return Model(full_name, catalog.target(target), method)
    except ConfigError as error:
        raise UnknownModelError(f"No model {name!r:.80}: {error}") from error


def _split(catalog: Catalog, name: str) -> tuple[str, str]:
    """Target and method; a target's own name may hold colons."""
    if name in catalog.targets:
        return name, ""
    target, _, method = name.partition(SEPARATOR)
    longest = max((t for t in catalog.targets if name.startswith(t + SEPARATOR)), default="")
    return (longest, name[len(longest) + 1 :]) if longest else (target, method)


def list_models(catalog: Catalog, loaded: str | None) -> list[str]:
    """Names of the models that need no download, and of those over the `loaded` target."""
    names = []
    for target, spec in catalog.targets.items():
        if target == loaded or not (spec.hub or spec.random):
            keys = [key for _, key in catalog.method_choices(target) if key in catalog.presets]
            names += [target, *(f"{target}{SEPARATOR}{key}" for key in keys)]
    return names
