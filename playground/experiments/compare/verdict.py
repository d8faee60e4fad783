"""The lossless verdict on one configuration, in words: identical, or where and how it differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from engine.metrics import first_divergence
from engine.model.audit import Audit
from playground.experiments.bench.audits import gap_words
from playground.experiments.bench.headline import Trust
from playground.experiments.bench.measured import Measured
from playground.experiments.compare.figures import Pair
from storage import RunLog

Kind = Literal["baseline", "identical", "diverged", "lossy", "sampled", "none"]
SHOWN_TOKENS = 16
SHOWN_BEFORE = 12


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two texts part: the last words in common, and what each says next.

    Attributes:
        index: tokens in common.
    """

    prompt: str
    repeat: int
    index: int
    own_run: str
    plain_run: str
    before: str
    own: str
    plain: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the page says about losslessness.

    Attributes:
        label: two or three words.
        near_tie: for texts that part, whether rounding explains it; None = not looked at.
    """

    kind: Kind
    label: str
    sentence: str
    near_tie: bool | None = None
    parting: Parting | None = None
    gap: tuple[str, ...] = ()

    @classmethod
    def baseline(cls, runs: Sequence[Measured], *, greedy: bool) -> Self:
        """Of plain decoding: whether it repeats itself, where it should."""
        texts: dict[str, set[tuple[int, ...]]] = {}
        for run in runs:
            texts.setdefault(run.prompt, set()).add(run.output_ids)
        unsteady = sum(len(found) > 1 for found in texts.values())
        if not greedy or not unsteady:
            return cls("baseline", "baseline", "The others are compared with this one.")
        return cls(
            "baseline",
            "not repeatable",
            f"Plain decoding itself writes another text from repeat to repeat for {unsteady} of "
            f"{len(texts)} prompts: this device rounds differently each time, and so may others.",
        )

    @property
    def trust(self) -> Trust:
        """What this says of the configuration, in a word."""
        if self.kind == "diverged":
            known: dict[bool | None, Trust] = {None: "unknown", True: "near ties", False: "fault"}
            return known[self.near_tie]
        words: dict[Kind, Trust] = {"identical": "identical", "lossy": "lossy"}
        return words.get(self.kind, "sampled")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_parting(pairs: Sequence[Pair]) -> tuple[Pair, int] | None:
    """The first pair whose texts differ, and the place."""
    for pair in pairs:
        at = first_divergence(pair[1].output_ids, pair[0].output_ids)
        if at is not None:
            return pair, at
    return None


def judge(
    log: RunLog, pairs: Sequence[Pair], *, lossless: bool, greedy: bool, audit: Audit | None
) -> Verdict:
    """The verdict over all prompts and repeats that both sides finished."""
    if not pairs:
        return Verdict("none", "not compared", "No run has a finished plain run beside it.")
    if not greedy:
        return _sampled(lossless)
    found = first_parting(pairs)
    if found is None:
        return _identical(pairs, lossless)
    (own, plain), at = found
    differing = sum(first_divergence(p.output_ids, o.output_ids) is not None for o, p in pairs)
    parting = _parting(log, (own, plain), at)
    where = f"{differing} of {len(pairs)} texts" if len(pairs) > 1 else "the text"
    gap = () if audit is None else gap_words(audit)
    if not lossless:
        return Verdict(
            "lossy",
            "lossy",
            f"Lossy by design: it may keep tokens that the target would not choose. "
            f"Differs from plain decoding in {where}, first at token {at + 1}.",
            parting=parting,
            gap=gap,
        )
    near_tie = None if audit is None else audit.view.near_tie
    return Verdict(
        "diverged",
        f"differs at token {at + 1}",
        f"Differs from plain decoding in {where}, first at token {at + 1}. {_cause(near_tie)}",
        near_tie=near_tie,
        parting=parting,
        gap=gap,
    )


def _cause(near_tie: bool | None) -> str:
    if near_tie is None:
        return "Not looked into."
    if near_tie:
        return "The target is all but undecided there: rounding alone can flip it."
    return "No rounding does this: the method is at fault. Please report it."


def _sampled(lossless: bool) -> Verdict:
    if not lossless:
        return Verdict(
            "lossy", "lossy", "Lossy by design, and sampled: texts cannot be compared by token."
        )
    return Verdict(
        "sampled",
        "not comparable",
        "Sampled: the method draws from the same distribution as plain decoding, but with other "
        "random numbers, so that the texts differ token by token even with the same seed. "
        "Set temperature to 0 to compare them.",
    )


def _identical(pairs: Sequence[Pair], lossless: bool) -> Verdict:
    tokens = sum(len(own.output_ids) for own, _ in pairs)
    texts = f"{len(pairs)} texts" if len(pairs) > 1 else "1 text"
    same = f"{tokens} tokens in {texts}, token for token those of plain decoding."
    if lossless:
        return Verdict("identical", "identical", same)
    return Verdict("lossy", "lossy", f"Lossy by design, yet identical here: {same}")


def _parting(log: RunLog, pair: Pair, at: int) -> Parting:
    own, plain = pair
    ours, theirs = pieces(log, own.run_id), pieces(log, plain.run_id)
    return Parting(
        own.prompt,
        own.repeat,
        at,
        own.run_id,
        plain.run_id,
        "".join(theirs[max(0, at - SHOWN_BEFORE) : at]),
        "".join(ours[at : at + SHOWN_TOKENS]),
        "".join(theirs[at : at + SHOWN_TOKENS]),
    )


def pieces(log: RunLog, run_id: str) -> list[str]:
    """A stored run's text, one piece per token."""
    detail = log.get(run_id)
    first = [] if detail is None else [detail.first_text]
    return first + [piece for row in log.steps(run_id) for piece in row.committed_texts]
