"""A drafter that is started, and told of the steps it missed, only when it has to draft."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.drafters.base import Drafter, Start
from engine.proposal import Outcome, Proposal, TargetOutput
from engine.tree import TreeShape, upload
from engine.tuning.costs import KINDS, DraftKind

MAX_PENDING_STEPS, MAX_PENDING_LOGITS = 256, 1 << 22
"""The most steps that a drafter is told of later, and logits in all of them."""


class LazyDrafter:
    """Starts a drafter at its first draft in a text, and hands it the steps between as one.

    Attributes:
        kinds: the kinds of draft it makes; costs and speedup are estimated for each.
        num_unread: prompt tokens that it has not read yet.
        has_draft_probs: whether its drafts have probabilities by which they can be cut.
        num_extra_rows: rows that it adds to the verify forward besides its draft.
    """

    def __init__(self, inner: Drafter, *, copies: bool) -> None:
        """`copies`: it looks up what another drafter of the method would have to compute."""
        self.inner = inner
        kinds = KINDS if inner.branches else KINDS[:1]
        self.kinds: tuple[DraftKind, ...] = ("copy",) if copies else kinds
        self.has_draft_probs, self.num_extra_rows = True, 0
        self._start: Start | None = None

    def start(self, start: Start) -> None:
        self._start, self._is_started, self._drafts_now = start, False, False
        self.num_unread = len(start.prompt_ids) - (start.num_cached or 0)
        self._pending: list[Outcome] = []

    def catch_up(self) -> int:
        """Make it ready to draft at this step; returns how many steps it had missed."""
        assert self._start is not None
        num_missed, self._drafts_now = len(self._pending), True
        if not self._is_started:
            self._is_started = True
            self.inner.start(self._start)
        self._flush()
        return num_missed

    def observe(self, outcome: Outcome) -> None:
        """A step was made, with its own draft, another drafter's or none."""
        if self._drafts_now:
            self._drafts_now = False
            self.inner.observe(outcome)
            return
        # Only what it needs; an empty view of the logits would keep all of them in memory.
        output, needs = outcome.output, self.inner.needs
        output = TargetOutput(
            output.logits if self.inner.reads_logits else output.logits.new_empty(0, 0),
            output.hidden if needs.hidden else None,
            output.layers if needs.layers else None,
            shared=output.shared if needs.shared else (),
        )
        tokens = Proposal(outcome.proposal.tokens, outcome.proposal.shape)
        self._pending.append(Outcome(tokens, output, outcome.path, outcome.committed))
        num_steps, num_logits = len(self._pending), output.logits.numel()
        is_full = num_steps >= MAX_PENDING_STEPS or num_steps * num_logits >= MAX_PENDING_LOGITS
        if self._is_started and is_full:
            self._flush()

    def finish(self) -> None:
        if self._start is not None:
            if self.inner.remembers:
                self.catch_up()
            if self._is_started:
                self.inner.finish()
        self._start, self._pending = None, []

    def _flush(self) -> None:
        if self._pending:
            self.inner.observe(_merged(self._pending))
            self._pending = []


def _merged(steps: list[Outcome]) -> Outcome:
    """Several steps as one whose draft was accepted whole."""
    output = TargetOutput.joined([step.output.at(step.path) for step in steps])
    output = replace(output, shared=steps[-1].output.shared)
    device = steps[0].proposal.tokens.device
    rows = [upload(torch.tensor(step.path), device) for step in steps]
    tokens = torch.cat([step.proposal.tokens[r] for step, r in zip(steps, rows, strict=True)])
    committed = tuple(token for step in steps for token in step.committed)
    path = tuple(range(len(tokens)))
    return Outcome(Proposal(tokens, TreeShape.chain(len(tokens) - 1)), output, path, committed)
