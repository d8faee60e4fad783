"""Whether a configuration's texts are plain decoding's, why not, and which one is fastest.

In half precision a near-tie between two tokens can fall either way, in any engine. An audit, for
which the target is evaluated once more, tells that from a fault; see `engine.model.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from pydantic import TypeAdapter

from engine.config import Sampling
from engine.constraint import allowed_after
from engine.metrics import first_divergence
from engine.model.audit import Audit, View, audit
from engine.model.target import Target
from playground.errors import Fault, attempt
from playground.experiments.finished import FinishedRequest, Pair
from playground.experiments.report.statistics import Speedup
from playground.host.baseline import DOUBTS
from storage import RunLog

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
CAUSES: dict[Cause, tuple[str, str, str]] = {
    "near ties": ("near-ties", "warn", "a near-tie, which rounding alone can flip"),
    "fault": ("a fault", "bad", "rounding is not the cause, so the method is at fault"),
    "unknown": ("unexplained", "warn", "the cause has not been examined"),
}
"""A cause in a word or two, how bad it is, and in a sentence."""
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
LOSSY_SAMPLED = "Lossy by design, and sampled: the texts cannot be compared token by token."
UNSURE = "These are {}: add prompts or repeats to see how certain it is."
NOT_APART = "The measurements do not separate it from {}; more prompts or repeats would."
NO_NUMBER = "No speedup is given for {}: {} Measure again."


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs from plain decoding's, counted from 0 in the answer.

    Attributes:
        cause: whether rounding explains it.
        gap: what the target says of the two tokens there, in sentences.
    """

    suite: str
    prompt: str
    turn: int
    repeat: int
    at: int
    run_id: str
    reference_run_id: str
    cause: Cause = "unknown"
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

    @property
    def place(self) -> str:
        """In how many texts it differs, and where the first one does."""
        compared = self.num_compared
        num = f"{compared - self.num_identical} of {compared} texts"
        texts = num if compared > 1 else "the text"
        return (
            f"Differs from plain decoding in {texts}, first at token {self.divergences[0].at + 1}"
        )

    @property
    def sentence(self) -> str:
        """Whether a lossless method's texts are plain decoding's, and why not."""
        if self.identical:
            texts = f"{self.num_compared} texts" if self.num_compared > 1 else "1 text"
            return f"{self.num_tokens} tokens in {texts}, all identical to plain decoding's."
        return f"{self.place}: {CAUSES[self.divergences[0].cause][2]}."


def verdict_of(pairs: Sequence[Pair], audits: Audits) -> Verdict | None:
    """The verdict over answers and plain decoding's; None without any."""
    if not pairs:
        return None
    differences = [_divergence(pair, at, audits) for pair, at in divergences(pairs)]
    cause: Cause | None = None
    if differences:
        seen = {one.cause for one in differences}
        cause = next(one for one in ("fault", "near ties", "unknown") if one in seen)
    num_tokens = sum(len(own.output_ids) for own, _ in pairs)
    same = len(pairs) - len(differences)
    return Verdict(len(pairs), same, num_tokens, tuple(differences[:MAX_LISTED]), cause)


def _divergence(pair: Pair, at: int, audits: Audits) -> Divergence:
    own, plain = pair
    audit = audits.get((own.run_id, plain.run_id))
    if audit is None:
        return Divergence(*own.pair, at, own.run_id, plain.run_id)
    cause: Cause = "near ties" if audit.view.near_tie else "fault"
    return Divergence(*own.pair, at, own.run_id, plain.run_id, cause, gap_sentences(audit))


def num_unsteady(requests: Sequence[FinishedRequest]) -> int:
    """Prompts to which greedy decoding gave another answer in another repeat."""
    texts: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for r in requests:
        texts.setdefault((r.suite, r.prompt, r.turn), set()).add(r.output_ids)
    return sum(len(answers) > 1 for answers in texts.values())


