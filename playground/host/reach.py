"""Weights and corpora that the page may name: the shipped ones, and those allowed at the start.

A path or hub id comes from anybody who sends a form or an imported run. One that is not allowed is
refused with the same sentence whether it exists or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import presets
from engine.errors import SourceError
from engine.model.sources import Shipped, TargetSpec
from playground.host.catalog import Catalog

SHIPPED = tuple(presets.FOLDER / kind for kind in get_args(Shipped))


def catalog_within(
    catalog: Catalog, targets: Sequence[str], opened: Sequence[str], *, may_open: bool = False
) -> Catalog:
    """The catalog with further targets, whose settings can name no other files.

    Args:
        targets: presets, local folders, .gguf files or hub ids.
        opened: folders with all their contents, files, or hub ids, which settings may name.
        may_open: whether the page may add targets by their place.

    Raises SourceError: a target is none of these.
    """
    specs = {name: presets.resolve(name) for name in targets}
    configs = [preset.config.model_dump() for preset in catalog.presets.values()]
    named = [config.get(key) for config in configs for key in ("speculative_model", "datastore")]
    reach = Reach([*targets, *opened, *(name for name in named if name)])
    within = dataclasses.replace(
        catalog,
        targets={**catalog.targets, **specs},
        presets={**catalog.presets},
        resolve=reach.resolve,
        locate=reach.locate,
        may_open=may_open,
        admit=reach.opened.append,
    )
    within.add_drafters()
    return within


@dataclass(frozen=True, slots=True)
class Reach:
    """The hub ids, files and folders that settings may name besides presets."""

    opened: list[str] = field(default_factory=list)

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
            is_open = name in presets.targets() or name in self.opened
            is_open = is_open or presets.locate(name, kind) != name or self._is_inside(name)
        except (OSError, ValueError, RuntimeError):  # no path at all: a NUL, too long, ~nobody
            is_open = False
        if not is_open:
            raise SourceError(
                f"{name[:80]!r} is not among the allowed paths. Start the server with "
                "--allow-path, which takes a folder, a file or a hub id."
            )

    def _is_inside(self, name: str) -> bool:
        """Whether it exists in an allowed folder; links are followed first."""
        path = Path(name).expanduser().resolve()
        folders = [*SHIPPED, *(Path(one).expanduser() for one in self.opened)]
        inside = any(path.is_relative_to(folder.resolve()) for folder in folders)
        return inside and path.exists()
