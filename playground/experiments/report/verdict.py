"""Whether a configuration's texts equal plain decoding's, why not, and which one is fastest.

In half precision, a near-tie between two tokens can go either way in any engine. An audit evaluates
the target once more to tell a near-tie from a fault; see `engine.model.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from pydantic import TypeAdapter

from engine.config import Limits, Sampling
from engine.constraint import allowed_after
from engine.formats import plural
from engine.metrics import first_divergence
from engine.model.audit import Audit, audit
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.statistics import FinishedRequest, Pair
from playground.host.speedup import DOUBTS, Speedup
from storage import RunLog

MAX_LISTED = 20
Cause = Literal["near ties", "fault", "unknown"]
"""Why answers differ; `unknown` = not audited."""
TRUST: dict[Cause | None, str] = {
    None: "Its answers are token-identical to plain decoding’s.",
    "near ties": "Its answers differ from plain decoding’s; the examined ones differ only at "
    "near-ties, where rounding decides.",
    "fault": "Do not use it: its answers differ from plain decoding’s, and rounding is not the "
    "cause.",
    "unknown": "Its answers differ from plain decoding’s; the cause has not been examined.",
}
"""Sentences on a lossless method's answers."""
CAUSES: dict[Cause, tuple[str, str, str]] = {
    "near ties": ("near-ties", "warn", "a near-tie, which rounding alone can flip"),
    "fault": ("a fault", "bad", "rounding is not the cause, so the method is at fault"),
    "unknown": ("unexplained", "warn", "the cause has not been examined"),
}
"""Short name, mood and sentence of each cause."""
UNSTEADY = (
    "Plain decoding's own text changes from repeat to repeat for {}: this device rounds "
    "differently each time, so other texts may change too."
)
SAMPLED = (
    "Sampled: the method draws from the same distribution as plain decoding, but with other random "
    "numbers, so the texts differ even with the same seed. "
    "Set temperature to 0 to compare them."
)
LOSSY = "Lossy by design: it may keep tokens that the target would not choose."
UNSURE = "These are {}: add prompts or repeats to see how certain it is."
NOT_APART = "The measurements do not separate it from {}; more prompts or repeats would."
NO_NUMBER = "No speedup is given for {}: {} Measure again."


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's, counted from 0 in the answer.

    Attributes:
        cause: whether rounding explains it.
        gap: the target's logits of the two tokens there, as a sentence; empty if not audited.
    """

    suite: str
    prompt: str
    turn: int
    repeat: int
    at: int
    run_id: str
    reference_run_id: str
    cause: Cause = "unknown"
    gap: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of `num_compared` greedy answers, `num_identical` equal plain decoding's token for token.

    Attributes:
        num_tokens: tokens of all compared answers.
        divergences: the first answers that differ, those of the verdict's cause before others.
        cause: a fault if any answer has one, else near-ties if any was audited; None if nothing
            differs.
        num_unknown: answers that differ and were not audited.
    """

    num_compared: int
    num_identical: int
    num_tokens: int
    divergences: tuple[Divergence, ...]
    cause: Cause | None = None
    num_unknown: int = 0

    @property
    def identical(self) -> bool:
        return self.num_identical == self.num_compared

    @property
    def place(self) -> str:
        """How many texts differ, if any, and where the first of `divergences` does."""
        texts = plural(self.num_compared, "text")
        if self.identical:
            return f"{self.num_tokens} tokens in {texts}, all identical to plain decoding's"
        num, at = self.num_compared - self.num_identical, self.divergences[0].at
        return f"Differs from plain decoding in {num} of {texts}, first at token {at + 1}"

    @property
    def sentence(self) -> str:
        """Whether a lossless method's texts equal plain decoding's, and why not."""
        if self.cause is None:
            return f"{self.place}."
        num = self.num_compared - self.num_identical
        is_partly_examined = self.cause == "near ties" and self.num_unknown > 0
        examined = f" ({num - self.num_unknown} of {num} examined)" if is_partly_examined else ""
        return f"{self.place}: {CAUSES[self.cause][2]}{examined}."


