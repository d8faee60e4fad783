"""Drafters around drafters: what they were shown, and what they make of it."""

from __future__ import annotations

from engine.accept import Acceptance, Rule, VerifiedTree
from engine.config import Sampling
from engine.drafters.base import Drafter, root_only
from engine.model.target import Target
from engine.proposal import Budget, Outcome, Proposal
from engine.sampling import SeededDraws, probabilities
from tests.one_text import OneText


class Wrapped(OneText):
    """Passes every call on."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.needs = inner, inner.needs

    def begin(self) -> None:
        self.inner_session = self.inner.open(self.start)

    def propose(self, budget: Budget) -> Proposal:
        return self.inner_session.propose(budget)

    def observe(self, outcome: Outcome) -> None:
        self.inner_session.observe(outcome)

    def close(self) -> None:
        self.inner_session.close()


class Pausing(Wrapped):
    """Asks for a draft every few steps only."""

    def __init__(self, inner: Drafter, target: Target, every: int) -> None:
        super().__init__(inner)
        self._device, self._every, self._step = target.device, every, 0
        self.drawn: dict[int, tuple[list[int], tuple[int, ...]]] = {}

    def propose(self, budget: Budget) -> Proposal:
        self._step += 1
        if self._step % self._every:
            return root_only(self.root, self._device)
        proposal = super().propose(budget)
        self.drawn[len(self.text)] = (proposal.tokens.tolist(), proposal.shape.parents)
        # The root alone is fed: every context comes up, whatever would have been accepted.
        return proposal.keep([0])


class Watched(Wrapped):
    """Notes what the inner drafter was shown, and what it drafted of nothing shown."""

    def __init__(self, inner: Drafter, top: int) -> None:
        super().__init__(inner)
        self.top, self.seen, self.unseen = top, set[int](), list[int]()

    def propose(self, budget: Budget) -> Proposal:
        self.seen.update(self.text)
        assert self.log.prompt_logits is not None
        self.seen.update(self.log.prompt_logits.topk(self.top).indices.flatten().tolist())
        proposal = super().propose(budget)
        self.unseen += {*proposal.tokens[1:].tolist()} - self.seen
        return proposal

    def observe(self, outcome: Outcome) -> None:
        self.seen.update(outcome.output.logits.topk(self.top).indices.flatten().tolist())
        super().observe(outcome)


class Wrong(Wrapped):
    """Tries each drafted child several times, and forgets a rejection when it draws anew."""

    def __init__(self, inner: Drafter, tries: int) -> None:
        super().__init__(inner)
        self.tries = tries

    def rule(self) -> Rule:
        return Trying(self.start.sampling, self.tries)


class Trying(Rule):
    def __init__(self, sampling: Sampling, tries: int) -> None:
        self.sampling, self.tries = sampling, tries

    def __call__(self, verified: VerifiedTree, draws: SeededDraws) -> Acceptance:
        node, path = 0, list[int]()
        while True:
            probs = probabilities(verified.logits[node], self.sampling)
            passed = [
                child
                for child in verified.shape.children[node]
                if min(draws.uniform() for _ in range(self.tries))
                < float(probs[verified.tokens[child]])
            ]
            if not passed:
                return Acceptance(tuple(path), draws.pick(probs))
            node = passed[0]
            path.append(node)
