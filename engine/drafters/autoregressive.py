"""Plain decoding: no drafts, one token per step. The baseline of every comparison."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.drafters.base import BuildContext, Drafter, Start, root_only
from engine.drafters.method import MethodConfig
from engine.proposal import Outcome, Proposal


class AutoregressiveConfig(MethodConfig):
    """Plain decoding has no settings."""

    title: ClassVar[str] = "Autoregressive"
    summary: ClassVar[str] = "Plain decoding: the target alone, one token per forward."

    decoding_type: Literal["Autoregressive"] = "Autoregressive"
    adaptive: Literal[False] = Field(False, description="nothing is drafted, so nothing adapts")

    def build(self, context: BuildContext) -> AutoregressiveDrafter:
        return AutoregressiveDrafter(context)


class AutoregressiveDrafter(Drafter):
    """Proposes nothing but the root."""

    def __init__(self, context: BuildContext) -> None:
        self._device = context.target.device
        self._root = 0

    def start(self, start: Start) -> None:
        self._root = start.root

    def propose(self, max_depth: int) -> Proposal:
        return root_only(self._root, self._device)

    def observe(self, outcome: Outcome) -> None:
        self._root = outcome.next_root
