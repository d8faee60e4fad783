"""The audit finds the first token that differs and tells a near-tie from a mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.model.audit import audit, forward_mismatch, reference_logits, spacing
from engine.model.forward import ModulesForward
from engine.model.target import Target
from engine.proposal import TargetOutput
from tests.engine.test_verify_tree import plain_logits
from tests.models import plain_greedy, tiny_model, tiny_target

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(eos_token_id=None)


def test_a_wrong_token_is_no_near_tie(target: Target) -> None:
    plain = plain_greedy(target, PROMPT, 12)
    logits = plain_logits(target, PROMPT + plain[:7])
    wrong = int(logits.topk(40).indices[-1])
    result = audit(target, PROMPT, plain, [*plain[:7], wrong, 1, 2])
    assert result is not None
    top = logits.topk(2)
    assert result.view.gap == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-3)
    assert result.view.plain_logit == pytest.approx(float(top.values[0]), abs=1e-3)
    assert result.view.own_logit == pytest.approx(float(logits[wrong]), abs=1e-3)
    assert result.view.own_rank == 40
    assert not result.view.near_tie
    assert result.view.dtype == "float32"


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
    logit = float(plain_logits(target, PROMPT + plain[:at]).max())
    with torch.no_grad():
        head[rival] = head[plain[at]] * (1 - logit_gap / logit)
    return rival


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flip_between_two_equal_logits_is_a_near_tie(dtype: torch.dtype) -> None:
    target = tiny_target(eos_token_id=None)
    target.model.to(dtype)
    plain = plain_greedy(target, PROMPT, 6)
    rival = near_tied(target, plain, 4, 0.0)
    result = audit(target, PROMPT, plain, [*plain[:4], rival])
    assert result is not None
    assert result.view.near_tie
    assert result.view.gap == pytest.approx(0.0, abs=result.view.unit)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (20.0, torch.bfloat16, 0.125),
        (-20.0, torch.float16, 2.0**-6),
        (1.0, torch.float32, 2.0**-23),
        (0.75, torch.float32, 2.0**-24),
    ],
)
def test_spacing_is_the_distance_to_the_next_float(
    value: float, dtype: torch.dtype, expected: float
) -> None:
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
    ("fault", "message"),
    [
        ("", None),
        ("siblings seen", "logits differ"),
        ("positions", "logits differ"),
        ("one row", "logits differ"),
        ("not a number", "logits are not numbers"),
        ("argmax", "most probable token"),
        ("totals", "its logsumexp"),
        ("raises", "it failed: no such instruction"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_forward_is_found_out(fault: str, message: str | None, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    expected = reference_logits(Target(model, None, name="plain"))
    result = forward_mismatch(
        Target(model, None, name="fast", forward=Changed(model, fault)), expected
    )
    assert result is None if message is None else message in str(result)
