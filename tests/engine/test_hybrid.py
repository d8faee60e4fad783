"""Models with recurrent layers: every row of a tree has its own parent's state, and no other's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.drafters import parse_method
from engine.errors import TargetError
from engine.metrics import measure
from engine.model.layer_types import check_can_roll_back
from engine.model.recurrent import RecurrentLayers
from engine.model.target import Target
from engine.proposal import Needs, Proposal
from engine.steps import Step
from engine.tree import TreeShape
from tests.engine.drafters.fitted import save_medusa
from tests.engine.drafters.judges import few_tokens, p_value, slow, target_of, write
from tests.engine.scripted import ALPHA, ScriptedDrafter, random_parents, tokens_of
from tests.engine.test_verify_tree import (
    SHAPES,
    SOME_FAMILIES,
    assert_close,
    plain_logits,
    random_path,
)
from tests.models import (
    HYBRIDS,
    VOCAB,
    alike,
    build_context,
    load_tiny,
    plain_greedy,
    tiny_model,
    tiny_target,
)

NEW_TOKENS = 12
PROMPT = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 10, 11, 7, 8, 9, 10, 7, 8]
"""Longer than a chunk of any layer and than the convolutions are wide."""
KINDS = ("qwen3_5_text", "lfm2", "jamba", "granitemoehybrid")
"""One family each of delta rule, convolution, state space and its second form."""
ONE_OF_EACH_KIND = [family if family in KINDS else slow(family) for family in HYBRIDS]
LIMITED = ("nemotron_h, limited", "zamba2, limited")
METHODS: dict[str, dict[str, Any]] = {
    "NGram": {"max_draft_len": 4},
    "Draft_Target": {"speculative_model": "alike", "max_draft_len": 3},
    "Suffix": {"use_tree_spec": True},
    "Token_Recycling": {},
    "Medusa": {"medusa_choices": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]},
    "Lookahead": {"max_window_size": 3, "max_ngram_size": 3, "max_verification_set_size": 3},
}


def same_states(target: Target, ours: Any, text: list[int]) -> None:
    """Keys, values and states are those of a fresh prefill."""
    fresh = target.new_cache(8)
    target.prefill(text, fresh, Needs())
    assert ours.length == fresh.length == len(text)
    assert ours.kv.slots.keys() == fresh.kv.slots.keys()
    for layer in fresh.kv.slots:  # buffers can have slots that no layer fills
        for mine, other in zip(ours.kv.layer(layer), fresh.kv.layer(layer), strict=True):
            assert_close(mine[:, :, : len(text)], other[:, :, : len(text)])
    if ours.recurrent is not None:
        assert fresh.recurrent is not None
        assert len(ours.recurrent.committed) == len(target.recurrent)
        for layer, states in fresh.recurrent.committed.items():
            assert ours.recurrent.committed[layer].keys() == states.keys() != set()
            for key, state in states.items():
                assert_close(ours.recurrent.committed[layer][key], state)


@pytest.mark.parametrize("family", [*SOME_FAMILIES, *ONE_OF_EACH_KIND])
def test_a_row_follows_its_own_path_and_a_commit_leaves_its_state(family: str) -> None:
    """By plain causal forwards, with attention alone, too; its prompt is read in pieces."""
    target, rng = target_of(family), random.Random(7)
    recurrent = len(target.recurrent) > 0
    assert recurrent == (family in {*HYBRIDS} - {"llama4_text"})  # it has attention alone
    text, cache = list(PROMPT), target.new_cache(8)
    for piece in (PROMPT[:4], PROMPT[4:5], PROMPT[5:]):
        target.prefill(piece, cache, Needs())
    for turn in range(3):
        size = 9 if recurrent else 20
        shape = TreeShape(random_parents(rng, size) if turn else [-1, 0, 1, 2, 3])
        tokens = tokens_of(rng, len(shape))
        shown = target.verify(Proposal(torch.tensor(tokens), shape), cache, Needs())
        for node in [rng.randrange(size)] if recurrent and turn else range(len(shape)):
            seen = [tokens[i] for i in (0, *shape.path_to(node))]
            assert_close(shown.logits[node], plain_logits(target, text + seen))
        path = random_path(rng, shape)
        cache.commit(path)
        text += [tokens[node] for node in path]
    same_states(target, cache, text)


@pytest.mark.parametrize("family", [*ONE_OF_EACH_KIND, *LIMITED])
def test_greedy_output_equals_transformers_generate(family: str) -> None:
    """Also of layers whose time steps transformers limits where it reads many tokens at once."""
    name = family.removesuffix(", limited")
    limit: dict[str, Any] = {"time_step_min": 2.0} if family in LIMITED else {}
    target = tiny_target(name, eos_token_id=None, **limit)
    output = plain_greedy(target, PROMPT, NEW_TOKENS)
    for truth, shape in ((0.0, "any"), (0.7, "seldom"), (1.0, "chain")):
        drafter = ScriptedDrafter(output, vocab=target.vocab_size, shape=SHAPES[shape], truth=truth)
        text = write(target, drafter, PROMPT, tokens=NEW_TOKENS)
        assert text.output == output, truth
        assert (text.num_accepted > 0) == (truth > 0)


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_every_method_drafts_for_a_recurrent_target(family: str, tmp_path: Path) -> None:
    """Each two families in a row share the methods between them."""
    target = target_of(family)
    output = plain_greedy(target, PROMPT, NEW_TOKENS)
    save_medusa(tmp_path, target, 3)
    for name, settings in [*METHODS.items()][[*HYBRIDS].index(family) % 2 :: 2]:
        where = {"speculative_model": str(tmp_path)} if name == "Medusa" else {}
        method = parse_method({"decoding_type": name, **settings, **where})
        small = alike(family, 0.01, eos_token_id=None)
        drafter = method.build(build_context(target, alike=small))
        assert write(target, drafter, PROMPT, tokens=NEW_TOKENS).output == output, name


@pytest.mark.parametrize("family", KINDS)
def test_a_cache_goes_back_to_what_it_kept(family: str) -> None:
    target, rng = target_of(family), random.Random(1)
    cache, text = target.new_cache(8, rewinds=3), list(PROMPT)
    target.prefill(text, cache, Needs())
    for token in tokens_of(rng, 5):
        target.prefill([token], cache, Needs())
        text.append(token)
    for wanted, kept in ((len(text) - 2, len(text) - 2), (len(text) - 4, len(PROMPT))):
        cache.truncate(wanted)
        assert cache.length == kept
        same_states(target, cache, text[:kept])
    target.prefill([1, 2, 3], cache, Needs())
    same_states(target, cache, [*PROMPT, 1, 2, 3])
    cache.truncate(3)
    assert cache.length == 0
    target.prefill(text, cache, Needs())
    same_states(target, cache, text)


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
@pytest.mark.parametrize("method", ["Suffix", "NGram"])
def test_sampled_texts_follow_the_targets_law(family: str, method: str) -> None:
    kinds = HYBRIDS[family]["layer_types"][:2]
    target = few_tokens(0.35, family=family, layers=2, layer_types=kinds)
    config = parse_method({"decoding_type": method, **METHODS[method]})
    drafter = config.build(build_context(target))
    assert p_value(target, drafter, seeds=1, tokens=200) > ALPHA


@pytest.mark.parametrize(
    ("wrapper", "family", "kind"),
    [
        ("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("llama4", "llama4_text", "Llama4ForCausalLM"),
        ("gemma4", "gemma4_text", "Gemma4ForConditionalGeneration"),
    ],
)
def test_a_model_that_also_sees_loads_as_its_language_model(
    tmp_path: Path, wrapper: str, family: str, kind: str
) -> None:
    """Its layers are the language model's, where as many layers see."""
    text = tiny_model(family).config.to_dict()
    layers = text["num_hidden_layers"]
    eyes = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "image_size": 16}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers}
    config = AutoConfig.for_model(
        wrapper, text_config=text, vision_config={**eyes, **sizes, "num_attention_heads": 2}
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "both")
    target = load_tiny(tmp_path / "both")
    assert type(target.model).__name__ == kind
    drafter = ScriptedDrafter([], vocab=VOCAB, shape=SHAPES["any"])
    output = write(target, drafter, PROMPT, tokens=4).output
    assert output == plain_greedy(target, PROMPT, 4)
    shown = target.prefill(PROMPT, target.new_cache(32), Needs(layers=(1, layers)))
    assert shown.layers is not None and shown.layers.shape == (len(PROMPT), 2 * 32)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        *(("rwkv", "rwkv"), ("xlstm", "xlstm"), ("qwen4_exp_text", "indexed_attention")),
        ("gpt_neo", "local attention"),
    ],
)
def test_a_target_that_cannot_be_rolled_back_is_refused(model_type: str, reason: str) -> None:
    with pytest.raises(TargetError, match=f"{reason} layers, whose state cannot be rolled back"):
        check_can_roll_back(AutoConfig.for_model(model_type), "it")