def verdict_of(pairs: Sequence[Pair], audits: Audits) -> Verdict | None:
    """The verdict over answers and plain decoding's; None without any."""
    if not pairs:
        return None
    differences = [_divergence(pair, at, audits) for pair, at in divergences(pairs)]
    differences.sort(key=lambda one: ("fault", "near ties", "unknown").index(one.cause))
    cause = differences[0].cause if differences else None
    num_tokens = sum(len(own.output_ids) for own, _ in pairs)
    same, unknown = len(pairs) - len(differences), sum(d.cause == "unknown" for d in differences)
    return Verdict(len(pairs), same, num_tokens, tuple(differences[:MAX_LISTED]), cause, unknown)


def _divergence(pair: Pair, at: int, audits: Audits) -> Divergence:
    own, plain = pair
    audit = audits.get((own.run_id, plain.run_id))
    if audit is None:
        return Divergence(*own.pair_key, at, own.run_id, plain.run_id)
    cause: Cause = "near ties" if audit.view.near_tie else "fault"
    return Divergence(*own.pair_key, at, own.run_id, plain.run_id, cause, _gap_sentence(audit))


def num_unsteady(requests: Sequence[FinishedRequest]) -> int:
    """Number of prompts with different greedy answers in different repeats."""
    texts: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for r in requests:
        texts.setdefault((r.suite, r.prompt, r.turn), set()).add(r.output_ids)
    return sum(len(answers) > 1 for answers in texts.values())


def trust_in(verdict: Verdict | None, *, lossless: bool) -> str:
    """A sentence on a configuration's texts; empty where they cannot be compared."""
    if not lossless:
        return LOSSY
    if verdict is None:
        return ""
    return TRUST[verdict.cause]


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafting configuration; its speedup is None where nothing could be compared.

    Attributes:
        trust: a sentence on its answers.
        dropped: whether a search dropped it because it was slower.
    """

    name: str
    speedup: Speedup | None
    trust: str
    dropped: bool = False


def headline(
    plain: str,
    contenders: Sequence[Contender],
    over: Callable[[str, str], Speedup | None],
    *,
    preliminary: str = "",
) -> tuple[str, str | None]:
    """A conclusion from the figures so far, in sentences, and the fastest configuration.

    The latter is None unless the intervals separate it from all others, plain decoding included.
    The conclusion is empty while nothing is measured.

    Args:
        plain: name of plain decoding's configuration.
        over: speedup of one configuration over another, plain decoding's included, on the requests
            that both answered; its interval allows for as many comparisons as there are contenders.
        preliminary: progress of an unfinished experiment: `4 of 24 requests`.
    """
    measured = [(one, one.speedup) for one in contenders if one.speedup is not None]
    reliable = [(one, fast, fast.ratio) for one, fast in measured if fast.ratio is not None]
    doubted = ", ".join(one.name for one, fast in measured if fast.ratio is None)
    doubts = [NO_NUMBER.format(doubted, DOUBTS["cheap step"])] if doubted else []
    if not reliable:
        return " ".join(doubts), None
    best, fast, ratio = max(reliable, key=lambda one: one[2])
    if preliminary:
        leads = f"{best.name} leads at" if ratio > 1 else f"plain decoding leads; {best.name} is at"
        return f"Preliminary ({preliminary}): {leads} {fast.text}.", None
    text, fastest = _ranked(plain, [one for one, _ in measured], best, fast, over)
    return " ".join((text, *doubts)), fastest


def _ranked(
    plain: str,
    contenders: Sequence[Contender],
    best: Contender,
    fast: Speedup,
    over: Callable[[str, str], Speedup | None],
) -> tuple[str, str | None]:
    """The conclusion where `best` has the highest speedup."""
    reached = f"{best.name} reaches {fast.text} plain decoding ({evidence(fast, len(contenders))})"
    if fast.low is None:
        return f"{reached}. {UNSURE.format(fast.interval)}", None

    def ahead(one: str, other: str) -> bool:
        return bool((ratio := over(one, other)) and ratio.faster)

    if all(ahead(plain, one.name) for one in contenders):
        return f"Plain decoding is the fastest here. Next, {reached}.", plain
    if not ahead(best.name, plain):
        if fast.ratio is not None and fast.ratio < 1:
            return f"No gain over plain decoding: {reached}.", None
        many = len(contenders)
        allowing = f", allowing for the choice among {many}" if many > 1 else ""
        return f"{reached}. {NOT_APART.format(f'plain decoding{allowing}')}", None
    rivals = [one for one in contenders if one is not best and not one.dropped]
    behind = [one for one in rivals if not ahead(best.name, one.name)]
    # Disjoint intervals are never called inseparable.
    ties = [o for o in behind if not (o.speedup and o.speedup.high and o.speedup.high < fast.low)]
    if ties:
        unclear = " ".join(_not_apart(best.name, ties, over))
        return f"{reached}, the highest speedup. {unclear} {best.trust}".rstrip(), None
    text = f"{best.name} is the fastest: {fast.text} plain decoding"
    return f"{text} ({evidence(fast, len(contenders))}). {best.trust}".rstrip(), best.name


def _not_apart(
    best: str, ties: Sequence[Contender], over: Callable[[str, str], Speedup | None]
) -> list[str]:
    """Sentences on the contenders that the measurements do not separate from the best."""
    causes = {
        one.name: ratio.interval if ratio else "no requests in common"
        for one in ties
        if (ratio := over(best, one.name)) is None or ratio.low is None
    }
    alike = [one.name for one in ties if one.name not in causes]
    sentences = [NOT_APART.format(", ".join(alike))] if alike else []
    listed = ", ".join(f"{name} ({cause})" for name, cause in causes.items())
    return [*sentences, f"How far it is ahead of {listed} is not known."] if causes else sentences


def evidence(fast: Speedup, num_contenders: int = 1) -> str:
    """The interval, and the number of prompts and repeats behind it."""
    answers = f"{plural(fast.num_prompts, 'prompt')} × {plural(fast.num_repeats, 'repeat')}"
    if fast.low is None:
        return answers
    interval = f"95% interval {fast.interval}"
    if num_contenders > 1:
        interval = f"exploratory {interval}, best of {num_contenders}"
    return f"{interval}; {answers}"


# ---- audits

ARTIFACT = "audit"
"""Kind of an audit in the log; its key names the two runs."""
Audits = Mapping[tuple[str, str], Audit]
"""By run and plain decoding's run."""
_AUDIT = TypeAdapter(Audit)


