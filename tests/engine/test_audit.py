"""The audit finds the first token that differs and tells a near-tie from a mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.metrics import first_divergence
from engine.model.audit import (
    Audit,
    audit,
    disagreement,
    reference_logits,
    spacing,
)
from engine.model.forward import ModulesForward
from engine.model.target import Target
from engine.proposal import TargetOutput
from tests.models import plain_greedy, tiny_model, tiny_target

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(eos_token_id=None)


def full_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """The reference: transformers alone, no cache of ours."""
    model = target.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        model.set_attn_implementation(ours)
    return out.logits[0, -1].float()


@pytest.mark.parametrize(
    ("plain", "own", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [5], 0),
        ([], [], None),
    ],
)
def test_first_divergence(plain: list[int], own: list[int], at: int | None) -> None:
    assert first_divergence(plain, own) == at
    assert first_divergence(tuple(own), plain) == at


def test_a_wrong_token_is_no_near_tie(target: Target) -> None:
    plain = plain_greedy(target, PROMPT, 12)
    logits = full_logits(target, PROMPT + plain[:7])
    wrong = int(logits.topk(40).indices[-1])
    found = audit(target, PROMPT, plain, [*plain[:7], wrong, 1, 2])
    assert found is not None and found.exact is None
    top = logits.topk(2)
    assert found.index == 7
    assert found.view.gap == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-3)
    assert found.view.plain_logit == pytest.approx(float(top.values[0]), abs=1e-3)
    assert found.view.own_logit == pytest.approx(float(logits[wrong]), abs=1e-3)
    assert found.view.own_rank == 40
    assert not found.view.near_tie
    assert found.view.dtype == "float32"


def test_equal_texts_and_a_text_that_only_ends_early_have_nothing_to_look_at(
    target: Target,
) -> None:
    plain = plain_greedy(target, PROMPT, 5)
    assert audit(target, PROMPT, plain, plain) is None
    assert audit(target, PROMPT, plain, plain[:3]) is None


def near_tied(target: Target, plain: list[int], at: int, logit_gap: float) -> int:
    """Give an unused token the likeliest one's output row, a little smaller; returns the token."""
    rival = next(t for t in range(200) if t not in plain)
    head = target.lm_head.get_parameter("weight")
    logit = float(full_logits(target, PROMPT + plain[:at]).max())
    with torch.no_grad():
        head[rival] = head[plain[at]] * (1 - logit_gap / logit)
    return rival


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flip_between_two_equal_logits_is_a_near_tie(dtype: torch.dtype) -> None:
    target = tiny_target(eos_token_id=None)
    target.model.to(dtype)
    plain = plain_greedy(target, PROMPT, 6)
    rival = near_tied(target, plain, 4, 0.0)
    found = audit(target, PROMPT, plain, [*plain[:4], rival])
    assert found is not None
    assert found.view.near_tie
    assert found.view.gap == pytest.approx(0.0, abs=found.view.unit)
    assert (found.exact is None) == (dtype == torch.float32)


def test_half_precision_gets_a_second_opinion_in_float32() -> None:
    exact_target = tiny_target(eos_token_id=None)
    target = tiny_target(eos_token_id=None)
    target.model.to(torch.bfloat16)
    exact_target.model.to(torch.bfloat16).float()
    plain = plain_greedy(target, PROMPT, 6)
    logits = full_logits(exact_target, PROMPT + plain[:3])
    own = int(logits.topk(9).indices[-1])
    found = audit(target, PROMPT, plain, [*plain[:3], own])
    assert isinstance(found, Audit) and found.exact is not None
    assert found.exact.dtype == "float32" and found.view.dtype == "bfloat16"
    assert found.exact.own_logit == pytest.approx(float(logits[own]), abs=1e-3)
    assert found.view.own_logit == pytest.approx(found.exact.own_logit, abs=1.0)
    assert target.dtype == torch.bfloat16
    without = audit(target, PROMPT, plain, [*plain[:3], own], in_float32=False)
    assert without is not None and without.exact is None


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (20.0, torch.bfloat16, 0.125),
        (-20.0, torch.float16, 2.0**-6),
        (1.0, torch.float32, 2.0**-23),
        (0.75, torch.float32, 2.0**-24),
    ],
)
def test_spacing(value: float, dtype: torch.dtype, expected: float) -> None:
    assert spacing(value, dtype) == expected
    larger = torch.nextafter(torch.tensor(value, dtype=dtype).abs(), torch.tensor(1e4, dtype=dtype))
    assert spacing(value, dtype) == pytest.approx(float(larger) - abs(value))


# ---- a fast forward against transformers' modules


class Changed(ModulesForward):
    """transformers' modules, with one thing wrong."""

    name = "changed"

    def __init__(self, model: Any, fault: str) -> None:
        super().__init__(model)
        self.fault = fault

    def __call__(self, rows, cache, needs, *, last_only) -> TargetOutput:
        if self.fault == "siblings seen" and rows.visible is not None:
            rows = rows._replace(visible=torch.ones_like(rows.visible).tril())
        if self.fault == "positions" and rows.visible is not None:
            rows = rows._replace(positions=torch.arange(len(rows.tokens)) + cache.length)
        if self.fault == "raises":
            raise RuntimeError("no such instruction\nat 0x0")
        output = super().__call__(rows, cache, needs, last_only=last_only)
        logits = output.logits
        if self.fault == "one row" and len(logits) == 1 and not last_only:
            logits = logits.roll(1, dims=-1)
        if self.fault == "not a number":
            logits = logits + torch.nan
        best = logits.argmax(dim=-1) + (self.fault == "argmax")
        totals = logits.float().logsumexp(dim=-1) + (self.fault == "totals")
        return dataclasses.replace(output, logits=logits, best=best, logsumexp=totals)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", None),
        ("siblings seen", "logits differ"),
        ("positions", "logits differ"),
        ("one row", "logits differ"),
        ("not a number", "logits are not numbers"),
        ("argmax", "likeliest token"),
        ("totals", "normalises"),
        ("raises", "it failed: no such instruction"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_forward_is_found_out(fault: str, said: str | None, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    expected = reference_logits(Target(model, None, name="plain"))
    found = disagreement(Target(model, None, name="fast", forward=Changed(model, fault)), expected)
    assert found is None if said is None else said in str(found)
