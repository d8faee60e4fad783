"""Names of models: `TARGET`, or `TARGET:METHOD` with the method that drafts for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.model.sources import TargetSpec
from playground.host.catalog import TYPE_PREFIX, Catalog
from presets import MethodPreset
from storage import PLAIN

SEPARATOR = ":"
DEFAULTS = ("ensemble", "tensorrt_llm_bls")
"""Names of the default model, as in Triton's tutorials."""


class UnknownModelError(ConfigError):
    """There is no target or method of this name."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target and the method that drafts for it."""

    name: str
    target: TargetSpec
    method: MethodPreset

    @property
    def drafts(self) -> bool:
        """False for plain decoding."""
        return self.method.config.decoding_type != PLAIN

    def with_drafting(self, length: int | None, draws: bool | None) -> Model:
        """The model with drafts of at most `length` tokens, sampled by the draft model or greedy.

        None leaves a setting unchanged. In a combination, all methods with the setting change.

        Raises ConfigError: the method lacks the setting, or refuses its value.
        """
        config = self.method.config
        settings = {"num_draft_tokens": ("max_draft_len", length)}
        settings |= {"use_draft_logits": ("use_draft_probs", draws)}
        for field, (name, value) in settings.items():
            if value is None:
                continue
            parts = {k: v for k, v in config.nested().items() if name in type(v).model_fields}
            if name in type(config).model_fields:
                config = config.replace(**{name: value})
            elif parts:
                changed = {part: one.replace(**{name: value}) for part, one in parts.items()}
                config = config.replace(**changed)
            else:
                raise ConfigError(f"{field} must be left out, {config.title} has no {name}.")
        return replace(self, method=self.method.replace(config=config))


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
        method = catalog.method(key)  # even where another is used, its name must be a method's
        if not drafts:
            method = catalog.method(TYPE_PREFIX + PLAIN)
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