def divergences(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, int]]:
    """The pairs whose texts differ, each with the index of the first differing token."""
    for own, plain in pairs:
        at = first_divergence(own.output_ids, plain.output_ids)
        if at is not None:
            yield (own, plain), at


def audit_divergences(
    target: Target,
    log: RunLog,
    pairs: Sequence[Pair],
    *,
    benchmark_id: str,
    most: int,
    on_audit: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Audit the first differing answers of a configuration, and store the audits."""
    differing = list(divergences(pairs))[:most]
    known = log.wait_for(partial(audits_of, log, benchmark_id)) if differing else {}
    for (own, plain), _ in differing:
        if cancelled():
            return
        stored = log.wait_for(partial(log.get, plain.run_id))
        if stored is None or (own.run_id, plain.run_id) in known:
            continue
        on_audit()
        texts = plain.output_ids, own.output_ids
        allowed = partial(allowed_after, target, Sampling.parse(stored.sampling))
        text_len = len(stored.prompt_ids) + Limits.parse(stored.limits).max_new_tokens
        result = attempt(
            partial(audit, target, stored.prompt_ids, *texts, allowed=allowed, text_len=text_len),
            where=f"the audit of {own.run_id}",
        )
        if result is not None and not isinstance(result, Fault):
            log.artifacts.put(
                ARTIFACT,
                {"own": own.run_id, "plain": plain.run_id},
                meta=asdict(result),
                payload=b"",
                benchmark_id=benchmark_id,
            )


def audits_of(log: RunLog, benchmark_id: str) -> Audits:
    stored = log.artifacts.find(ARTIFACT, benchmark_id=benchmark_id)
    return {(one.key["own"], one.key["plain"]): _AUDIT.validate_python(one.meta) for one in stored}


def _gap_sentence(audit: Audit) -> str:
    """The target's logits where two texts diverge, in a sentence."""
    view = audit.view
    behind = view.plain_logit - view.own_logit
    return (
        f"{view.dtype}: top-2 logit gap {view.gap:.3g} ({view.best!r} over {view.second!r}; "
        f"adjacent numbers there are {view.unit:.2g} apart). The method's {audit.own_token!r} is "
        f"the target's choice {view.own_rank}, {abs(behind):.3g} "
        f"{'below' if behind >= 0 else 'above'} plain decoding's {audit.plain_token!r}."
    )
