"""Plain decoding: no drafts, one token per step. The baseline of every comparison."""

from __future__ import annotations

from typing import Literal

from engine.drafters.base import BuildContext, Drafter, root_only
from engine.drafters.method import MethodConfig
from engine.proposal import Budget, Proposal


class AutoregressiveConfig(MethodConfig):
    """Plain decoding has no settings."""

    title = "Plain decoding"
    summary = "The target alone, one token per forward."

    decoding_type: Literal["Autoregressive"] = "Autoregressive"

    def live_settings(self) -> set[str]:
        return set()

    def build(self, context: BuildContext) -> AutoregressiveDrafter:
        return AutoregressiveDrafter(context)


class AutoregressiveDrafter(Drafter):
    drafts = False

    def __init__(self, context: BuildContext) -> None:
        self._device = context.target.device

    def propose(self, budget: Budget) -> Proposal:
        return root_only(self.text[-1], self._device)
