"""A combined drafter that records which steps its model drafted."""

from __future__ import annotations

from typing import Any

from engine.drafters.base import BuildContext
from engine.drafters.combined import CombinedConfig, CombinedDrafter
from engine.drafters.method import MethodConfig
from engine.proposal import Budget, Proposal
from engine.steps import Step
from tests.engine.drafters.judges import PROMPTS, Reference, write
from tests.models import plain_greedy


class Turns(CombinedDrafter):
    """Builds both drafters of a config and keeps the number of each step that the model drafted."""

    def __init__(self, config: CombinedConfig, bench: BuildContext) -> None:
        super().__init__(config, config.retrieval.build(bench), config.model.build(bench))
        self.num_steps = 0
        self.by_model: list[int] = []
        inner = self.model.propose

        def recording(budget: Budget) -> Proposal:
            self.by_model.append(self.num_steps)
            return inner(budget)

        self.model.propose = recording  # type: ignore[method-assign]

    def propose(self, budget: Budget) -> Proposal:
        proposal = super().propose(budget)
        self.num_steps += 1
        return proposal

    def model_steps(
        self, steps: list[Step], prompt: list[int], first: int
    ) -> list[tuple[Any, ...]]:
        """(text before the step, step) of every step that the model drafted after another's."""
        before, own = [*prompt, first], []
        for step in steps:
            if step.index in self.by_model and step.index - 1 not in self.by_model:
                own.append(([*before], step))
            before += step.committed
        return own


def assert_keeps_up(
    reference: Reference, model: MethodConfig, context: BuildContext, prompt: list[int] = PROMPTS[0]
) -> None:
    """The model's drafts after steps that retrieval drafted are the reference's."""
    drafter = Turns(CombinedConfig(model=model, min_match_len=1), context)
    text = write(context.target, drafter, prompt, tokens=40)
    assert text.output == plain_greedy(context.target, prompt, 40)
    own = drafter.model_steps(text.steps, prompt, text.output[0])
    assert own
    for before, step in own:
        assert list(step.tokens[1:]) == reference(before)[: step.num_drafted]
