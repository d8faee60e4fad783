"""Whether a configuration's texts are plain decoding's, and which configuration is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from playground.experiments.finished import FinishedRequest, Pair
from playground.experiments.report.audits import Audits, divergences, gap_sentences
from playground.experiments.report.statistics import Speedup

MAX_LISTED = 20
SAME = 0.02
"""A speedup this close to 1 is neither faster nor slower."""
Cause = Literal["near ties", "fault", "unknown"]
"""Why answers differ; `unknown` = not looked into."""
Trust = Literal["identical", "near ties", "fault", "unknown", "sampled", "lossy"]
TRUST_SENTENCES: dict[Trust, str] = {
    "identical": "Its text is plain decoding's, token for token.",
    "near ties": "Its text leaves plain decoding's only at near-ties, which rounding alone flips.",
    "fault": "Do not use it: its text differs from plain decoding's, and no rounding does that.",
    "unknown": "Its text differs from plain decoding's; why was not looked into.",
    "sampled": "",
    "lossy": "It is lossy: it may keep tokens that the target would not choose.",
}
CAUSES: dict[Cause, str] = {
    "near ties": "near-ties, which rounding alone flips",
    "fault": "no rounding does this, the method is at fault",
    "unknown": "why was not looked into",
}


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
    """Of `num_compared` greedy answers, `num_identical` are plain decoding's token for token.

    Attributes:
        num_tokens: of all answers compared.
        divergences: the first answers that differ.
        cause: one answer that no rounding explains is a fault; else all that were looked into
            count. None if nothing differs.
    """

    num_compared: int
    num_identical: int
    num_tokens: int
    divergences: tuple[Divergence, ...]
    cause: Cause | None = None

    @property
    def identical(self) -> bool:
        return self.num_identical == self.num_compared


def verdict_of(pairs: Sequence[Pair], audits: Audits) -> Verdict | None:
    """The verdict over answers and plain decoding's; None without any."""
    if not pairs:
        return None
    found = [_divergence(pair, at, audits) for pair, at in divergences(pairs)]
    cause: Cause | None = None
    if found:
        seen = {one.near_tie for one in found}
        cause = "fault" if False in seen else "near ties" if True in seen else "unknown"
    num_tokens = sum(len(own.output_ids) for own, _ in pairs)
    same = len(pairs) - len(found)
    return Verdict(len(pairs), same, num_tokens, tuple(found[:MAX_LISTED]), cause)


def _divergence(pair: Pair, at: int, audits: Audits) -> Divergence:
    own, plain = pair
    audit = audits.get((own.run_id, plain.run_id))
    near_tie = None if audit is None else audit.view.near_tie
    gap = () if audit is None else gap_sentences(audit)
    return Divergence(*own.pair, at, own.run_id, plain.run_id, near_tie, gap)


def num_unsteady(requests: Sequence[FinishedRequest]) -> int:
    """Prompts to which greedy decoding gave another answer in another repeat."""
    texts: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for r in requests:
        texts.setdefault((r.suite, r.prompt, r.turn), set()).add(r.output_ids)
    return sum(len(found) > 1 for found in texts.values())


def trust_in(verdict: Verdict | None, *, lossless: bool) -> Trust:
    """What can be said of a configuration's texts; None = they cannot be compared."""
    if not lossless:
        return "lossy"
    if verdict is None:
        return "sampled"
    return verdict.cause or "identical"


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration beside plain decoding; no speedup where nothing could be compared."""

    name: str
    speedup: Speedup | None
    trust: Trust


def headline(contenders: Sequence[Contender]) -> str:
    """Which is fastest, by how much, and whether to trust it; empty while nothing is measured."""
    measured = [(one, one.speedup) for one in contenders if one.speedup is not None]
    if not measured:
        return ""
    best, fast = max(measured, key=lambda pair: pair[1].ratio)
    name, ratio, spread = best.name, f"{fast.ratio:.2f}×", _spread(fast)
    if fast.ratio < 1 - SAME:
        which = f"the next, {name}," if len(measured) > 1 else name
        return f"Plain decoding is fastest here: {which} reaches {ratio} its tok/s{spread}."
    if fast.ratio <= 1 + SAME:
        return f"Nothing is faster than plain decoding here: {name} is level, {ratio}{spread}."
    near = [
        one.name
        for one, other in measured
        if one is not best and other.ratio > 1 + SAME and other.high >= fast.low
    ]
    said = [
        f"Fastest: {name}, {ratio} the tok/s of plain decoding{spread}.",
        _doubt(fast, near),
        TRUST_SENTENCES[best.trust],
    ]
    return " ".join(filter(None, said))


def _spread(fast: Speedup) -> str:
    if fast.num_pairs == 1:
        return ""
    over = "repeats" if fast.spread_over == "repeats" else "quartiles of the requests"
    return f" ({over}: {fast.low:.2f} … {fast.high:.2f})"


def _doubt(fast: Speedup, near: Sequence[str]) -> str:
    """What the spread does not tell apart."""
    if fast.spread_over != "repeats":
        return "One repeat does not show the noise of the clock."
    if fast.low <= 1:
        return "But not in every repeat: more of them would tell whether it gains."
    if near:
        return f"Within its spread: {', '.join(near)}; more repeats would tell them apart."
    return ""
