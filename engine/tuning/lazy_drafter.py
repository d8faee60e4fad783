"""A drafter that is started, and told of the steps it missed, only when it has to draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.drafters.base import Drafter, Start
from engine.proposal import Budget, Needs, Outcome, Proposal, TargetOutput
from engine.tree import TreeShape, upload
from engine.tuning.account import Trials
from engine.tuning.costs import KINDS, DraftKind

MAX_MISSED_STEPS, MAX_MISSED_LOGITS = 256, 1 << 22
"""The most steps that a started drafter is told of later, and logits in all of them."""


class LazyDrafter:
    """Starts a drafter at its first draft in a text, and hands it the steps between as one.

    Attributes:
        kinds: the kinds of draft it makes; costs and speedup are estimated for each.
        num_unread: prompt tokens that it has not read yet.
        decision: what it is to draft, or the reason for no draft.
        num_repeats: further steps for which that stands.
        has_draft_probs: whether its drafts have probabilities by which they can be cut.
        num_extra_rows: rows that it adds to the verify forward besides its draft.
    """

    def __init__(self, inner: Drafter, *, copies: bool) -> None:
        """`copies`: it looks up what another drafter of the method would have to compute."""
        self.inner = inner
        kinds = KINDS if inner.branches else KINDS[:1]
        self.kinds: tuple[DraftKind, ...] = ("copy",) if copies else kinds
        self.has_draft_probs, self.num_extra_rows = True, 0
        self._reads_outputs = inner.reads_logits or inner.needs != Needs()
        self._start: Start | None = None

    def start(self, start: Start) -> None:
        self._start, self._is_started, self._drafts_now = start, False, False
        self.decision: DraftPlan | str = ""
        self.num_repeats = 0
        self.num_unread = len(start.prompt_ids) - (start.num_cached or 0)
        self._root, self._no_logits = start.root, start.output.logits.new_empty(0, 0)
        self._forget_missed()

    def catch_up(self) -> int:
        """Make it ready to draft at this step; returns how many steps it had missed."""
        assert self._start is not None
        num_missed, self._drafts_now = self._num_missed, True
        if not self._is_started:
            self._is_started = True
            self.inner.start(self._start)
        self._flush()
        return num_missed

    def observe(self, outcome: Outcome) -> None:
        """A step was made, with its own draft, another drafter's or none."""
        if self._drafts_now:
            self._drafts_now, self._root = False, outcome.committed[-1]
            self.inner.observe(outcome)
            return
        # The forward has emptied the processor's caches, so every object made here takes its time.
        self._num_missed += 1
        self._missed_ids.extend(outcome.committed)
        is_full = self._num_missed >= MAX_MISSED_STEPS
        if self._reads_outputs:
            output, needs = outcome.output, self.inner.needs
            # Only what it needs; an empty view of the logits would keep all of them in memory.
            needed = TargetOutput(
                output.logits if self.inner.reads_logits else self._no_logits,
                output.hidden if needs.hidden else None,
                output.layers if needs.layers else None,
                shared=output.shared if needs.shared else (),
            )
            # Rejected rows would stay on the device for as long as the drafter sleeps.
            has_rejected = len(outcome.path) < outcome.proposal.num_rows
            if has_rejected:
                needed = replace(needed.at(outcome.path), shared=needed.shared)
            self._missed.append(needed)
            is_full |= self._num_missed * needed.logits.numel() >= MAX_MISSED_LOGITS
        if self._is_started and is_full:
            self._flush()

    def finish(self) -> None:
        if self._start is not None:
            if self.inner.remembers:
                self.catch_up()
            if self._is_started:
                self.inner.finish()
            self._start = None
            self._forget_missed()

    def _flush(self) -> None:
        """Tell it of the missed steps as of one whose draft was accepted whole."""
        if not self._num_missed:
            return
        committed, output = tuple(self._missed_ids), TargetOutput(self._no_logits)
        token_ids = [self._root, *committed[:-1]]
        if self._missed:
            output = TargetOutput.joined(self._missed)
            output = replace(output, shared=self._missed[-1].shared)
        tokens = upload(torch.tensor(token_ids), self._no_logits.device)
        proposal = Proposal(tokens, TreeShape.chain(len(tokens) - 1))
        path = tuple(range(len(tokens)))
        self._root = committed[-1]
        self._forget_missed()
        self.inner.observe(Outcome(proposal, output, path, committed, token_ids))

    def _forget_missed(self) -> None:
        self._num_missed = 0
        self._missed_ids: list[int] = []
        self._missed: list[TargetOutput] = []


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft to be made.

    Attributes:
        max_loss_ms: the most that it may lose against a plain step.
        trial: the trials that it belongs to, if it is one.
    """

    drafter: LazyDrafter
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
        return self.plan is not None and self.plan.drafter.inner.has_network
