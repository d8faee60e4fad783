"""Puts a tree of the Tree page into a method's settings, as the forms of other pages hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from playground.experiments.compare.links import slot_of
from playground.host.catalog import Catalog
from playground.trees.editor_methods import tree_method
from playground.trees.editor_trees import read_paths


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
