"""A combined drafter that notes whose turn each step was."""

from __future__ import annotations

from typing import Any

from engine.drafters.base import BuildContext
from engine.drafters.combined import CombinedConfig, CombinedDrafter
from engine.proposal import Proposal
from engine.steps import Step


class Turns(CombinedDrafter):
    """Builds both drafters of a config and keeps the number of each step that the model drafted."""

    def __init__(self, config: CombinedConfig, bench: BuildContext) -> None:
        super().__init__(config, config.retrieval.build(bench), config.model.build(bench))
        self.num_steps = 0
        self.by_model: list[int] = []
        inner = self.model.propose

        def noting(max_depth: int) -> Proposal:
            self.by_model.append(self.num_steps)
            return inner(max_depth)

        self.model.propose = noting  # type: ignore[method-assign]

    def propose(self, max_depth: int) -> Proposal:
        proposal = super().propose(max_depth)
        self.num_steps += 1
        return proposal

    def model_steps(
        self, steps: list[Step], prompt: list[int], first: int
    ) -> list[tuple[Any, ...]]:
        """(text before the step, step) of every step that the model drafted after another's."""
        seen, found = [*prompt, first], []
        for step in steps:
            if step.index in self.by_model and step.index - 1 not in self.by_model:
                found.append(([*seen], step))
            seen += step.committed
        return found