def trust_in(verdict: Verdict | None, *, lossless: bool) -> Trust:
    """What can be said of a configuration's texts; None = they cannot be compared."""
    if not lossless:
        return "lossy"
    if verdict is None:
        return "sampled"
    return verdict.cause or "identical"


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration beside plain decoding; no speedup where nothing could be compared.

    Attributes:
        dropped: whether a search dropped it because it was slower.
    """

    name: str
    speedup: Speedup | None
    trust: Trust
    dropped: bool = False


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
        over: speedup of one configuration over another, plain decoding's included, on the requests
            that both answered; its interval allows for as many comparisons as there are contenders.
        preliminary: how much is done, while it is not all: `4 of 24 requests`.
    """
    measured = [(one, one.speedup) for one in contenders if one.speedup is not None]
    reliable = [(one, fast, fast.ratio) for one, fast in measured if fast.ratio is not None]
    doubted: dict[str, list[str]] = {}
    for one, fast in measured:
        if fast.doubt:
            doubted.setdefault(DOUBTS[fast.doubt], []).append(one.name)
    doubts = [NO_NUMBER.format(", ".join(names), why) for why, names in doubted.items()]
    if not reliable:
        return Headline(" ".join(doubts))
    best, fast, ratio = max(reliable, key=lambda one: one[2])
    if preliminary:
        leads = f"{best.name} leads at" if ratio > 1 else f"plain decoding leads; {best.name} is at"
        return Headline(f"Preliminary ({preliminary}): {leads} {fast.text}.")
    ranked = _ranked(plain, [one for one, _ in measured], best, fast, over)
    return Headline(" ".join((ranked.text, *doubts)), ranked.fastest)


def _ranked(
    plain: str,
    contenders: Sequence[Contender],
    best: Contender,
    fast: Speedup,
    over: Callable[[str, str], Speedup | None],
) -> Headline:
    """Which is the fastest, where `best` has the highest speedup of those that have one."""
    reached = f"{best.name} reaches {fast.text} plain decoding ({extent(fast, len(contenders))})"
    if fast.low is None:
        return Headline(f"{reached}. {UNSURE.format(fast.interval)}")

    def ahead(one: str, other: str) -> bool:
        return bool((ratio := over(one, other)) and ratio.faster)

    if all(ahead(plain, one.name) for one in contenders):
        return Headline(f"Plain decoding is the fastest here. Next, {reached}.", plain)
    if not ahead(best.name, plain):
        if fast.ratio is not None and fast.ratio < 1:
            return Headline(f"No gain over plain decoding: {reached}.")
        many = len(contenders)
        allowing = f", allowing for the choice among {many}" if many > 1 else ""
        return Headline(f"{reached}. {NOT_APART.format(f'plain decoding{allowing}')}")
    trust = TRUST_SENTENCES[best.trust]
    rivals = [one for one in contenders if one is not best and not one.dropped]
    behind = [one for one in rivals if not ahead(best.name, one.name)]
    # Of disjoint intervals nobody says that they are not separated.
    level = [o for o in behind if not (o.speedup and o.speedup.high and o.speedup.high < fast.low)]
    if level:
        sentences = [f"{reached}, the highest speedup.", *_not_apart(best.name, level, over), trust]
        return Headline(" ".join(filter(None, sentences)))
    text = f"{best.name} is the fastest: {fast.text} plain decoding"
    text += f" ({extent(fast, len(contenders))})."
    return Headline(" ".join(filter(None, (text, trust))), best.name)


def _not_apart(
    best: str, level: Sequence[Contender], over: Callable[[str, str], Speedup | None]
) -> list[str]:
    """What the measurements leave open, and of what they say nothing and why."""
    causes = {
        one.name: ratio.interval if ratio else "no requests in common"
        for one in level
        if (ratio := over(best, one.name)) is None or ratio.low is None
    }
    alike = [one.name for one in level if one.name not in causes]
    sentences = [NOT_APART.format(", ".join(alike))] if alike else []
    listed = ", ".join(f"{name} ({cause})" for name, cause in causes.items())
    return [*sentences, f"How far it is ahead of {listed} is not known."] if causes else sentences


