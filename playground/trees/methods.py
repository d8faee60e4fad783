"""The methods that the Tree page tunes, and their settings for a tree or a draft length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.drafters.method import ChoiceLimits, MethodConfig
from engine.errors import ConfigError
from engine.tree import ChoiceTree
from playground.host.catalog import Catalog
from playground.host.menu import GROUPS, Choices

Kind = Literal["tree", "dynamic", "chain"]
"""A choice tree that the user edits, a tree that the drafter builds, or a chain."""
DYNAMIC_FIELDS = (
    "max_total_draft_tokens",
    "dynamic_tree_max_topK",
    "max_draft_len",
    "max_non_leaves_per_layer",
)
LONGEST_CHAIN = 32


@dataclass(frozen=True, slots=True)
class TreeMethod:
    """A method that the page tunes on a target; `key` and `locate` are the catalog's."""

    key: str
    title: str
    config: MethodConfig
    target: str
    locate: Callable[[str], str]

    @property
    def kind(self) -> Kind | None:
        """What can be tuned; None if nothing."""
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
        """The tree of the method's settings; a single node if the drafter builds its own."""
        field = self.config.choices_field()
        if self.kind == "tree" and field:
            return ChoiceTree(getattr(self.config, field))
        return ChoiceTree.chain((self.kind == "chain" and self.config.chain_len) or 1)

    def edited(self, tree: object, settings: Mapping[str, int | None] | None) -> MethodConfig:
        """The method with another tree, or with another size of its dynamic tree.

        Raises ConfigError: the method refuses the tree, or a setting is not one of the tree's.
        """
        if self.kind != "dynamic":
            return self.config.with_tree(ChoiceTree.parse(tree, form="candidates"))
        for name in settings or {}:
            if name not in DYNAMIC_FIELDS:
                allowed = ", ".join(DYNAMIC_FIELDS)
                raise ConfigError(f"A dynamic tree's settings are {allowed}, got {name!r:.80}.")
        return self.config.replace(**(settings or {}))

    def limits(self) -> ChoiceLimits:
        """The largest depth and width of the drafter, if known; `what` names the drafter."""
        if self.kind == "chain":
            depth = next(n for n in range(LONGEST_CHAIN, 0, -1) if self._takes_chain(n))
            return ChoiceLimits(depth, 1, f"{self.title} (a chain)")
        limits = self.config.choice_limits(self.locate)
        return replace(limits, what=f"{self.title} with {limits.what}") if limits.what else limits

    def row(self, label: str) -> dict[str, Any]:
        """The method in the page's menu; plain JSON. Its label there ends with its group."""
        sizes = DYNAMIC_FIELDS if self.kind == "dynamic" else ()
        title, _, group = label.rpartition(" · ")
        return {
            "key": self.key,
            "title": title,
            "group": GROUPS[group],
            "kind": self.kind,
            "tree": self.tree.as_lists(),
            "settings": {name: getattr(self.config, name) for name in sizes},
        }


def tree_method(catalog: Catalog, key: object, target: object) -> TreeMethod:
    """A method of the catalog that can be tuned on the Tree page.

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


def method_rows(catalog: Catalog, target: str, choices: Choices) -> list[dict[str, Any]]:
    """Rows of the methods of a target's menu that can be tuned on the Tree page."""
    rows = []
    for label, key in choices:
        with suppress(ConfigError):  # it drafts neither trees nor chains
            rows.append(tree_method(catalog, key, target).row(label))
    return rows
