"""The fused forward computes what transformers' modules compute, on prompts, pieces and trees."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from engine.config import Limits
from engine.decode import decode
from engine.drafters.autoregressive import AutoregressiveConfig
from engine.kernels.cpu import architecture
from engine.model.forward import prepare_attention
from engine.model.loading import load_target
from engine.model.sources import TargetSpec
from engine.model.target import Target
from engine.proposal import Needs, Proposal, TargetOutput
from engine.steps import End
from engine.tree import TreeShape
from tests.engine.cpu.targets import VARIANTS, fused, plain, variant_model
from tests.engine.scripted import ScriptedDrafter, random_parents
from tests.models import VOCAB, plain_greedy, save_tiny, tiny_model, workbench

NEAR = {"rtol": 1e-4, "atol": 2e-4}
ALL = Needs(hidden=True, layers=(0, 2, 3))


def pair(name: str) -> tuple[Target, Target]:
    model = variant_model(name)
    return plain(copy.deepcopy(model)), fused(model)


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def assert_same(ours: TargetOutput, theirs: TargetOutput) -> None:
    assert ours.logits.shape == theirs.logits.shape
    torch.testing.assert_close(ours.logits, theirs.logits, **NEAR)
    torch.testing.assert_close(ours.hidden, theirs.hidden, **NEAR)
    torch.testing.assert_close(ours.layers, theirs.layers, **NEAR)


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_pieces_and_trees_equal_transformers_modules(name: str) -> None:
    theirs, ours = pair(name)
    rng = random.Random(4)
    caches = {target: target.new_cache(4) for target in (theirs, ours)}
    for count in (17, 1, 5):
        prompt = tokens_of(rng, count)
        output = [t.prefill(prompt, caches[t], ALL) for t in (ours, theirs)]
        assert_same(*output)
    for _ in range(6):
        shape = TreeShape(random_parents(rng, rng.randint(1, 20)))
        proposal = Proposal(torch.tensor(tokens_of(rng, len(shape))), shape)
        output = [t.verify(proposal, caches[t], ALL) for t in (ours, theirs)]
        assert_same(*output)
        path = (0, *shape.path_to(rng.randrange(len(shape))))
        for cache in caches.values():
            cache.commit(path)
    rows = caches[ours].length
    for mine, other in zip(caches[ours]._buffers, caches[theirs]._buffers, strict=True):
        torch.testing.assert_close(mine[:, :, :rows], other[:, :, :rows], **NEAR)


@pytest.mark.parametrize(
    "name", ["llama", "llama3-rotary", "mistral-sliding", "qwen2-half-sliding", "qwen3"]
)
def test_greedy_text_equals_transformers_generate(name: str) -> None:
    theirs, ours = pair(name)
    prompt = tokens_of(random.Random(2), 11)
    expected = plain_greedy(theirs, prompt, 20)
    limits = Limits(max_new_tokens=20)
    for truth in (0.6, 1.0):
        drafter = ScriptedDrafter(
            expected,
            vocab=VOCAB,
            shape=lambda rng: random_parents(rng, rng.randint(1, 16)),
            truth=truth,
        )
        *_, end = decode(ours, drafter, prompt, limits=limits)
        assert isinstance(end, End) and list(end.output_ids) == expected
    alone = AutoregressiveConfig().build(workbench(ours))
    *_, end = decode(ours, alone, prompt, limits=limits)
    assert isinstance(end, End) and list(end.output_ids) == expected


def test_positions_beyond_the_rotary_table_extend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.cpu.rotary.BLOCK", 8)
    theirs, ours = pair("llama")
    prompt = tokens_of(random.Random(1), 21)
    caches = {target: target.new_cache(4) for target in (theirs, ours)}
    for start in range(0, 21, 3):
        output = [t.prefill(prompt[start : start + 3], caches[t], ALL) for t in (ours, theirs)]
        assert_same(*output)


def test_bfloat16_is_as_near_to_the_exact_logits_as_transformers_modules() -> None:
    exact, _ = pair("qwen2")
    model = variant_model("qwen2").to(torch.bfloat16)
    theirs, ours = plain(copy.deepcopy(model)), fused(model)
    rng = random.Random(6)
    prompt = tokens_of(rng, 20)
    proposal = Proposal(
        torch.tensor(tokens_of(rng, 12)), TreeShape(random_parents(random.Random(9), 12))
    )
    found = {}
    for name, target in (("exact", exact), ("theirs", theirs), ("ours", ours)):
        cache = target.new_cache(4)
        target.prefill(prompt, cache, Needs())
        found[name] = target.verify(proposal, cache, Needs()).logits.double()
    errors = {name: (found[name] - found["exact"]).pow(2).mean().sqrt() for name in found}
    assert 0 < errors["ours"] < 1.3 * errors["theirs"]


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM is computed by transformers' modules"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depend on the length",
        ),
    ],
)
def test_other_models_say_why_they_are_not_fused(
    family: str, overrides: dict[str, object], reason: str
) -> None:
    model = tiny_model(family, **overrides)
    prepare_attention(model)
    assert reason in (architecture.why_not(model) or "")


def test_half_precision_without_fast_products_is_not_fused() -> None:
    assert "float16" in (architecture.why_not(tiny_model("llama").half()) or "")


def test_a_loaded_target_says_what_runs_it(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    for family, name in (("qwen3", "fused, packed"), ("gpt_neox", "transformers' modules")):
        folder = save_tiny(tmp_path / family, family)
        spec = TargetSpec(name="tiny", path=str(folder))
        target = load_target(spec, dtype="float32", device="cpu", cache_dir=tmp_path)
        assert target.environment()["forward"] == name
