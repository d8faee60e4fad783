"""The catalog of the page: targets, methods (presets and decoding types), example prompts.

Paths and hub ids in forms and imported runs are untrusted: settings may name the shipped weights
and corpora, and those allowed at the start. Others are refused with the same sentence whether they
exist or not.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import presets
from engine.drafters import methods as decoding_types
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, SourceError, validate_choice
from engine.model.sources import Locate, Shipped, TargetSpec
from playground.host.local_drafters import draft_models_of, heads_of
from presets import MethodPreset, Prompt, PromptSuite
from presets import locate as locate_shipped

SHIPPED = tuple(presets.FOLDER / kind for kind in get_args(Shipped))
TYPE_PREFIX = "type:"
MAX_PLACE_CHARS = 1000
"""Longest path or hub id."""
FIRST_METHOD, FIRST_CATEGORY = "ngram", "summarisation"
TREE_METHOD = "token-recycling"
OWN_DRAFTERS = "User_Provided"
"""Decoding type of users' own drafters. It runs only drafters that were registered when the server
started, so the page may set it; without any it is not listed."""


MethodTypes = Mapping[str, type[MethodConfig]]
"""Methods by decoding type."""


def stored_config(
    values: Mapping[str, Any], types: MethodTypes, *, where: str = ""
) -> MethodConfig:
    """A method's settings from the log.

    Raises ConfigError: there is no such method, or it refuses a setting.
    """
    cls = types.get(str(values.get("decoding_type")))
    if cls is None:
        raise ConfigError(
            f"There is no method {values.get('decoding_type')!r:.60} here. Update the program."
        )
    return cls.parse(values, where=where)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The menus of the page, and the functions that resolve names in its settings."""

    targets: dict[str, TargetSpec]
    presets: dict[str, MethodPreset]
    types: MethodTypes
    suites: Mapping[str, PromptSuite]
    resolve: Callable[[str], TargetSpec]
    locate: Locate = locate_shipped
    may_open: bool = False
    """Whether the page may add targets by path or hub id."""
    admit: Callable[[str], None] = lambda place: None
    """Allows settings to name a path or hub id from now on."""
    clusters: tuple[str, ...] = ("local",)
    """Ray clusters that experiments may run on."""

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
        """Raises ConfigError: no target has this name."""
        advice = "Add a file under presets/targets for another one."
        return self.targets[validate_choice("target", name, self.targets, advice)]

    def find_target(self, place: object) -> TargetSpec:
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
        """As `find_target`; adds it to the catalog, with the drafters on this machine."""
        spec = self.find_target(place)
        if spec.name not in self.targets:
            self.targets[spec.name] = spec
            self.add_drafters()
        return spec

    def add_drafters(self) -> None:
        """Offer the heads in the folders of targets, and smaller models on this machine."""
        for target in [one for one in self.targets.values() if one.path is not None]:
            for preset in (*heads_of(target), *draft_models_of(target, self.targets.values())):
                if preset.name not in self.presets:
                    self.admit(preset.config.model_dump()["speculative_model"])
                    self.presets[preset.name] = preset

    def is_local(self, weights: str) -> bool:
        """Whether a drafter's weights are on this machine."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        if weights in self.targets and self.targets[weights].hub is None:
            return True
        place = self.locate(weights)
        try:
            cached = isinstance(try_to_load_from_cache(place, "config.json"), str)
        except HFValidationError:  # a path
            cached = False
        return cached or Path(place).expanduser().exists()

    def target_choices(self) -> list[tuple[str, str]]:
        """Titles and names; those of random weights end with ` · random` and come last.

        Equal titles are followed by their folder, or by the whole name.
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

    def method(self, key: object) -> MethodPreset:
        """A preset, or a decoding type with its defaults.

        Raises ConfigError: no method has this name.
        """
        if isinstance(key, str) and key in self.presets:
            return self.presets[key]
        name = key.removeprefix(TYPE_PREFIX) if isinstance(key, str) else ""
        if name not in self.types:
            names = ", ".join([*self.presets, *self.types])
            raise ConfigError(f"method must be one of {names}, got {key!r:.80}.")
        cls = self.types[name]
        return MethodPreset(
            name=name, title=cls.title, description=cls.summary, config=cls.parse({})
        )

    def method_choices(self, target: str) -> list[tuple[str, str]]:
        """Methods for a target: presets first, then the bare decoding types."""
        return self._split_methods(target)[0]

    def unavailable(self, target: str) -> list[tuple[str, str]]:
        """Methods that are not available for a target: title and reason."""
        return self._split_methods(target)[1]

    def _split_methods(self, target: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        spec, choices, others = self.targets.get(target), [], []
        names = {target} if spec is None else presets.same_model(spec)
        for name, preset in self.presets.items():
            if preset.target is None or preset.target in names:
                choices.append((preset.title, name))
            else:
                others.append((preset.title, f"made for {preset.target}"))
        # A preset for the target shows that it has what the preset's method requires.
        own = [preset for preset in self.presets.values() if preset.target in names]
        supported, lacking = {preset.config.decoding_type for preset in own}, []
        for name, cls in self.types.items():
            if cls.requires is not None and name not in supported:
                lacking.append((name, f"needs a target with {cls.requires}"))
            elif name != OWN_DRAFTERS:
                model = cls.model_fields.get("speculative_model")
                needs_weights = model is not None and model.default is None
                start = "needs weights" if needs_weights else "default settings"
                choices.append((f"{name} · {start}", TYPE_PREFIX + name))
        return choices, [*lacking, *others]

    def first_method(self, target: str, *, alone: bool = False) -> str:
        """The initial value of the pickers: the preset marked as the fastest for the target.

        Without one, a preset for the target that needs no weights: lookup costs next to nothing
        and pays off on any machine, a trained drafter may not. For a target with random weights,
        any preset made for it.

        Args:
            alone: exclude combinations, which few engines run.
        """
        keys = [key for _, key in self.method_choices(target)]
        own = [key for key in keys if key in self.presets and self.presets[key].target]
        if alone:
            own = [key for key in own if not self.presets[key].config.nested()]
        is_random = target in self.targets and self.targets[target].random is not None
        fastest = [key for key in own if self.presets[key].first]
        light = [key for key in own if is_random or not self.is_trained(key)]
        return next(iter([*fastest, *light]), FIRST_METHOD if FIRST_METHOD in keys else keys[0])

    def tree_method(self, target: str) -> str | None:
        """A method that drafts trees on a target: EAGLE-2 made for it, else one without weights."""
        keys = [key for _, key in self.method_choices(target) if key in self.presets]
        dynamic = [key for key in keys if getattr(self.presets[key].config, "use_dynamic_tree", 0)]
        own = [key for key in dynamic if self.presets[key].target]
        return next(iter([*own, *(key for key in keys if key == TREE_METHOD)]), None)

    def is_trained(self, key: str) -> bool:
        """Whether a method, or a part of a combination, drafts with trained weights."""
        config = self.method(key).config
        return any(hasattr(one, "speculative_model") for one in (config, *config.nested().values()))

    def first_prompt(self) -> str:
        """The initial prompt: an example on which drafting works well."""
        prompts = [one for one in self.examples().values() if not one.raw]
        return next((one.turns[0] for one in prompts if one.category == FIRST_CATEGORY), "")

    def examples(self) -> dict[str, Prompt]:
        """Example prompts by label."""
        return {
            f"{prompt.category}: {' '.join(prompt.turns[0].split())[:70]}": prompt
            for suite in self.suites.values()
            if suite.examples
            for prompt in suite.prompts
        }


def catalog_within(
    catalog: Catalog, targets: Sequence[str], places: Sequence[str], *, may_open: bool = False
) -> Catalog:
    """The catalog with further targets; its settings may name no other paths.

    Args:
        targets: presets, local folders, .gguf files or hub ids.
        places: folders with all their contents, files, or hub ids that settings may name.
        may_open: whether the page may add targets by path or hub id.

    Raises SourceError: a target is none of these.
    """
    specs = {name: presets.resolve(name) for name in targets}
    configs = [preset.config.model_dump() for preset in catalog.presets.values()]
    weights = [config.get(key) for config in configs for key in ("speculative_model", "datastore")]
    allowed = AllowedPaths({*targets, *places, *filter(None, weights)})
    within = dataclasses.replace(
        catalog,
        targets={**catalog.targets, **specs},
        presets={**catalog.presets},
        resolve=allowed.resolve,
        locate=allowed.locate,
        may_open=may_open,
        admit=allowed.places.add,
    )
    within.add_drafters()
    return within


@dataclass(frozen=True, slots=True)
class AllowedPaths:
    """The hub ids, files and folders that settings may name besides presets."""

    places: set[str]

    def resolve(self, name: str) -> TargetSpec:
        """As `presets.resolve`; raises SourceError: the page may not use it."""
        self._check(name)
        return presets.resolve(name)

    def locate(self, name: str, kind: Shipped = "drafters") -> str:
        """As `presets.locate`; raises SourceError: the page may not use it."""
        self._check(name, kind)
        return presets.locate(name, kind)

    def _check(self, name: str, kind: Shipped = "drafters") -> None:
        try:
            is_open = name in presets.targets() or name in self.places
            is_open = is_open or presets.locate(name, kind) != name or self._is_inside(name)
        except (OSError, ValueError, RuntimeError):  # not a valid path: a NUL, too long, ~nobody
            is_open = False
        if not is_open:
            raise SourceError(
                f"{name[:80]!r} is not among the allowed paths. Start the server with "
                "--allow-path, which takes a folder, a file or a hub id."
            )

    def _is_inside(self, name: str) -> bool:
        """Whether the path, with links resolved, exists in an allowed folder."""
        path = Path(name).expanduser().resolve()
        folders = [*SHIPPED, *(Path(place).expanduser() for place in self.places)]
        inside = any(path.is_relative_to(folder.resolve()) for folder in folders)
        return inside and path.exists()
