"""A made-up drafter that is right as often as it is told: what would such a drafter gain?

It knows the truth: before the run is timed, the target writes its greedy answer alone, once per
prompt. A drafted token is then the true one with a set probability, else another one. What it
drafts is verified like any draft, so the text is the target's own; only the drafter is made up.

    rates 0.8 0.5    drafts of 2    MAT 1 + 0.8 + 0.8 · 0.5 = 2.2

When sampling, the truth is not known beforehand: it drafts along the greedy answer, the text keeps
the target's law, and acceptance stays below the rates.
"""

from __future__ import annotations

import random
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from engine.config import setting
from engine.constraint import Constraint, constraint_of
from engine.drafters.base import Ask, BuildContext, Drafter, Start
from engine.drafters.method import MethodConfig, draft_len
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.tree import TreeShape

MAX_ANSWERS = 64
"""Answers that are kept of a target."""
Question = tuple[tuple[int, ...], bool, str, str]
Answers = OrderedDict[Question, list[int]]
_answers: weakref.WeakKeyDictionary[Target, Answers] = weakref.WeakKeyDictionary()
"""They outlive the drafter: another rate is another drafter, and asks for the same answers."""


def _question(ask: Ask) -> Question:
    """What the greedy answer depends on."""
    sampling = ask.sampling
    told = ask.limits.ignore_eos, sampling.structured_output, sampling.grammar
    return (tuple(ask.prompt_ids), *told)


class SyntheticConfig(MethodConfig):
    """Settings of a made-up drafter."""

    title: ClassVar[str] = "Synthetic (made up)"
    summary: ClassVar[str] = (
        "Made up: drafts the target's own answer, right with the probability you set. Shows what a "
        "drafter that good would gain; no such drafter exists."
    )

    main_settings: ClassVar[str] = "max_draft_len acceptance_rate draft_ms"

    decoding_type: Literal["Synthetic"] = "Synthetic"
    adaptive: Literal[False] = Field(False, description="its acceptance is set, not learned")
    size: Literal["set"] = Field("set", description="how much it drafts is set")
    max_draft_len: int = draft_len(4)
    acceptance_rate: float = setting(
        0.8,
        "Acceptance rate",
        "probability that a drafted token is right if those before it are",
        ge=0.0,
        le=1.0,
    )
    acceptance_rates: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = setting(
        None,
        "Rate per position",
        "one such probability per position, e.g. [0.9, 0.7]; the last holds for all "
        "further ones; none = acceptance_rate everywhere",
        strict=False,
        min_length=1,
        max_length=64,
    )
    draft_ms: float = setting(
        0.0,
        "Drafting time",
        "time that drafting takes at every step, in milliseconds",
        ge=0.0,
        le=1000.0,
    )

    @property
    def badge(self) -> str:
        return "synthetic"

    def rate(self, place: int) -> float:
        """Probability that the token at this place of a draft is right, from 0."""
        rates = self.acceptance_rates or (self.acceptance_rate,)
        return rates[min(place, len(rates) - 1)]

    def build(self, context: BuildContext) -> SyntheticDrafter:
        return SyntheticDrafter(self, context.target)


class SyntheticDrafter(Drafter):
    """Drafts the target's answer with mistakes, as a chain."""

    notes = ("This drafter is made up: the figures show what one this good would gain.",)

    def __init__(self, config: SyntheticConfig, target: Target) -> None:
        self._config, self._target = config, target

    def rehearse(self, ask: Ask, cancelled: Callable[[], bool]) -> None:
        """Let the target answer by itself, unless it did before."""
        (prompt_ids, sampling, limits), key = ask, _question(ask)
        known = _answers.setdefault(self._target, OrderedDict())
        room = self._target.context_len - len(prompt_ids)
        wanted = min(limits.max_new_tokens + self._config.max_draft_len, room)
        answer = known.pop(key, [])
        eos_ids = frozenset[int]() if limits.ignore_eos else self._target.eos_ids
        if len(answer) < wanted and not (answer and answer[-1] in eos_ids):
            constraint = constraint_of(self._target, sampling)
            answer = self._answer(prompt_ids, wanted, eos_ids, constraint, cancelled)
        known[key] = answer
        while len(known) > MAX_ANSWERS:
            known.popitem(last=False)

    def _answer(
        self,
        prompt_ids: Sequence[int],
        length: int,
        eos_ids: frozenset[int],
        constraint: Constraint,
        cancelled: Callable[[], bool],
    ) -> list[int]:
        """The greedy answer, of so many tokens at most."""
        target, answer = self._target, list[int]()
        cache = target.new_cache(len(prompt_ids) + length)
        fed = list(prompt_ids)
        try:
            while len(answer) < length and not cancelled():
                output = constraint.mask(target.prefill(fed, cache, Needs()))
                answer.append(output.argmax()[-1])
                fed = answer[-1:]
                constraint.commit(fed)
                if fed[0] in eos_ids:
                    break
        finally:
            cache.free()
        return answer

    def start(self, start: Start) -> None:
        super().start(start)
        ask = Ask(start.prompt_ids, start.sampling, start.limits)
        self.rehearse(ask, lambda: False)  # known, in a decode loop
        self._answer_at = len(start.prompt_ids)
        self._truth = _answers[self._target][_question(ask)]
        # Draws of its own: the target's must not depend on what is drafted.
        self._random = random.Random(f"drafts {start.sampling.seed}")

    def propose(self, max_depth: int) -> Proposal:
        ready_s = time.perf_counter() + self._config.draft_ms / 1000
        at = len(self.text) - self._answer_at
        true = self._truth[at : at + min(self._config.max_draft_len, max_depth)]
        drafted = [self._draft(place, token) for place, token in enumerate(true)]
        tokens = torch.tensor([self.text[-1], *drafted], device=self._target.device)
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return Proposal(tokens, TreeShape.chain(len(drafted)))

    def _draft(self, place: int, token: int) -> int:
        """The true token, or any other."""
        if self._random.random() < self._config.rate(place):
            return token
        vocab = self._target.vocab_size
        return (token + 1 + self._random.randrange(vocab - 1)) % vocab
