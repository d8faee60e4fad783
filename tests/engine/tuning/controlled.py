"""The controller on a machine whose times are known, and a drafter that knows the text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.drafters.base import Drafter, Start
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from engine.steps import Step
from engine.tree import MAX_NODES, ChoiceTree
from engine.tuning.controller import ControlledDrafter, ControlledSession
from engine.tuning.experience import Experience
from engine.tuning.latency import LatencyCurve
from engine.tuning.turn import DraftPlan, Turn
from tests.engine.drafters.judges import write
from tests.models import plain_greedy, tiny_target
from tests.one_text import OneText

PROMPT = [10, 20, 30, 40]
FLAT = LatencyCurve((1, 64), (10.0, 10.0))
STEEP = LatencyCurve((1, 64), (10.0, 640.0))


class Oracle(OneText):
    """Drafts the known text; wrong from the token on at which `right(position)` is False.

    Attributes:
        num_started, num_proposed: how often it was started, and asked to draft.
    """

    draft_ms = 0.2
    start_ms = 0.0

    def __init__(
        self, target: Target, output: Sequence[int], right: Callable[[int], bool], depth: int = 6
    ) -> None:
        self._output, self._right, self._vocab = output, right, target.vocab_size
        self.tree = ChoiceTree.chain(depth)
        self.num_started = self.num_proposed = 0

    def begin(self) -> None:
        self._has_read = False

    def read(self) -> None:
        self.num_started, self._has_read = self.num_started + (not self._has_read), True

    def propose(self, budget: Budget) -> Proposal:
        self.num_proposed += 1
        at = len(self.text) - self.log.num_prompt
        assert self.text[-1] == self._output[at - 1], "it was not told of every step"
        tokens = [self.text[-1]]
        for position in range(at, at + min(budget.depth, self.tree.depth)):
            true = self._output[min(position, len(self._output) - 1)]
            tokens.append(true if self._right(position) else (true + 1) % self._vocab)
        shape = ChoiceTree.chain(len(tokens) - 1).shape
        return Proposal(torch.tensor(tokens), shape)


class OnAMachine(ControlledDrafter):
    """A draft takes `draft_ms`, a text's first one `start_ms` more, a step what `machine` says
    times `pace(step)`; nothing else takes any time."""

    def __init__(
        self,
        make: Callable[[Target, list[int]], Any],
        machine: LatencyCurve,
        *,
        curve: LatencyCurve | None = None,
        pace: Callable[[int], float] = lambda step: 1.0,
        prompt: list[int] = PROMPT,
    ) -> None:
        """`make`: the drafter of a target, and of the text that this writes after `prompt`."""
        self._target, self._prompt = tiny_target(eos_token_id=None), prompt
        self._output = plain_greedy(self._target, prompt, 250)
        self.oracle = make(self._target, self._output)
        experience = Experience.new(curve or machine)
        super().__init__(self.oracle, self._target, experience, clock=self._now)
        self._machine, self._pace = machine, pace
        self.verify_ms, self.plain_ms, self.step = 0.0, 0.0, 0

    def write(self, tokens: int = 200) -> list[Step]:
        """The steps of a text, which is plain decoding's."""
        text = write(self._target, self, self._prompt, tokens=tokens)
        assert text.output == self._output[:tokens]
        return text.steps

    def _now(self) -> float:
        oracle = self.oracle
        drafts_ms = oracle.draft_ms * oracle.num_proposed + oracle.start_ms * oracle.num_started
        return (self.verify_ms + drafts_ms) / 1000

    def open(self, start: Start) -> MachineSession:
        self.opened = MachineSession(self, start)
        return self.opened

    def verified(self, outcome: Outcome) -> None:
        """A step was made."""
        self.num_rows = outcome.proposal.num_rows
        pace = self._pace(self.step)
        self.verify_ms += self._machine.at(outcome.proposal.num_rows) * pace
        self.plain_ms += self._machine.at(1) * pace * len(outcome.committed)
        self.step += 1

    @property
    def lost_ms(self) -> float:
        """Against plain decoding of the same tokens on the same machine."""
        return 1000 * self._now() - self.plain_ms


class MachineSession(ControlledSession):
    drafter: OnAMachine

    def observe(self, outcome: Outcome) -> None:
        self.drafter.verified(outcome)
        super().observe(outcome)


class RandomSession(ControlledSession):
    drafter: AtRandom

    def _reason_for_plain_step(self, budget: Budget) -> str:
        return "the context ends here" if budget.depth < 1 else ""

    def _decide(self, turn: Turn, budget: Budget) -> DraftPlan | str:
        dice = self.drafter.dice
        if dice.random() < 0.4:
            return "plain, by the dice"
        kind, depth = dice.choice(turn.kinds), min(budget.depth, dice.randint(1, 8))
        width = 1 if kind == "chain" and len(turn.kinds) > 1 else MAX_NODES
        return DraftPlan(turn, kind, Budget(depth, width), math.inf, None)

    def _best_size(
        self, proposal: Proposal, path_probs: list[float], order: list[int], max_loss_ms: float
    ) -> tuple[int, float, float]:
        dice = self.drafter.dice
        count = dice.choice([len(order), dice.randint(1, len(order))])
        return count, sum(path_probs[node] for node in order[:count]), 1.0


class AtRandom(ControlledDrafter):
    """Decides by dice: pauses, chains and trees of any size, whatever they cost."""

    session = RandomSession
    dice: random.Random

    @classmethod
    def around(cls, drafter: Drafter, target: Target, seed: int = 0) -> AtRandom:
        inner = drafter.inner if isinstance(drafter, ControlledDrafter) else drafter
        made = cls(inner, target, Experience.new(FLAT))
        made.dice = random.Random(seed)
        return made
