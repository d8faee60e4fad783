"""The catalog of the page: targets, methods (presets and decoding types), example prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import presets
from engine.drafters import methods as decoding_types
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, one_of
from engine.model.sources import Locate, TargetSpec
from playground.host.local_drafters import draft_models_of, heads_of, is_downloaded
from presets import MethodPreset, PromptSuite
from presets import locate as locate_shipped

TYPE_PREFIX = "type:"
MAX_PLACE_CHARS = 1000
"""Of a path or hub id."""
FIRST_METHOD, FIRST_CATEGORY = "ngram", "summarisation"
TREE_METHOD = "token-recycling"
OWN_DRAFTERS = "User_Provided"
"""Decoding type of the user's own drafters. It runs only drafters registered when the server
started, so its settings may come from the page; without any it is not listed."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the menu; its settings are the start values of the controls."""

    title: str
    summary: str
    config: MethodConfig


@dataclass(frozen=True, slots=True)
class Catalog:
    """The menus of the page, and how names in its settings are resolved (`resolve`, `locate`)."""

    targets: dict[str, TargetSpec]
    presets: dict[str, MethodPreset]
    types: Mapping[str, type[MethodConfig]]
    suites: Mapping[str, PromptSuite]
    resolve: Callable[[str], TargetSpec]
    locate: Locate = locate_shipped
    may_open: bool = False
    """Whether the page may add targets by their place."""
    admit: Callable[[str], None] = lambda place: None
    """Permits settings to name a place from now on."""
    clusters: tuple[str, ...] = ("local",)
    """Addresses of Ray that experiments may run on."""

    @classmethod
    def shipped(cls) -> Catalog:
        return cls(
            dict(presets.targets()),
            dict(presets.methods()),
            decoding_types(),
            presets.suites(),
            presets.resolve,
        )

    def target(self, name: object) -> TargetSpec:
        """Raises ConfigError: no target is named so."""
        advice = "Add a file under presets/targets for another one."
        return self.targets[one_of("target", name, self.targets, advice)]

    def named(self, place: object) -> TargetSpec:
        """A target by name, folder, .gguf file or hub id.

        Raises ConfigError, SourceError: it is none of these, or the page may not open it.
        """
        name = place.strip() if isinstance(place, str) else ""
        if not 0 < len(name) <= MAX_PLACE_CHARS:
            raise ConfigError("Give a folder, a .gguf file or a hub id, such as owner/model.")
        if name in self.targets:
            return self.targets[name]
        if not self.may_open:
            raise ConfigError(
                "This page does not open targets by path or hub id. Start the server with "
                "--target, or on loopback with its token."
            )
        try:
            return presets.resolve(name)
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, too long, ~nobody
            raise ConfigError(f"{name[:80]!r} is not a valid path or hub id.") from error

    def open(self, place: object) -> TargetSpec:
        """The same, added to the catalog with the drafters on this machine; raises as `named`."""
        spec = self.named(place)
        is_new = spec.name not in self.targets
        self.targets.setdefault(spec.name, spec)
        if is_new:
            self.add_drafters()
        return spec

    def add_drafters(self) -> None:
        """Offer the heads in the folders of targets, and smaller models on this machine."""
        for target in list(self.targets.values()):
            if target.path is None:
                continue
            for preset in (*heads_of(target), *draft_models_of(target, self.targets.values())):
                weights = getattr(preset.config, "speculative_model", None)
                if preset.name not in self.presets and weights:
                    self.admit(weights)
                    self.presets[preset.name] = preset

    def is_local(self, weights: str) -> bool:
        """Whether a drafter's weights are on this machine."""
        if weights in self.targets and self.targets[weights].hub is None:
            return True
        return is_downloaded(self.locate(weights))

    def target_choices(self) -> list[tuple[str, str]]:
        """Titles and names; titles that end with ` · random` come last, under a heading.

        Titles that several have are followed by the folder, or by the whole name.
        """
        specs = sorted(self.targets.items(), key=lambda item: item[1].random is not None)
        titles = [spec.title or name for name, spec in specs]
        for place in ("folder", "name"):
            several = {title for title, count in Counter(titles).items() if count > 1}
            for i, (name, spec) in enumerate(specs):
                if titles[i] in several and spec.path:
                    where = name if place == "name" else Path(name).resolve().parent.name
                    titles[i] = f"{titles[i]}, {where}"
        return [
            (title + (" · random" if spec.random else ""), name)
            for title, (name, spec) in zip(titles, specs, strict=True)
        ]

    def method(self, key: object) -> Method:
        """Raises ConfigError: no method is named so."""
        if isinstance(key, str) and key in self.presets:
            preset = self.presets[key]
            return Method(preset.title, preset.description, preset.config)
        name = key.removeprefix(TYPE_PREFIX) if isinstance(key, str) else ""
        if name not in self.types:
            known = [*self.presets, *self.types]
            raise ConfigError(f"method must be one of {', '.join(known)}, got {key!r:.80}.")
        cls = self.types[name]
        return Method(cls.title, cls.summary, cls.parse({}))

    def method_choices(self, target: str) -> list[tuple[str, str]]:
        """Methods for a target: presets first, then every decoding type by itself."""
        names = self._names(target)
        fitting = [
            (preset.title, name)
            for name, preset in self.presets.items()
            if preset.target is None or preset.target in names
        ]
        plain = [
            (f"{name} · {_start_of(cls)}", TYPE_PREFIX + name)
            for name, cls in self.types.items()
            if name != OWN_DRAFTERS and (cls.requires is None or self._carries(target, name))
        ]
        return fitting + plain

    def first_method(self, target: str, *, alone: bool = False) -> str:
        """The start value of the pickers: the preset marked as the fastest for the target.

        Without one, a preset for the target that needs no weights: looking up costs next to
        nothing and pays off on any machine, a trained drafter may not. For a target with random
        weights, any preset made for it.

        Args:
            alone: a single method and no combination, which few engines run.
        """
        keys = [key for _, key in self.method_choices(target)]
        own = [key for key in keys if key in self.presets and self.presets[key].target]
        if alone:
            own = [key for key in own if not self.presets[key].config.within()]
        is_random = target in self.targets and self.targets[target].random is not None
        fastest = [key for key in own if self.presets[key].first]
        light = [key for key in own if is_random or not self.is_trained(key)]
        return next(iter([*fastest, *light]), FIRST_METHOD if FIRST_METHOD in keys else keys[0])

    def tree_method(self, target: str) -> str | None:
        """A method that drafts trees on a target: EAGLE-2 made for it, else one without weights."""
        keys = [key for _, key in self.method_choices(target) if key in self.presets]
        grown = [key for key in keys if getattr(self.presets[key].config, "use_dynamic_tree", 0)]
        own = [key for key in grown if self.presets[key].target]
        return next(iter([*own, *(key for key in keys if key == TREE_METHOD)]), None)

    def is_trained(self, key: str) -> bool:
        """Whether a method, or one within it, drafts with weights of its own."""
        config = self.method(key).config
        return any(hasattr(one, "speculative_model") for one in (config, *config.within().values()))

    def first_prompt(self) -> str:
        """The start value of the prompt: an example on which drafting works well."""
        prompts = [p for s in self.suites.values() if s.examples for p in s.prompts if not p.raw]
        return next((p.turns[0] for p in prompts if p.category == FIRST_CATEGORY), "")

    def unfit(self, target: str) -> list[tuple[str, str]]:
        """Methods that are not available for a target: title and reason."""
        names = {None, *self._names(target)}
        of_others = [
            (preset.title, f"made for {preset.target}")
            for preset in self.presets.values()
            if preset.target not in names
        ]
        types = [
            (name, f"needs a target with {cls.requires}")
            for name, cls in self.types.items()
            if cls.requires is not None and not self._carries(target, name)
        ]
        return [*types, *of_others]

    def _carries(self, target: str, decoding_type: str) -> bool:
        """Whether a preset says that the target has what the method requires."""
        names = self._names(target)
        return any(
            preset.target in names and preset.config.decoding_type == decoding_type
            for preset in self.presets.values()
        )

    def _names(self, target: str) -> set[str]:
        """A target's name, and those of the presets of its model."""
        spec = self.targets.get(target)
        return {target} if spec is None else presets.same_model(spec)

    def examples(self) -> list[tuple[str, str]]:
        """Example prompts: a label and a key `suite/index`."""
        return [
            (f"{prompt.category}: {' '.join(prompt.turns[0].split())[:70]}", f"{name}/{i}")
            for name, suite in self.suites.items()
            if suite.examples
            for i, prompt in enumerate(suite.prompts)
        ]

    def example(self, key: object) -> tuple[str, bool]:
        """Text of an example, and whether it is a raw completion.

        Raises ConfigError: no example is named so.
        """
        name, _, index = key.rpartition("/") if isinstance(key, str) else ("", "", "")
        suite = self.suites.get(name)
        if suite is None or not index.isdigit() or int(index) >= len(suite.prompts):
            raise ConfigError(f"There is no example prompt {key!r:.80}.")
        prompt = suite.prompts[int(index)]
        return prompt.turns[0], prompt.raw


def _start_of(cls: type[MethodConfig]) -> str:
    """The start settings of a decoding type by itself."""
    model = cls.model_fields.get("speculative_model")
    return "needs weights" if model is not None and model.default is None else "default settings"