def extent(fast: Speedup, num_contenders: int = 1) -> str:
    """The interval and what it comes from; of one picked as the best of several, exploratory."""
    parts = [
        f"{number} {noun}{'s' * (number > 1)}"
        for number, noun in ((fast.num_prompts, "prompt"), (fast.num_repeats, "repeat"))
    ]
    if fast.low is None:
        return " × ".join(parts)
    interval = f"95% interval {fast.interval}"
    if num_contenders > 1:
        interval = f"exploratory {interval}, best of {num_contenders}"
    return f"{interval}; {' × '.join(parts)}"


# ---- audits

ARTIFACT = "audit"
"""Kind of an audit in the log; its key names the two runs."""
AUDITS_EACH = 8
"""Answers of a configuration that are looked into, where they differ from plain decoding's."""
Audits = Mapping[tuple[str, str], Audit]
"""By run and plain decoding's run."""
_AUDIT = TypeAdapter(Audit)


def divergences(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, int]]:
    """The pairs whose texts differ, and at which token."""
    for own, plain in pairs:
        at = first_divergence(own.output_ids, plain.output_ids)
        if at is not None:
            yield (own, plain), at


def audit_divergences(
    target: Target,
    log: RunLog,
    pairs: Sequence[Pair],
    *,
    benchmark_id: str | None,
    most: int = AUDITS_EACH,
    tell: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Audit the first answers of a configuration that differ, and keep what was found.

    The very first is also checked on a float32 copy, where the target is small.
    """
    for n, ((own, plain), _) in enumerate(list(divergences(pairs))[:most]):
        if cancelled():
            return
        stored = log.wait_for(partial(log.get, plain.run_id))
        if stored is None or log.wait_for(partial(_find, log, own, plain)) is not None:
            continue
        tell()
        texts = plain.output_ids, own.output_ids
        allowed = partial(allowed_after, target, Sampling.parse(stored.sampling))
        result = attempt(
            partial(audit, target, stored.prompt_ids, *texts, allowed=allowed, in_float32=n == 0),
            where=f"the audit of {own.run_id}",
        )
        if result is not None and not isinstance(result, Fault):
            log.artifacts.put(
                ARTIFACT,
                {"own": own.run_id, "plain": plain.run_id},
                meta=asdict(result),
                payload=b"",
                run_id=own.run_id,
                benchmark_id=benchmark_id,
            )


def audits_of(log: RunLog, benchmark_id: str) -> Audits:
    kept = log.artifacts.find(ARTIFACT, benchmark_id=benchmark_id)
    return {(one.key["own"], one.key["plain"]): _AUDIT.validate_python(one.meta) for one in kept}


def _find(log: RunLog, own: FinishedRequest, plain: FinishedRequest) -> Audit | None:
    kept = log.artifacts.find(ARTIFACT, {"own": own.run_id, "plain": plain.run_id})
    return _AUDIT.validate_python(kept[0].meta) if kept else None


def gap_sentences(audit: Audit) -> tuple[str, ...]:
    """What the target says at the place where two texts part, one sentence per dtype."""
    views = [audit.view] if audit.exact is None else [audit.view, audit.exact]
    return tuple(_gap_sentence(audit, view) for view in views)


def _gap_sentence(audit: Audit, view: View) -> str:
    behind = view.plain_logit - view.own_logit
    return (
        f"{view.dtype}: top-2 logit gap {view.gap:.3g} ({view.best!r} over {view.second!r}; "
        f"adjacent numbers there are {view.unit:.2g} apart). The method's {audit.own_token!r} is "
        f"the target's choice {view.own_rank}, {abs(behind):.3g} "
        f"{'below' if behind >= 0 else 'above'} plain decoding's {audit.plain_token!r}."
    )
