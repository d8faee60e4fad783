"""Whether a configuration's greedy texts are token for token those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from playground.experiments.bench.audits import Audits, gap_words
from playground.experiments.bench.headline import Trust
from playground.experiments.bench.measured import Measured

MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's, counted from 0 in the answer.

    Attributes:
        near_tie: whether rounding explains it; None = not looked into.
        gap: what the target says of the two tokens there, in sentences.
    """

    suite: str
    prompt: str
    turn: int
    repeat: int
    at: int
    run_id: str
    reference_run_id: str
    near_tie: bool | None = None
    gap: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of `num_compared` answers, `num_identical` are the same; the first others are listed.

    Attributes:
        cause: why answers differ: of near ties alone, of a fault, or not known.
    """

    num_compared: int
    num_identical: int
    divergences: tuple[Divergence, ...]
    cause: Literal["near ties", "fault", "unknown"] | None = None

    @property
    def identical(self) -> bool:
        return self.num_identical == self.num_compared


def first_divergence(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if equal."""
    for at, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def verdict_of(
    pairs: Sequence[tuple[Measured, Measured]], audits: Audits | None = None
) -> Verdict | None:
    """The verdict over answers and the reference's; None without any."""
    if not pairs:
        return None
    found = []
    for ours, plain in pairs:
        at = first_divergence(ours.output_ids, plain.output_ids)
        if at is not None:
            found.append(_divergence(ours, plain, at, audits or {}))
    listed = tuple(found[:MAX_LISTED])
    return Verdict(len(pairs), len(pairs) - len(found), listed, _cause(found))


def _divergence(ours: Measured, plain: Measured, at: int, audits: Audits) -> Divergence:
    where = ours.suite, ours.prompt, ours.turn, ours.repeat
    audit = audits.get((ours.run_id, plain.run_id))
    near_tie = None if audit is None else audit.view.near_tie
    gap = () if audit is None else gap_words(audit)
    return Divergence(*where, at, ours.run_id, plain.run_id, near_tie, gap)


def _cause(found: Sequence[Divergence]) -> Literal["near ties", "fault", "unknown"] | None:
    """One answer that no rounding explains is a fault; else all that were looked into count."""
    if not found:
        return None
    seen = {one.near_tie for one in found}
    if False in seen:
        return "fault"
    return "near ties" if True in seen else "unknown"


def trust_in(verdict: Verdict | None, *, lossless: bool) -> Trust:
    """What can be said of a configuration's texts; None = they cannot be compared."""
    if not lossless:
        return "lossy"
    if verdict is None:
        return "sampled"
    return verdict.cause or "identical"
