"""What goes to another engine and comes from it: files, commands, and what is lost on the way.

An engine's file holds one function per method that it takes. The function writes the engine's
settings through a `Sheet`, which notes every setting of ours that was used; whatever is set and was
not used becomes a warning, so nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree

Verdict = Literal["exact", "with losses", "not taken"]
ReadYaml = Callable[[str], Any]
"""Plain data of a YAML text; who calls passes it in, since the engine package knows no YAML."""
NO_MODEL = "DRAFTER"
"""Stands for the drafter's weights where the method names none."""


@dataclass(frozen=True, slots=True)
class File:
    """A text to save or to paste; `language` is for people's editors."""

    name: str
    text: str
    language: str = "text"


@dataclass(frozen=True, slots=True)
class Context:
    """What an export needs besides the method.

    Attributes:
        target: the target as the engine can load it: hub id or path.
        version: release of the engine, e.g. (0, 20, 2).
        resolve: what `speculative_model` names → what the engine can load.
        notes: remarks on the target, e.g. that its weights are a GGUF file.
    """

    target: str
    version: tuple[int, ...]
    resolve: Callable[[str], str] = str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """A method as an engine takes it.

    Attributes:
        files: what to save; empty if the engine cannot take the method.
        notes: what to know; nothing is lost by it.
        warnings: one sentence per loss against the method here.
        refusal: why the engine cannot take the method; empty if it does.
        nearest: what comes nearest then.
    """

    engine: str
    version: str
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    nearest: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.refusal:
            return "not taken"
        return "with losses" if self.warnings else "exact"


@dataclass(frozen=True, slots=True)
class Imported:
    """An engine's config read as a method here.

    Attributes:
        target: the model that it served, if the text said so.
        notes: how it was read where that is not plain.
        ignored: keys that the engine knows and that have no meaning here.
        unknown: keys that the engine does not know, with the nearest that it does.
    """

    config: MethodConfig
    target: str | None = None
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class NotTakenError(ConfigError):
    """The engine cannot take the method; `nearest` says what comes nearest."""

    def __init__(self, sentence: str, nearest: str = "") -> None:
        super().__init__(sentence)
        self.nearest = nearest


Writer = Callable[[Any, "Sheet"], tuple[File, ...]]
"""Writes one method's config as files."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine.

    Attributes:
        versions: releases that differ, newest first; a newer one counts as the first.
        trees: what it takes of choice trees, in a few words.
        writers: per decoding type, what writes it; a type that is missing is not taken.
        refused: per decoding type, why not and what comes nearest.
        read: its config as a method here.
    """

    name: str
    title: str
    versions: tuple[tuple[str, str], ...]
    trees: str
    writers: Mapping[str, Writer]
    refused: Mapping[str, tuple[str, str]]
    read: Callable[[str, ReadYaml], Imported]

    @property
    def newest(self) -> str:
        return self.versions[0][0]


@dataclass
class Sheet:
    """Collects what an export says while a writer makes it."""

    engine: Engine
    config: MethodConfig
    context: Context
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    models: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def at_least(self, *version: int) -> bool:
        """Whether the engine's release is this one or newer."""
        return self.context.version >= version

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def warn(self, sentence: str, *covers: str) -> None:
        """A loss; settings in `covers` need no warning of their own any more."""
        self.warnings.append(sentence)
        self.used.update(covers)

    def take(self, name: str) -> Any:
        """A setting's value, from now on counted as used."""
        self.used.add(name)
        return getattr(self.config, name)

    def explain(self, name: str, reason: str) -> None:
        """What to add to the warning if this setting is set and stays unused."""
        self.reasons[name] = reason

    def model(self) -> str:
        """The drafter's weights as the engine can load them."""
        named = self.take("speculative_model")
        if named is None:
            self.warn(
                f"speculative_model is not set. Put the drafter's path in place of {NO_MODEL}."
            )
            return NO_MODEL
        self.models.append(self.context.resolve(named))
        return self.models[-1]

    def inner(self, config: MethodConfig) -> Sheet:
        """A sheet for a config inside this one, with the same notes and warnings."""
        return Sheet(
            self.engine, config, self.context, self.notes, self.warnings, models=self.models
        )

    def finish(self, prefix: str = "") -> None:
        """Warn of every setting that matters, differs from its default and was not used."""
        for name in live_fields(self.config) - self.used:
            value = getattr(self.config, name)
            if value == type(self.config).model_fields[name].default:
                continue
            reason = self.reasons.get(name, "")
            self.warnings.append(
                f"{prefix}{name}={_shown(value)} has no counterpart in {self.engine.title} and is "
                f"dropped.{' ' + reason if reason else ''}"
            )


