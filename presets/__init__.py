"""Named targets, methods, trees and prompt suites: YAML files, read into classes of settings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from engine.config import Settings
from engine.drafters import parse_method
from engine.drafters.method import MethodConfig
from engine.model.sources import Shipped, TargetSpec
from engine.training.corpus.dialogues import DialogueTemplates
from engine.tree import ChoicePaths, ChoiceTree
from presets.reading import read_yaml

if TYPE_CHECKING:  # menus are made without importing transformers
    from engine.tuning.experience import Prior

FOLDER = Path(__file__).parent


class MethodPreset(Settings):
    """A named method with tuned settings."""

    name: str
    title: str
    description: str = ""
    target: str | None = Field(None, description="target preset it belongs to; None = any")
    untrained: bool = Field(
        False, description="its weights are untrained: it only shows how the method works"
    )
    first: bool = Field(
        False, description="preselected in pickers: the fastest measured for its target"
    )
    config: MethodConfig


class Prompt(Settings):
    """The user's turns of a conversation, or a text to continue."""

    category: str
    turns: tuple[str, ...] = Field(strict=False, min_length=1)
    raw: bool = Field(False, description="continue the text itself, without a chat template")
    id: str = Field("", description="its name within the suite; empty = its number, from 1")
    history: tuple[dict[str, str], ...] = Field(
        (), strict=False, description="messages before the first turn, e.g. a system prompt"
    )


def _of_categories(value: Any) -> Any:
    """The prompts of lists by category: a text, several turns, or fields of `Prompt` each."""
    if not isinstance(value, dict):
        return value
    prompts = []
    for category, items in value.items():
        for number, item in enumerate(items if isinstance(items, list) else [items], start=1):
            turns = [item] if isinstance(item, str) else item
            fields = item if isinstance(item, dict) else {"turns": turns}
            prompts.append({"category": category, "id": f"{category}-{number}", **fields})
    return prompts


class PromptSuite(Settings):
    """A named list of prompts."""

    name: str
    title: str
    description: str = ""
    examples: bool = Field(True, description="offer its prompts as examples on the Generate page")
    prompts: Annotated[
        tuple[Prompt, ...], Field(strict=False, min_length=1), BeforeValidator(_of_categories)
    ]


class TreePreset(Settings):
    """A published choice tree, or one that was fitted to measured ranks."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    title: str
    description: str = ""
    candidates: ChoicePaths
    source: str = Field("", description="where it was published, or how it was fitted")
    measured: dict[str, str | int | float] | None = Field(
        None, description="of a fitted tree: target, drafter, texts, and the MAT over them"
    )

    @property
    def tree(self) -> ChoiceTree:
        return ChoiceTree(self.candidates)


@functools.cache
def targets() -> dict[str, TargetSpec]:
    """Target presets by name, the embedded one first, those with random weights last."""
    specs = [TargetSpec.parse(values, where=where) for where, values in _read_all("targets")]
    specs.sort(key=lambda spec: (spec.wheel is None, spec.random is not None, spec.name))
    return {spec.name: spec for spec in specs}


@functools.cache
def methods() -> dict[str, MethodPreset]:
    """Method presets by name, plain decoding first."""
    presets = [method_preset(values, where=where) for where, values in _read_all("methods")]
    presets.sort(key=lambda p: (p.config.decoding_type != "Autoregressive", p.name))
    return {preset.name: preset for preset in presets}


@functools.cache
def priors() -> tuple[Prior, ...]:
    """Acceptance of the shipped drafters' tokens, as measured by `scripts/fit_priors`."""
    from engine.tuning.experience import Prior

    values = json.loads((FOLDER / "priors.json").read_text())
    return tuple(Prior.parse(one, where="presets/priors.json") for one in values)


@functools.cache
def trees() -> dict[str, TreePreset]:
    """Choice tree presets by name, smallest tree first."""
    presets = [TreePreset.parse(values, where=where) for where, values in _read_all("trees")]
    presets.sort(key=lambda preset: (len(preset.candidates), preset.name))
    return {preset.name: preset for preset in presets}


@functools.cache
def suites() -> dict[str, PromptSuite]:
    """Prompt suites by name: those to measure, shortest first, then those of examples."""
    loaded = [PromptSuite.parse(values, where=where) for where, values in _read_all("prompts")]
    loaded.sort(key=lambda suite: (suite.examples, len(suite.prompts)))
    return {suite.name: suite for suite in loaded}


@functools.cache
def dialogues() -> DialogueTemplates:
    """Templates of generated training dialogues."""
    values = read_yaml(FOLDER / "dialogues.yaml")
    return DialogueTemplates.parse(values, where="presets/dialogues.yaml")


def is_trained(method: Mapping[str, Any]) -> bool:
    """Whether a method's settings name weights that are not known to be untrained."""
    names = "decoding_type", "speculative_model"
    settings = [method.get(name) for name in names]
    configs = (preset.config for preset in methods().values() if preset.untrained)
    untrained = [[getattr(config, name, None) for name in names] for config in configs]
    if any(is_trained(part) for part in method.values() if isinstance(part, Mapping)):
        return True
    return bool(settings[1]) and settings not in untrained


def resolve(name: str) -> TargetSpec:
    """A target by preset name, local path or hub id.

    Raises SourceError: it is none of them.
    """
    if preset := targets().get(name):
        return preset
    spec = TargetSpec.of_path_or_hub(name)
    if spec.path is None:
        return spec
    from engine.model.facts import with_gguf_title  # a second of importing

    return with_gguf_title(spec)


def same_model(spec: TargetSpec) -> set[str]:
    """A target's name, and the presets of the same model by hub id or GGUF name."""
    return {spec.name} | {
        name
        for name, preset in targets().items()
        if (spec.hub and preset.hub == spec.hub) or (spec.path and _has_title_of(spec, preset))
    }


def _has_title_of(spec: TargetSpec, preset: TargetSpec) -> bool:
    """Whether a file's title, without the file name in brackets, is the preset's."""
    title, *names = (
        re.sub(r"[\W_]+", "", text).lower()
        for text in (spec.title.split(" (")[0], *preset.gguf_names)
    )
    return title in names


def locate(name: str, kind: Shipped = "drafters") -> str:
    """The folder of a shipped drafter or corpus; any other path or hub id unchanged."""
    if name and Path(name).name == name and (FOLDER / kind / name).is_dir():
        return str(FOLDER / kind / name)
    return name


def method_preset(values: Mapping[str, Any], *, where: str) -> MethodPreset:
    """A method preset from plain data.

    Raises ConfigError: naming file, key and value.
    """
    config = parse_method(values.get("config", {}), where=where)
    return MethodPreset.parse({**values, "config": config}, where=where)


def _read_all(kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    files = sorted((FOLDER / kind).glob("*.yaml"))
    return [(f"presets/{kind}/{file.name}", read_yaml(file)) for file in files]
