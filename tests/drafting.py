"""Drafts as set, for tests on tiny models.

No draft pays on them, and what would depends on what else this machine does.
"""

from __future__ import annotations

import pytest

from engine.drafters.base import BuildContext, Drafter
from engine.drafters.method import MethodConfig

MODULES = ("host.models", "experiments.measurement")
"""Those of `playground` that build drafters."""


def as_set(config: MethodConfig, context: BuildContext, store: object = None) -> Drafter:
    """Stands in for `build_drafter`."""
    return config.build(context)


def draft_as_set(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone."""
    for module in MODULES:
        patch.setattr(f"playground.{module}.build_drafter", as_set)
