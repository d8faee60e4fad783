"""Plain decoding: no drafts, one token per step. The baseline of every comparison."""

from __future__ import annotations

from typing import Literal

from engine.drafters.base import BuildContext, Drafter, DraftSession, Traits, root_only
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


class AutoregressiveSession(DraftSession["AutoregressiveDrafter"]):
    def propose(self, budget: Budget) -> Proposal:
        return root_only(self.root, self.drafter.device)


class AutoregressiveDrafter(Drafter):
    session = AutoregressiveSession
    traits = Traits(drafts=False)

    def __init__(self, context: BuildContext) -> None:
        self.device = context.target.device
