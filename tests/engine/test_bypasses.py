"""A step that drafts nothing says why, and so do the figures of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

import pytest

from engine.config import Sampling
from engine.drafters import parse_method
from engine.drafters.base import Drafter
from engine.model.target import Target
from engine.steps import BYPASSES, Bypass
from engine.tuning.controller import ControlledDrafter
from engine.tuning.experience import Experience
from engine.tuning.latency import LatencyCurve
from playground.host.result import bypass_sentence
from tests.engine.drafters.judges import write
from tests.engine.scripted import ScriptedDrafter
from tests.models import VOCAB, build_context, tiny_target

PROMPT = [200, 150, 201, 151, 202, 152, 203, 153, 204, 154, 205, 155]


def built(target: Target, small: Target | None = None, **settings: Any) -> Drafter:
    return parse_method(settings).build(build_context(target, small=small or target))


def with_model(**settings: Any) -> Callable[[Target], Drafter]:
    """Drafts with a model whose context is full after the prompt, and with special tokens alone."""
    context_len = settings.pop("context_len", 256)
    eos_ids = settings.pop("eos_ids", None)
    small = tiny_target("llama", max_position_embeddings=context_len, eos_token_id=eos_ids)
    settings = {"decoding_type": "Draft_Target", "speculative_model": "small", **settings}
    return lambda target: built(target, small, **settings)


def wrong(target: Target) -> Drafter:
    return ScriptedDrafter([], vocab=VOCAB, shape=lambda rng: [-1, 0], truth=0.0, seed=1)


def controlled(target: Target) -> Drafter:
    dear = LatencyCurve((1, 2), (1e4, 1e6))
    return ControlledDrafter(wrong(target), target, Experience.new(dear))


PARD = {"decoding_type": "PARD", "mask_token_id": 270}
LETTERS = Sampling(structured_output="regex", grammar="[ab]{30}")
CASES: dict[str, tuple[Bypass, Callable[[Target], Drafter], dict[str, Any]]] = {
    "lookup": ("no_match", lambda t: built(t, decoding_type="NGram"), {"tokens": 3}),
    "suffix": ("no_match", lambda t: built(t, decoding_type="Suffix"), {"tokens": 3}),
    "threshold": ("unsure", with_model(confidence_threshold=1.0), {}),
    "short context": ("draft_context", with_model(context_len=8), {}),
    "short context, text": ("draft_context", with_model(context_len=8, vocabulary="text"), {}),
    "short context, PARD": ("draft_context", with_model(context_len=8, **PARD), {}),
    "special tokens": ("no_text", with_model(vocabulary="text", eos_ids=[*range(VOCAB)]), {}),
    "length limit": ("room", lambda t: built(t, decoding_type="NGram"), {"tokens": 2}),
    "grammar": ("grammar", wrong, {"sampling": LETTERS}),
    "controller": ("not_worth_it", controlled, {}),
}


def test_every_reason_has_words_and_a_case() -> None:
    assert {*BYPASSES} == {*get_args(Bypass)} == {reason for reason, _, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_drafts_nothing_says_why(case: str) -> None:
    reason, make, how = CASES[case]
    target = tiny_target(eos_token_id=None)
    text = write(target, make(target), PROMPT, **{"tokens": 12, **how})
    steps, figures = text.steps, text.metrics
    assert reason in {step.bypass for step in steps}
    assert all((step.bypass is None) == (step.num_drafted > 0) for step in steps)
    assert figures.bypasses[reason] == sum(step.bypass == reason for step in steps)
    assert sum(figures.bypasses.values()) == sum(not step.num_drafted for step in steps)


def test_a_run_that_outgrows_its_draft_model_says_so() -> None:
    """Where other steps drafted, only what a better choice would mend is worth a sentence."""
    target = tiny_target(eos_token_id=None)
    drafter = with_model(context_len=len(PROMPT) + 8, confidence_threshold=0.001)(target)
    figures = write(target, drafter, PROMPT).metrics
    assert figures.num_drafted > 0
    count = figures.bypasses["draft_context"]
    assert bypass_sentence(asdict(figures)) == (
        "Sometimes nothing was drafted: the text is longer than the draft model's context "
        f"({count} of {figures.num_steps} steps)."
    )
    missed = {"num_steps": 9, "num_drafted": 5, "bypasses": {"no_match": 4}}
    assert bypass_sentence(missed) is None
    assert bypass_sentence({"num_steps": 5, "num_drafted": 0}) is None, "of an older version"


def test_plain_decoding_bypasses_nothing() -> None:
    target = tiny_target(eos_token_id=None)
    text = write(target, built(target, decoding_type="Autoregressive"), PROMPT)
    assert {step.bypass for step in text.steps} == {None} and text.metrics.bypasses == {}
    assert bypass_sentence(asdict(text.metrics)) is None
