"""By graphs and without, the same texts are written, step by step, with every kind of method."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters import parse_method
from engine.model.target import Target
from engine.steps import End, Prefill, Record, Step
from engine.tuning.controller import build_drafter
from tests.engine.cuda.targets import captured, model_of, plain, runner_of
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.fitted import save_medusa, save_redrafter
from tests.models import build_context, plain_greedy

pytestmark = pytest.mark.slow

DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12}
TAPS = {"eagle3_layers_to_capture": [0, 1, 2]}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"decoding_type": "Autoregressive"},
    "lookup": {"decoding_type": "NGram", "max_draft_len": 4},
    "suffix": {"decoding_type": "Suffix", "use_tree_spec": True},
    "window": {"decoding_type": "Lookahead"},
    "recycling": {"decoding_type": "Token_Recycling"},
    "eagle-tree": {"decoding_type": "Eagle"},
    "eagle-chain": {"decoding_type": "Eagle", "eagle_choices": [[0, 0, 0, 0, 0]]},
    "eagle-dynamic": {"decoding_type": "Eagle", **DYNAMIC, "max_draft_len": 4},
    "eagle3-chain": {"decoding_type": "Eagle3", **TAPS, "max_draft_len": 4},
    "eagle3-dynamic": {"decoding_type": "Eagle3", **TAPS, **DYNAMIC, "max_draft_len": 4},
    "medusa": {"decoding_type": "Medusa"},
    "redrafter": {"decoding_type": "ReDrafter", "beam_width": 4, "beam_length": 5},
    "draft-model": {"decoding_type": "Draft_Target", "max_draft_len": 4},
    "auto": {"decoding_type": "Eagle", "drafting": "auto"},
}
TOKENS = 32
LONG = {"max_position_embeddings": 1024, "eos_token_id": None}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("heads")
    target = plain(model_of("llama", **LONG))
    return {
        "Eagle": str(save_eagle(root / "eagle", target)),
        "Eagle3": str(save_eagle3(root / "eagle3", target, (1, 2, 3), draft_vocab=64)),
        "Medusa": str(save_medusa(root / "medusa", target, num_heads=4)),
        "ReDrafter": str(save_redrafter(root / "redrafter", target)),
        "Draft_Target": "small",
    }


def small_model() -> Any:
    return model_of("llama", **{**LONG, "hidden_size": 16, "num_hidden_layers": 1})


def drafter_for(target: Target, name: str, heads: dict[str, str]) -> Any:
    values = dict(METHODS[name])
    if values["decoding_type"] in heads:
        values["speculative_model"] = heads[values["decoding_type"]]
    small = captured(small_model()) if target.name == "captured" else plain(small_model())
    return build_drafter(
        parse_method({"drafting": "as set", **values}), build_context(target, small=small)
    )


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
def test_every_step_is_that_of_the_plain_engine(name: str, heads: dict[str, str]) -> None:
    model = model_of("llama", **LONG)
    theirs, ours = plain(model), captured(model)
    ours.new_cache(600).free()  # room for both texts from the start: graphs stay
    rng = random.Random(3)
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [rng.randrange(256) for _ in range(236)]]
    drafters = [drafter_for(target, name, heads) for target in (ours, theirs)]
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


@pytest.mark.parametrize("name", ["plain", "eagle-tree", "eagle-dynamic", "draft-model"])
def test_a_seed_repeats_a_sampled_text(name: str, heads: dict[str, str]) -> None:
    ours = captured(model_of("llama", **LONG))
    drafter = drafter_for(ours, name, heads)
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
    drafter = drafter_for(ours, "lookup", {})
    for _ in range(2):
        *_, end = records(ours, drafter, prompt, tokens=30)
        assert isinstance(end, End) and list(end.output_ids) == expected
    assert not runner_of(ours).buckets
    assert "given up: aten" in ours.environment()["cuda_graphs"]
    assert ours.environment()["forward"] == "transformers' modules"
    assert [r.message for r in caplog.records if "Verifying without" in r.message] == [
        f"Verifying without a tape of operators from here on: {runner_of(ours)._fault}"
    ]
