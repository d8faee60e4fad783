"""The methods that the Tree page tunes, and how a tree or a length goes into their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import presets
from engine.drafters.medusa import MedusaConfig, count_heads
from engine.drafters.method import MethodConfig
from engine.drafters.redrafter import ReDrafterConfig
from engine.drafters.token_recycling import TokenRecyclingConfig
from engine.errors import ConfigError, SourceError
from engine.tree import ChoiceTree, Path
from playground.experiments.compare.links import slot_of
from playground.host.catalog import Catalog
from playground.trees.files import read_paths

Kind = Literal["tree", "dynamic", "chain"]
"""A choice tree of the user's; a tree that the drafter grows; tokens in a row."""
DYNAMIC_FIELDS = (
    "max_total_draft_tokens",
    "dynamic_tree_max_topK",
    "max_draft_len",
    "max_non_leaves_per_layer",
)
LONGEST_CHAIN = 32


@dataclass(frozen=True, slots=True)
class TreeMethod:
    """A method of the catalog as the page tunes it.

    Attributes:
        key: the catalog's.
        field: the setting that holds the choice tree or the draft length; "" for a dynamic tree.
    """

    key: str
    title: str
    config: MethodConfig
    kind: Kind
    field: str

    @property
    def tree(self) -> ChoiceTree:
        """What the method drafts as it is set; one node for a tree that it grows itself."""
        if self.kind == "tree":
            return ChoiceTree(tuple(getattr(self.config, self.field)))
        return ChoiceTree.chain(self.length)

    @property
    def length(self) -> int:
        """The draft length as it is set."""
        if self.kind != "chain":
            return 1
        length = getattr(self.config, self.field) or 1
        return cast(int, length - 1 if isinstance(self.config, ReDrafterConfig) else length)

    def with_tree(self, paths: tuple[Path, ...]) -> MethodConfig:
        """The method's settings with another tree, or with a chain as long as the tree is deep.

        Raises:
            ConfigError: the settings refuse it.
        """
        if self.kind == "tree":
            return self.config.replace(**{self.field: paths})
        length = ChoiceTree(paths).depth
        if isinstance(self.config, ReDrafterConfig):
            return self.config.replace(beam_width=1, beam_length=length + 1)
        return self.config.replace(**{self.field: length}) if self.field else self.config

    def changed(self, settings: Mapping[str, int | None] | None) -> dict[str, Any]:
        """Settings of its dynamic tree as the page sent them.

        Raises:
            ConfigError: it grows no tree, or a setting is none of the tree's.
        """
        if self.kind != "dynamic" or settings is None:
            raise ConfigError(f"{self.title} grows no tree of its own; there is no size to change.")
        for name in settings:
            if name not in DYNAMIC_FIELDS:
                allowed = ", ".join(DYNAMIC_FIELDS)
                raise ConfigError(f"A dynamic tree's settings are {allowed}, got {name!r:.80}.")
        return dict(settings)

    def limits(self, used: MethodConfig | None = None) -> dict[str, Any] | None:
        """How deep and wide the drafter can go, as far as that is known; None = it is not.

        Args:
            used: the settings with the weights that will be used; None = the method's own.
        """
        config = used or self.config
        if isinstance(config, MedusaConfig) and (heads := _num_heads(config)):
            return {"depth": heads, "ranks": None, "what": f"{self.title} with {heads} heads"}
        if isinstance(config, TokenRecyclingConfig):
            ranks, what = config.matrix_top_k, f"{self.title} with matrix_top_k"
            return {"depth": None, "ranks": ranks, "what": f"{what} = {ranks}"}
        if self.kind == "chain":
            return {"depth": self._longest(), "ranks": 1, "what": f"{self.title} (a chain)"}
        return None

    def _longest(self) -> int:
        for mark in type(self.config).model_fields[self.field].metadata:
            if isinstance(most := getattr(mark, "le", None), int):
                chain = most - 1 if isinstance(self.config, ReDrafterConfig) else most
                return min(LONGEST_CHAIN, chain)
        return LONGEST_CHAIN

    def row(self) -> dict[str, Any]:
        """What the page's menu needs of it; plain JSON."""
        return {
            "key": self.key,
            "title": self.title,
            "kind": self.kind,
            "tree": self.tree.as_lists(),
            "length": self.length,
            "limits": self.limits(),
            "settings": self.settings(),
        }

    def settings(self) -> dict[str, Any]:
        """The size of its dynamic tree as it is set; empty for other kinds."""
        if self.kind != "dynamic":
            return {}
        return {name: getattr(self.config, name) for name in DYNAMIC_FIELDS}


def _num_heads(config: MedusaConfig) -> int | None:
    if config.num_medusa_heads or config.speculative_model is None:
        return config.num_medusa_heads
    try:
        return count_heads(presets.locate(config.speculative_model)) or None
    except SourceError:
        return None  # whoever loads the heads is told what is wrong with them


def tree_method(catalog: Catalog, key: object) -> TreeMethod:
    """A method of the catalog that has something to tune here.

    Raises:
        ConfigError: there is no such method, or it drafts neither trees nor chains.
    """
    method = catalog.method(key)
    found = _kind_of(method.config)
    if found is None:
        raise ConfigError(
            f"{method.title} has no tree and no draft length. Choose another method to tune."
        )
    return TreeMethod(str(key), method.title, method.config, *found)


def tree_methods(catalog: Catalog, target: str) -> list[TreeMethod]:
    """Every method of a target that has something to tune here."""
    found = []
    for title, key in catalog.method_choices(target):
        config = catalog.method(key).config
        kind = _kind_of(config)
        if kind is not None:
            found.append(TreeMethod(key, title, config, *kind))
    return found


def _kind_of(config: MethodConfig) -> tuple[Kind, str] | None:
    fields = type(config).model_fields
    if getattr(config, "use_dynamic_tree", False):
        return "dynamic", ""
    for name in fields:
        if name.endswith("_choices"):
            return "tree", name
    if isinstance(config, ReDrafterConfig):
        return "chain", "beam_length"
    return ("chain", "max_draft_len") if "max_draft_len" in fields else None


@dataclass(frozen=True, slots=True)
class Used:
    """A method as other pages take it.

    Attributes:
        settings: those that differ from the method as it is on offer.
        form: the same as the Compare page's form holds it.
    """

    target: str
    method: str
    settings: dict[str, Any]
    form: dict[str, Any]


def read_used(catalog: Catalog, raw: Mapping[str, Any]) -> Used:
    """What the page sent with "use".

    Raises:
        ConfigError: the method is not offered for the target, or refuses the tree.
    """
    target = catalog.target(raw.get("target")).name
    method = tree_method(catalog, raw.get("method"))
    if method.kind == "dynamic":
        config = method.config.replace(**method.changed(raw.get("settings")))
    else:
        config = method.with_tree(read_paths(raw.get("tree")).paths)
    weights = raw.get("weights")
    if isinstance(weights, str) and getattr(config, "speculative_model", "") is None:
        config = config.replace(speculative_model=weights)
    slot = slot_of(catalog, config, target)
    own = catalog.method(slot.method).config.model_dump()
    changed = {name: value for name, value in config.model_dump().items() if value != own[name]}
    return Used(target, slot.method, changed, slot.form)
