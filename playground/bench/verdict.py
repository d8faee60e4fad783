"""Whether a configuration's greedy texts are token for token those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.bench.measured import Measured

MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's, counted from 0 in the answer."""

    suite: str
    prompt: str
    turn: int
    repeat: int
    at: int
    run_id: str
    reference_run_id: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of `num_compared` answers, `num_identical` are the same; the first others are listed."""

    num_compared: int
    num_identical: int
    divergences: tuple[Divergence, ...]

    @property
    def identical(self) -> bool:
        return self.num_identical == self.num_compared


def first_divergence(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if equal."""
    for at, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def verdict_of(pairs: Sequence[tuple[Measured, Measured]]) -> Verdict | None:
    """The verdict over answers and the reference's; None without any."""
    if not pairs:
        return None
    found = []
    for ours, plain in pairs:
        at = first_divergence(ours.output_ids, plain.output_ids)
        if at is not None:
            where = ours.suite, ours.prompt, ours.turn, ours.repeat
            found.append(Divergence(*where, at, ours.run_id, plain.run_id))
    return Verdict(len(pairs), len(pairs) - len(found), tuple(found[:MAX_LISTED]))
