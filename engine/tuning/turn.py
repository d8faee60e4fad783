"""What the controller knows of a session, of a draft to be made, and of a step under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.drafters.base import DraftSession
from engine.proposal import Budget, Proposal
from engine.tuning.account import Trials
from engine.tuning.costs import DraftKind, kinds_of


class Turn:
    """What the controller knows of one session in a text; it is asked to draft when it pays.

    Attributes:
        kinds: the kinds of draft it makes; costs and speedup are estimated for each.
        num_unread: prompt tokens that it has not read yet.
        num_missed: steps since it was asked to draft.
        was_asked: whether it is, at this step.
        decision: what it is to draft, or the reason for no draft.
        num_repeats: further steps for which that stands.
        has_draft_probs: whether its drafts have probabilities by which they can be cut.
        num_extra_rows: rows that it adds to the verify forward besides its draft.
    """

    def __init__(self, session: DraftSession[Any], *, copies: bool) -> None:
        """`copies`: it looks up what another session of the method would have to compute."""
        self.session, self.traits = session, session.drafter.traits
        self.kinds: tuple[DraftKind, ...] = ("copy",) if copies else kinds_of(self.traits)
        self.has_draft_probs, self.num_extra_rows = True, 0
        self.decision: DraftPlan | str = ""
        self.num_repeats = self.num_missed = 0
        self.was_asked = False
        self.num_unread = session.log.num_prompt - (session.log.num_cached or 0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft to be made.

    Attributes:
        max_loss_ms: the most that it may lose against a plain step.
        trial: the trials that it belongs to, if it is one.
    """

    turn: Turn
    kind: DraftKind
    budget: Budget
    max_loss_ms: float
    trial: Trials | None


@dataclass(slots=True)
class DraftedStep:
    """The step under way, if it drafts.

    Attributes:
        plan: None for tokens that a grammar left no choice about.
        draft_ms: from the start of the step to the end of the draft.
        propose_ms: from the start of the step to its verification.
        usual_draft_ms: expected of drafts like it; `draft_ms` for the first of its kind, and where
            the drafter read the prompt or caught up.
        is_typical: whether its time counts for the speed of drafted steps.
        rows, depth: as verified.
        draft: as the drafter made it, before it was cut; None where it found nothing.
    """

    plan: DraftPlan | None = None
    draft_ms: float = 0.0
    usual_draft_ms: float = 0.0
    is_typical: bool = False
    propose_ms: float = 0.0
    rows: int = 1
    depth: int = 0
    draft: Proposal | None = None

    @property
    def ran_network(self) -> bool:
        return self.plan is not None and self.plan.turn.traits.has_network
