"""The sentence under an answer: how fast it was beside plain decoding, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.metrics import HARDLY, SAME, Balance, StepParts
from playground.host.plain import PlainStep

LEAST_STEPS = 4
"""Steps before which there is no sentence: the first ones are not like the rest."""
COSTS = {"draft": "drafting", "verify": "verifying", "other": "the rest"}
ADVICE = {
    "draft": "Drafting costs most: draft fewer tokens, or choose a method that needs no model.",
    "verify": "Verifying costs most: draft fewer tokens, or make the tree smaller.",
    "other": "The time goes neither into drafting nor into verifying.",
}
NO_DRAFTS = "Hardly any draft is accepted on this text."
SOURCES = {
    "run": "Plain decoding: {:.1f} tok/s, from a run of the log.",
    "measured": "Plain decoding: {:.1f} tok/s, timed for a moment after a run.",
}


def result_of(
    metrics: Mapping[str, Any], plain: PlainStep | None, *, is_plain: bool
) -> dict[str, str] | None:
    """The sentence in parts: `mood`, `head`, `text`, `advice`, `source`; None where none can be.

    Args:
        metrics: of the run, so far or in the end.
        is_plain: whether it is plain decoding itself.
    """
    tok_s, steps = metrics.get("tok_s"), metrics.get("num_steps") or 0
    split = metrics.get("time_split")
    if not tok_s or not split or steps < LEAST_STEPS:
        return None
    if is_plain:
        text = f"one token a step, {1000 / tok_s:.1f} ms each. Speedups are measured against it."
        return _said("plain", "Plain decoding:", text)
    if plain is None:
        return None
    # Committed tokens and whole seconds, so that the result is the ratio of the two tok/s.
    tokens = (metrics["num_new_tokens"] - 1) / steps
    draft_s, verify_s = split["draft_s"], split["verify_s"]
    own = StepParts(draft_s, verify_s, max(0.0, tokens / tok_s - draft_s - verify_s))
    balance = Balance.of(tokens, own, plain.parts)
    source = SOURCES[plain.source].format(plain.tok_s)
    return _compared(balance, source)


def _compared(balance: Balance, source: str) -> dict[str, str]:
    head = f"{balance.formula:.2f} × plain decoding:"
    costs = f"a step costs {1 + balance.total:.2f} plain steps"
    if balance.formula > 1 + SAME:
        return _said("faster", head, f"{balance.mat:.2f} tokens a step, and {costs}.", source)
    parts = [f"{COSTS[name]} {round(paid, 2) + 0.0:+.2f}" for name, paid in balance.paid.items()]
    text = f"{balance.mat:.2f} tokens a step, but {costs} ({', '.join(parts)})."
    if balance.formula >= 1 - SAME:
        return _said("same", head, text, source)
    advice = NO_DRAFTS if balance.mat < HARDLY else ADVICE[balance.largest]
    return _said("slower", head, text, source, advice)


def _said(mood: str, head: str, text: str, source: str = "", advice: str = "") -> dict[str, str]:
    return {"mood": mood, "head": head, "text": text, "advice": advice, "source": source}
