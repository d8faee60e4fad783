"""Whether a configuration's texts are plain decoding's, and which configuration is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from playground.experiments.finished import FinishedRequest, Pair
from playground.experiments.report.audits import Audits, divergences, gap_sentences
from playground.experiments.report.statistics import TOO_FEW, Speedup

MAX_LISTED = 20
Cause = Literal["near ties", "fault", "unknown"]
"""Why answers differ; `unknown` = not looked into."""
Trust = Literal["identical", "near ties", "fault", "unknown", "sampled", "lossy"]
TRUST_SENTENCES: dict[Trust, str] = {
    "identical": "Its answers are token-identical to plain decoding’s.",
    "near ties": "Its answers differ from plain decoding’s only at near-ties, where rounding "
    "decides.",
    "fault": "Do not use it: its answers differ from plain decoding’s, and rounding is not the "
    "cause.",
    "unknown": "Its answers differ from plain decoding’s; the cause has not been examined.",
    "sampled": "",
    "lossy": "It is lossy: it may keep tokens that the target would not choose.",
}
CAUSES: dict[Cause, str] = {
    "near ties": "near-ties, where rounding decides",
    "fault": "rounding is not the cause: the method is at fault",
    "unknown": "the cause has not been examined",
}
NEAR_TIES: dict[bool | None, str] = {
    None: "the cause has not been examined",
    True: "a near-tie, which rounding alone can flip",
    False: "rounding is not the cause, so the method is at fault",
}
"""What is said of one answer, by `Divergence.near_tie`."""
UNSURE = f"These are {TOO_FEW}: add prompts or repeats to see how certain it is."
MORE = "more prompts or repeats would"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's, counted from 0 in the answer.

    Attributes:
        near_tie: whether rounding explains it; None = not examined.
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
        cause: one answer that no rounding explains is a fault; else all that were examined
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


@dataclass(frozen=True, slots=True)
class Headline:
    """Which configuration is fastest, and whether to trust it.

    Attributes:
        text: sentences; empty while nothing is measured.
        fastest: the configuration whose interval lies above every other's, plain decoding's
            included; None while that is open.
    """

    text: str
    fastest: str | None = None


def headline(
    plain: str,
    contenders: Sequence[Contender],
    over: Callable[[str, str], Speedup | None],
    *,
    preliminary: str = "",
) -> Headline:
    """What the figures so far allow to be said.

    Args:
        plain: name of plain decoding's configuration.
        over: speedup of one configuration over another on the requests that both answered.
        preliminary: how much is done, while it is not all: `4 of 24 requests`.
    """
    measured = [(one, one.speedup) for one in contenders if one.speedup is not None]
    if not measured:
        return Headline("")
    best, fast = max(measured, key=lambda pair: pair[1].ratio)
    others = [one.name for one, _ in measured if one is not best]
    if preliminary:
        leads = f"{best.name} leads at" if fast.ratio > 1 else f"plain decoding leads; {best.name}:"
        return Headline(f"Preliminary, {preliminary}: {leads} {fast.text}.")
    reached = f"{best.name} reaches {fast.text} plain decoding{_measured(fast)}"
    if fast.low is None:
        return Headline(f"{reached}. {UNSURE}")
    if all(speedup.slower for _, speedup in measured):
        return Headline(f"Plain decoding is the fastest here. Next, {reached}.", plain)
    if not fast.faster:
        return Headline(f"No measurable gain over plain decoding: {reached}.")
    trust = TRUST_SENTENCES[best.trust]
    level = [name for name in others if not ((ahead := over(best.name, name)) and ahead.faster)]
    if level:
        apart = f"The measurements do not separate it from {', '.join(level)}; {MORE}."
        return Headline(" ".join(filter(None, (f"{reached}, the highest speedup.", apart, trust))))
    said = f"{best.name} is the fastest: {fast.text} plain decoding{_measured(fast)}."
    return Headline(" ".join(filter(None, (said, trust))), best.name)


def _measured(fast: Speedup) -> str:
    """The interval and what it comes from, in brackets."""
    extent = " × ".join(
        f"{number} {noun}{'s' * (number > 1)}"
        for number, noun in ((fast.num_prompts, "prompt"), (fast.num_repeats, "repeat"))
    )
    interval = "" if fast.low is None else f"95% interval {fast.interval}; "
    return f" ({interval}{extent})"
