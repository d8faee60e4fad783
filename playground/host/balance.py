"""Why decoding is faster or slower than plain decoding: what a step saves and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from engine import formats
from engine.metrics import StepParts, ratio

FEW_DRAFTS = "Hardly anything was drafted"
NO_DRAFTS = "Hardly any draft is accepted"


@dataclass(frozen=True, slots=True)
class Balance:
    """What a step saves and costs, in units of a plain step.

        speedup = tokens per step · t_plain / (t_draft + t_verify + t_other)

    A step saves the time of all its tokens but one; it costs drafting, verifying more than one row,
    and everything else.

    Attributes:
        mat: tokens per step.
        paid: cost beyond a plain step, by part; negative where a part takes less.
    """

    mat: float
    paid: Mapping[str, float]

    @classmethod
    def of(cls, mat: float, own: StepParts, plain: StepParts) -> Self:
        """Of a step with these parts, against those of a plain step."""
        plain_s = sum(plain)
        extra = ((ours - theirs) / plain_s for ours, theirs in zip(own, plain, strict=True))
        return cls(mat, dict(zip(StepParts._fields, extra, strict=True)))

    @property
    def total(self) -> float:
        return sum(self.paid.values())

    @property
    def largest(self) -> str:
        return max(self.paid, key=lambda part: self.paid[part])

    @property
    def formula(self) -> float:
        return self.mat / (1 + self.total)

    @property
    def without_largest(self) -> float:
        """The speedup if the largest cost were zero."""
        return self.mat / (1 + self.total - max(0.0, self.paid[self.largest]))


def hardly_drafts(tokens_a_step: float) -> bool:
    """Whether so few draft tokens are accepted that no saving of time could make it faster."""
    return tokens_a_step < 1.05


def missing_drafts(num_accepted: float, num_drafted: float) -> str:
    """What `hardly_drafts` is due to: of what was drafted, most is right, or hardly anything."""
    acceptance = ratio(num_accepted, num_drafted)
    return FEW_DRAFTS if acceptance is None or acceptance > 1 / 3 else NO_DRAFTS


def step_words(mat: float, step: float, joint: str = "and") -> str:
    """2.50 tokens a step, and a step takes 1.20× as long as a plain step"""
    costs = f"{joint} a step takes {formats.speedup(step)} as long as a plain step"
    return f"{formats.mat(mat)} tokens a step, {costs}"
