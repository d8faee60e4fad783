"""The sentence under an answer: how fast it was beside plain decoding, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine import formats
from engine.metrics import SAME, Balance, hardly_drafts, tokens_per_step
from playground.host.plain import PlainStep, step_parts

LEAST_STEPS = 4
"""Steps before which there is no sentence: the first ones are not like the rest."""
SURE_STEPS, SURE_SHARE = 16, 0.8
"""Undisturbed steps, and their share of all, below which the sentence says that it is uncertain."""
COSTS = {"draft": "drafting", "verify": "verifying", "other": "the rest"}
ADVICE = {
    "draft": "Drafting costs most: draft fewer tokens, or choose a method that needs no model.",
    "verify": "Verifying costs most: draft fewer tokens, or make the tree smaller.",
    "other": "Neither drafting nor verifying takes most of the time.",
}
NO_DRAFTS = "Hardly any draft is accepted on this text."
SOURCES = {
    "around": "Plain decoding: {} tok/s, timed briefly before and after this run.",
    "run": "Plain decoding: {} tok/s, from a run in the log.",
    "measured": "Plain decoding: {} tok/s, timed briefly after a run.",
}
CHEAPEST = 0.9
"""Plain steps below which no step can cost: the machine was busier under plain decoding."""
DOUBTS = {
    "apart": "plain decoding was not timed before and after this run.",
    "drift": "the speed of the machine changed while this ran.",
    "noise": "the machine was busy while plain decoding was timed.",
    "uneven": "the machine was busier while plain decoding was timed.",
    "few": "only {quiet} steps could be compared.",
    "busy": "the machine was busy with something else during {disturbed} of {steps} steps, which "
    "are left out.",
}
UNCERTAIN = "Uncertain: {} Compare measures both in turn."
SOME = "Left out: {disturbed} of {steps} steps, slowed by other work on the machine."


def result_of(
    metrics: Mapping[str, Any], plain: PlainStep | None, *, is_plain: bool
) -> dict[str, str] | None:
    """The sentence in parts: `mood`, `head`, `text`, `advice`, `source`; None where none can be.

    Args:
        metrics: of the run, so far or in the end.
        is_plain: whether it is plain decoding itself.
    """
    tok_s = metrics.get("tok_s")
    if not tok_s or (metrics.get("num_steps") or 0) < LEAST_STEPS:
        return None
    if is_plain:
        each = formats.duration(1000 / tok_s)
        text = f"one token a step, {each} each. Speedups are measured against it."
        return _said("plain", "Plain decoding:", text)
    weighed = weigh(metrics, plain)
    if plain is None or weighed is None:
        return None
    source = SOURCES[plain.source].format(formats.tok_s(plain.tok_s))
    return _compared(weighed, " ".join(filter(None, (weighed.remark, source))))


@dataclass(frozen=True, slots=True)
class Weighed:
    """A run beside plain decoding, and how far to trust it.

    Attributes:
        is_sure: whether its speedup may be given to two decimals, and recommended.
        remark: why not, or what was left out; empty where there is nothing to say.
    """

    balance: Balance
    is_sure: bool
    remark: str


def weigh(metrics: Mapping[str, Any], plain: PlainStep | None) -> Weighed | None:
    """A run's balance: all the tokens it committed, the time of undisturbed steps.

    What it committed depends on the text alone; how long a step took, on the machine too.
    """
    own, steps = step_parts(metrics), metrics.get("num_steps")
    if plain is None or own is None or not steps:
        return None
    tokens = tokens_per_step(metrics["num_new_tokens"], steps)
    assert tokens is not None
    balance = Balance.of(tokens, own, plain.parts)
    disturbed = metrics.get("num_disturbed", 0)
    quiet = steps - disturbed
    doubt: str | None = plain.doubt
    if doubt is None and 1 + balance.total < CHEAPEST:
        doubt = "uneven"
    if doubt is None and quiet < SURE_SHARE * steps:
        doubt = "busy"
    if doubt is None and quiet < SURE_STEPS:
        doubt = "few"
    said = [UNCERTAIN.format(DOUBTS[doubt])] if doubt else []
    if disturbed and doubt != "busy":
        said.append(SOME)
    remark = " ".join(said).format(steps=steps, disturbed=disturbed, quiet=quiet)
    return Weighed(balance, doubt is None, remark)


def _compared(weighed: Weighed, source: str) -> dict[str, str]:
    balance = weighed.balance
    formula, is_sure = balance.formula, weighed.is_sure
    speedup = formats.speedup(formula) if is_sure else f"About {formats.figure(formula, 1, '×')}"
    head = f"{speedup} plain decoding:"
    costs = f"a step costs {formats.figure(1 + balance.total)} plain steps"
    tokens = formats.mat(balance.mat)
    if balance.formula > 1 + SAME:
        return _said("faster", head, f"{tokens} tokens a step, and {costs}.", source)
    parts = [f"{COSTS[name]} {round(paid, 2) + 0.0:+.2f}" for name, paid in balance.paid.items()]
    text = f"{tokens} tokens a step, but {costs} ({', '.join(parts)})."
    if balance.formula >= 1 - SAME:
        return _said("same", head, text, source)
    advice = NO_DRAFTS if hardly_drafts(balance.mat) else ADVICE[balance.largest]
    return _said("slower", head, text, source, advice)


def _said(mood: str, head: str, text: str, source: str = "", advice: str = "") -> dict[str, str]:
    return {"mood": mood, "head": head, "text": text, "advice": advice, "source": source}