def export(engine: Engine, config: MethodConfig, context: Context, version: str) -> Export:
    """A method as an engine takes it, or why it does not."""
    sheet = Sheet(engine, config, context, list(context.notes))
    sheet.explain("adaptive", "It drafts the same length at every step.")
    try:
        writer = engine.writers.get(config.decoding_type)
        if writer is None:
            raise NotTakenError(*_refusal(engine, config))
        files = writer(config, sheet)
    except NotTakenError as error:
        return Export(engine.name, version, refusal=str(error), nearest=error.nearest)
    sheet.finish()
    return Export(engine.name, version, files, tuple(sheet.notes), tuple(sheet.warnings))


def _refusal(engine: Engine, config: MethodConfig) -> tuple[str, str]:
    general = (f"{engine.title} has no method like {type(config).title}.", "")
    return engine.refused.get(config.decoding_type, general)


def live_fields(config: MethodConfig) -> set[str]:
    """Settings that have an effect under the other settings."""
    names = set(type(config).model_fields) - {"decoding_type"}
    dynamic = {"dynamic_tree_max_topK", "max_total_draft_tokens", "max_non_leaves_per_layer"}

    def given(name: str) -> Any:
        return getattr(config, name, None)

    match config.decoding_type:
        case "Eagle":
            names -= {"eagle_choices"} if given("use_dynamic_tree") else {*dynamic, "max_draft_len"}
        case "Eagle3" if not given("use_dynamic_tree"):
            names -= dynamic
        case "Medusa" if given("acceptance") == "lossless":
            names -= {"posterior_threshold", "posterior_alpha"}
        case "NGram" if given("lookup") != "pool":
            names -= {"is_keep_all", "is_use_oldest", "is_public_pool"}
        case "Suffix":
            tree = {"max_total_draft_tokens", "mix_contexts"}
            names -= set() if given("use_tree_spec") else tree
            mixes = given("mix_contexts") and given("use_tree_spec")
            names -= {"max_spec_factor"} if mixes else {"escape", "text_weight"}
            names -= set() if given("use_global_pool") else {"global_pool_size"}
        case "Combined" if not given("merge"):
            names -= {"max_total_draft_tokens"}
        case "MTP" if not given("use_relaxed_acceptance_for_thinking"):
            names -= {"relaxed_topk", "relaxed_delta"}
            names -= {"begin_thinking_phase_token", "end_thinking_phase_token"}
    return names


def same_effect(a: MethodConfig, b: MethodConfig) -> bool:
    """Whether two configs draft and accept alike: settings without effect may differ."""
    if type(a) is not type(b) or live_fields(a) != live_fields(b):
        return False
    return all(_alike(getattr(a, name), getattr(b, name)) for name in live_fields(a))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, MethodConfig) and isinstance(b, MethodConfig):
        return same_effect(a, b)
    return bool(a == b)


DYNAMIC = (
    "use_dynamic_tree",
    "dynamic_tree_max_topK",
    "max_total_draft_tokens",
    "max_non_leaves_per_layer",
)


def chain_of_levels(sheet: Sheet, who: str) -> int:
    """Length of the chain that stands for a dynamic tree, with a warning."""
    levels = int(sheet.take("max_draft_len"))
    nodes = getattr(sheet.config, "max_total_draft_tokens", 0)
    sheet.warn(
        f"{who} a chain: the dynamic tree of {nodes} nodes ({', '.join(DYNAMIC)}) is dropped and "
        f"only the likeliest token of each of its {levels} levels is drafted; measured MAT falls.",
        *DYNAMIC,
    )
    return levels


def chain_or_warn(tree: ChoiceTree, sheet: Sheet, who: str) -> int:
    """Length of the chain that stands for a tree; warns if the tree is more than that chain."""
    if tree == ChoiceTree.chain(tree.depth):
        return tree.depth
    sheet.warn(
        f"{who} as a chain: the tree of {len(tree)} nodes is dropped and only the first choice of "
        f"each of its {tree.depth} depths is drafted; measured MAT falls."
    )
    return tree.depth


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
