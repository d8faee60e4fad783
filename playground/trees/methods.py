"""The methods that the Tree page tunes, and how a tree or a length goes into their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import presets
from engine.config import Settings
from engine.drafters.method import ChoiceLimits, MethodConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree
from playground.experiments.compare.form import slot_of
from playground.host.catalog import Catalog
from playground.host.menu import GROUPS, Choices
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
    """A method of the catalog as the page tunes it on a target; `key` and `locate` are its.

    Attributes:
        label: as the menu has it, its group at the end.
    """

    key: str
    title: str
    config: MethodConfig
    target: str = ""
    locate: Callable[[str], str] = presets.locate
    label: str = ""

    @property
    def kind(self) -> Kind | None:
        """What there is to tune; None where there is nothing."""
        if getattr(self.config, "use_dynamic_tree", False):
            return "dynamic"
        if self.config.choices_field():
            return "tree"
        return "chain" if self._takes_chain(1) else None

    def _takes_chain(self, length: int) -> bool:
        try:
            self.config.with_chain(length)
        except ConfigError:
            return False
        return True

    @property
    def tree(self) -> ChoiceTree:
        """What the method drafts as it is set; one node for a tree that it grows itself."""
        field = self.config.choices_field()
        if self.kind == "tree" and field:
            return ChoiceTree(getattr(self.config, field))
        return ChoiceTree.chain((self.kind == "chain" and self.config.chain_len) or 1)

    def with_settings(self, settings: Mapping[str, int | None] | None) -> MethodConfig:
        """The method with another size of its dynamic tree.

        Raises ConfigError: it grows no tree, or a setting is none of the tree's.
        """
        if self.kind != "dynamic" or settings is None:
            raise ConfigError(f"{self.title} drafts no dynamic tree, so it has no size to change.")
        for name in settings:
            if name not in DYNAMIC_FIELDS:
                allowed = ", ".join(DYNAMIC_FIELDS)
                raise ConfigError(f"A dynamic tree's settings are {allowed}, got {name!r:.80}.")
        return self.config.replace(**settings)

    def limits(self) -> ChoiceLimits:
        """How deep and wide the drafter can go, as far as that is known; `what` names it."""
        if self.kind == "chain":
            depth = next(n for n in range(LONGEST_CHAIN, 0, -1) if self._takes_chain(n))
            return ChoiceLimits(depth, 1, f"{self.title} (a chain)")
        limits = self.config.choice_limits(self.locate)
        return replace(limits, what=f"{self.title} with {limits.what}") if limits.what else limits

    def limits_row(self) -> dict[str, Any] | None:
        """The limits as plain JSON; None where none are known."""
        limits = self.limits()
        return asdict(limits) if limits.what else None

    def row(self) -> dict[str, Any]:
        """What the page's menu needs of it; plain JSON."""
        sizes = DYNAMIC_FIELDS if self.kind == "dynamic" else ()
        title, _, group = self.label.rpartition(" · ")
        return {
            "key": self.key,
            "title": title,
            "group": GROUPS[group],
            "kind": self.kind,
            "tree": self.tree.as_lists(),
            "limits": self.limits_row(),
            "settings": {name: getattr(self.config, name) for name in sizes},
        }


def tree_method(catalog: Catalog, key: object, target: object) -> TreeMethod:
    """A method of the catalog that has something to tune here.

    Raises ConfigError: no such method or target, or it drafts neither trees nor chains.
    """
    entry = catalog.method(key)
    method = TreeMethod(
        str(key), entry.title, entry.config, catalog.target(target).name, catalog.locate
    )
    if method.kind is None:
        raise ConfigError(
            f"{method.title} has no tree and no draft length. Choose another method to tune."
        )
    return method


def tree_methods(catalog: Catalog, target: str, choices: Choices) -> list[TreeMethod]:
    """Of what a menu offers for a target, all that has something to tune here."""
    methods = (
        TreeMethod(key, method.title, method.config, target, catalog.locate, label)
        for label, key in choices
        for method in (catalog.method(key),)
    )
    return [method for method in methods if method.kind is not None]


class Use(Settings):
    """A tree, or the size of a dynamic one, that the page sends to another page."""

    where: str = ""
    target: str | None = None
    method: str | None = None
    tree: list[Any] | None = None
    settings: dict[str, int | None] | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A method as other pages take it.

    Attributes:
        settings: those that differ from the method as it is on offer.
        form: the same as the Compare page's form holds it.
    """

    target: str
    method: str
    settings: dict[str, Any]
    form: dict[str, Any]


def read_tree_choice(catalog: Catalog, raw: Mapping[str, Any]) -> TreeChoice:
    """The settings that the page sent to another page.

    Raises ConfigError: the method is not offered for the target, or refuses the tree.
    """
    use = Use.parse(raw, where="the tree page")
    method = tree_method(catalog, use.method, use.target)
    if method.kind == "dynamic":
        config = method.with_settings(use.settings)
    else:
        config = method.config.with_tree(read_paths(use.tree))
    if use.weights and getattr(config, "speculative_model", "") is None:
        config = config.replace(speculative_model=use.weights)
    key, form = slot_of(catalog, config, method.target)
    own = catalog.method(key).config.model_dump()
    changed = {name: value for name, value in config.model_dump().items() if value != own[name]}
    return TreeChoice(method.target, key, changed, form)