def test_recurrent_layers_of_an_unknown_class_are_refused() -> None:
    model: Any = tiny_model("lfm2")
    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.__class__ = type("NewConv", (type(layer.conv),), {})
    with pytest.raises(TargetError, match="has conv layers of an unknown class, whose state"):
        RecurrentLayers(model)


def steps_of(target: Target, shape: TreeShape) -> list[Step]:
    drafter = ScriptedDrafter([], vocab=VOCAB, shape=lambda rng: list(shape.parents), truth=0.0)
    return write(target, drafter, PROMPT, tokens=NEW_TOKENS).steps


def test_roll_back_time_is_a_part_of_other_time() -> None:
    steps = steps_of(target_of("qwen3_5_text"), TreeShape([-1, 0, 0, 1, 2]))
    assert all(0 < step.rollback_s < step.other_s and step.verify_s > 0 for step in steps)
    split = measure(steps).time_split
    assert split is not None
    assert split.rollback_s == pytest.approx(sum(s.rollback_s for s in steps) / len(steps))
    assert split.total_s == pytest.approx(sum(step.total_s for step in steps) / len(steps))
    without = steps_of(tiny_target(eos_token_id=None), TreeShape([-1, 0, 0, 1, 2]))
    assert {step.rollback_s for step in without} == {0.0}
