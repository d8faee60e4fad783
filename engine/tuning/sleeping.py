"""A drafter that sleeps until it is wanted, and what the controller keeps of it in a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.drafters.base import Drafter, Start
from engine.proposal import Outcome, Proposal, TargetOutput
from engine.tree import TreeShape, upload
from engine.tuning.costs import KINDS, Kind

MOST_ASLEEP, KEPT_LOGITS = 256, 1 << 14
"""Steps that are kept for a sleeping drafter before it is told of them; fewer, by so many logits
each, where it reads them."""

Missed = tuple[Tensor, tuple[int, ...], tuple[int, ...], TargetOutput]
"""Tokens fed, accepted rows, tokens committed and the output of a step that a drafter slept."""


class Part:
    """A drafter that is not started before it is wanted, and is told afterwards what it missed.

    Attributes:
        kinds: what its drafts can be; each has costs and returns of its own.
        unread: tokens of the prompt that it has not read yet.
        by_probs: whether its drafts have probabilities by which they can be cut.
        extra_rows: rows that it feeds beside its drafts.
    """

    def __init__(self, drafter: Drafter, *, copies: bool) -> None:
        """Args: copies: it only looks up what another part would have to draft."""
        self.drafter = drafter
        self.kinds: tuple[Kind, ...] = ("copy",) if copies else KINDS
        if not copies and not drafter.branches:
            self.kinds = ("chain",)
        self.by_probs, self.extra_rows = True, 0
        self._start: Start | None = None

    def start(self, start: Start) -> None:
        self._start, self._started, self._awake = start, False, False
        self.unread = len(start.prompt_ids) - (start.num_cached or 0)
        self.missed: list[Missed] = []

    def wake(self) -> int:
        """It is to draft at this step; returns how many steps it had missed."""
        assert self._start is not None
        num_missed, self._awake = len(self.missed), True
        if not self._started:
            self._started = True
            self.drafter.start(self._start)
        self._tell()
        return num_missed

    def observe(self, outcome: Outcome) -> None:
        """A step was made, with a draft of its own, of another part or of none."""
        if self._awake:
            self._awake = False
            self.drafter.observe(outcome)
            return
        # Only what it needs: a view would keep all of them.
        output, needs = outcome.output, self.drafter.needs
        output = TargetOutput(
            output.logits if self.drafter.reads_logits else output.logits.new_empty(0, 0),
            output.hidden if needs.hidden else None,
            output.layers if needs.layers else None,
            shared=output.shared if needs.shared else (),
        )
        self.missed.append((outcome.proposal.tokens, outcome.path, outcome.committed, output))
        size = max(len(self.missed), output.logits.numel() * len(self.missed) // KEPT_LOGITS)
        if self._started and size >= MOST_ASLEEP:
            self._tell()

    def finish(self) -> None:
        if self._start is not None:
            if self.drafter.remembers:
                self.wake()
            if self._started:
                self.drafter.finish()
        self._start, self.missed = None, []

    def _tell(self) -> None:
        """Hand over the steps that the drafter has missed, as one."""
        if self.missed:
            self.drafter.observe(_merged(self.missed))
            self.missed = []


def _merged(missed: list[Missed]) -> Outcome:
    """Steps as one whose draft was accepted whole."""
    outputs = [output for *_, output in missed]
    paths = [list(path) for _, path, _, _ in missed]
    last = outputs[-1]
    output = TargetOutput(
        _rows([output.logits for output in outputs], paths),
        None if last.hidden is None else _rows([output.hidden for output in outputs], paths),
        None if last.layers is None else _rows([output.layers for output in outputs], paths),
        shared=last.shared,
    )
    tokens = _rows([tokens for tokens, *_ in missed], paths)
    committed = tuple(token for _, _, some, _ in missed for token in some)
    path = tuple(range(len(tokens)))
    return Outcome(Proposal(tokens, TreeShape.chain(len(tokens) - 1)), output, path, committed)


def _rows(tensors: list[Any], paths: list[list[int]]) -> Tensor:
    """The accepted rows of all steps; none where they were dropped."""
    if not len(tensors[-1]):
        return tensors[-1]  # type: ignore[no-any-return]
    device = tensors[-1].device
    kept = [upload(torch.tensor(path), device) for path in paths]
    return torch.cat([rows[path] for rows, path in zip(tensors, kept, strict=True)])
