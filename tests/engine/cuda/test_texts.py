"""By graphs and without, the same texts are written, step by step, with every kind of method."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.model.target import Target
from engine.steps import End, Prefill, Record, Step
from tests.engine.cuda.targets import captured, model_of, plain, runner_of
from tests.engine.methods import drafter_for
from tests.models import plain_greedy

pytestmark = pytest.mark.slow

METHODS = [
    *("plain", "ngram", "suffix", "lookahead", "recycling", "eagle", "eagle-chain"),
    *("eagle-dynamic", "eagle3", "eagle3-dynamic", "medusa", "redrafter", "draft-model", "auto"),
]
TOKENS = 32
LONG = {"max_position_embeddings": 1024, "eos_token_id": None}


def drafter_of(target: Target, name: str) -> Any:
    model = model_of("llama", **{**LONG, "hidden_size": 16, "num_hidden_layers": 1})
    small = captured(model) if target.name == "captured" else plain(model)
    if name == "auto":
        return drafter_for(target, "eagle", "auto", small=small)
    return drafter_for(target, name, small=small)


def records(target: Target, drafter: Any, prompt: list[int], **options: Any) -> list[Record]:
    limits = Limits(max_new_tokens=options.pop("tokens", TOKENS), ignore_eos=True)
    return list(decode(target, drafter, prompt, limits=limits, sampling=Sampling(**options)))


def assert_same_steps(ours: list[Record], theirs: list[Record]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Step):
            assert isinstance(other, Step)
            for field in ("tokens", "parents", "ranks", "accepted", "bonus", "context_len"):
                assert getattr(mine, field) == getattr(other, field), field
            near: dict[str, Any] = {"rel": 1e-3, "abs": 1e-5}
            for field in ("target_probs", "draft_probs"):
                pairs = zip(getattr(mine, field), getattr(other, field), strict=True)
                for a, b in pairs:
                    assert (a is None) == (b is None)
                    assert a is None or a == pytest.approx(b, **near), field
        elif isinstance(mine, Prefill):
            assert isinstance(other, Prefill) and mine.token_id == other.token_id
        else:
            assert mine == other


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_that_of_the_plain_engine(name: str) -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    ours.new_cache(600).free()  # room for both texts from the start: graphs stay
    rng = random.Random(3)
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [rng.randrange(256) for _ in range(236)]]
    drafters = [drafter_of(target, name) for target in (ours, theirs)]
    for prompt in prompts:
        mine, other = (
            records(*pair, prompt) for pair in zip((ours, theirs), drafters, strict=True)
        )
        if name == "auto":  # its choices follow the clock, its text does not
            assert mine[-1].output_ids == other[-1].output_ids  # type: ignore[union-attr]
        else:
            assert_same_steps(mine, other)
        end = mine[-1]
        assert isinstance(end, End) and list(end.output_ids) == plain_greedy(theirs, prompt, TOKENS)
    assert {256, 384} <= {size.context for size in runner_of(ours).buckets}


@pytest.mark.parametrize("name", ["plain", "eagle", "eagle-dynamic", "draft-model"])
def test_a_seed_repeats_a_sampled_text(name: str) -> None:
    ours = captured(model_of("llama", **LONG))
    drafter = drafter_of(ours, name)
    texts = []
    for seed in (1, 1, 2):
        *steps, end = records(ours, drafter, [7, 8, 9], tokens=16, temperature=0.9, seed=seed)
        committed = [t for step in steps if isinstance(step, Step) for t in step.committed]
        assert isinstance(end, End) and committed[:15] == list(end.output_ids)[1:]
        texts.append(end.output_ids)
    assert texts[0] == texts[1] != texts[2]


def test_a_model_that_waits_for_the_device_goes_on_without_graphs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("gpt_neox", eos_token_id=None)
    theirs, ours = plain(model), captured(model)
    prompt = [4, 5, 6, 7]
    expected = plain_greedy(theirs, prompt, 30)
    attention = model.gpt_neox.layers[1].attention
    forward = attention.forward

    def waits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert bool(hidden_states.isfinite().all())
        return forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", waits)
    drafter = drafter_of(ours, "ngram")
    for _ in range(2):
        *_, end = records(ours, drafter, prompt, tokens=30)
        assert isinstance(end, End) and list(end.output_ids) == expected
    assert not runner_of(ours).buckets
    assert "given up: aten" in ours.environment()["cuda_graphs"]
    assert ours.environment()["forward"] == "transformers' modules"
    assert [r.message for r in caplog.records if "Verifying without" in r.message] == [
        f"Verifying without a tape of operators from here on: {runner_of(ours)._fault}"
    ]
