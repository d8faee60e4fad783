"""DFlash drafts the block that transformers' model fills over the whole text, at every step."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine.drafters.blocks.dflash import DFlashConfig
from engine.errors import DrafterError
from engine.model.forward import cache_argument
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.judges import PROMPTS, SAMPLED_VOCAB, write
from tests.engine.drafters.turns import assert_keeps_up
from tests.models import build_context, tiny_target

Model: Any = getattr(transformers, "MuseGlimmerAssistantModel", None)
if Model is None:
    pytest.skip("this transformers has no DFlash model", allow_module_level=True)
SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "block_size": 5,
    "mask_token_id": 11,
    "target_layer_ids": [0, 1],
}


@functools.cache
def dflash_model(*layer_types: str) -> Any:
    config = transformers.MuseGlimmerAssistantConfig(
        **SETTINGS, layer_types=list(layer_types), sliding_window=14
    )
    torch.manual_seed(3)
    model = Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    model.set_attn_implementation("eager")
    return model


FULL = ("full_attention", "full_attention")
MIXED = ("sliding_attention", "full_attention")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    dflash_model(*FULL).save_pretrained(tmp_path / "own")
    return str(tmp_path / "own")


def save_as_published(folder: Path, **changes: Any) -> str:
    """The authors' layout: a Qwen3 config with dflash_config, and their tensor names."""
    own = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    state = dflash_model(*FULL).state_dict()
    folder.mkdir()
    save_file({own.get(k, k): v for k, v in state.items()}, folder / "model.safetensors")
    names = ("mask_token_id", "target_layer_ids", "rope_parameters")
    config = {k: v for k, v in SETTINGS.items() if k not in names} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": list(FULL),
        "sliding_window": None,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "vocab_size": 288,
        "dflash_config": {k: SETTINGS[k] for k in names[:2]},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@torch.inference_mode()
def block_outputs(target: Target, model: Any, text: list[int]) -> torch.Tensor:
    """transformers' outputs of the block after `text`, from its beginning with an empty cache."""
    from transformers.cache_utils import DFlashCache

    n, block = len(text) - 1, SETTINGS["block_size"]
    out = target.model(torch.tensor([text[:-1]]), output_hidden_states=True)
    context = torch.cat([out.hidden_states[i + 1] for i in SETTINGS["target_layer_ids"]], dim=-1)
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(n)
    ids = torch.tensor([[text[-1]] + [SETTINGS["mask_token_id"]] * (block - 1)])
    hidden: torch.Tensor = model(
        noise_embeds=target.embedding(ids),
        context_hidden_states=context,
        position_ids=torch.arange(n + block)[None],
        **{cache_argument(model): cache},
    ).last_hidden_state[0]
    return hidden


@torch.inference_mode()
def whole_text_draft(target: Target, model: Any, text: list[int]) -> list[int]:
    logits = target.lm_head(block_outputs(target, model, text)[1:])
    return [int(token) for token in logits.argmax(dim=-1)]


@pytest.mark.parametrize("layer_types", [FULL, MIXED])
def test_every_draft_equals_transformers_on_the_whole_text(
    tmp_path: Path, layer_types: tuple[str, ...]
):
    model = dflash_model(*layer_types)
    model.save_pretrained(tmp_path)
    target = tiny_target("llama", vocab_size=SAMPLED_VOCAB, eos_token_id=None)
    drafter = DFlashConfig(speculative_model=str(tmp_path)).build(build_context(target))
    reference = functools.partial(whole_text_draft, target, model)
    prompts = ([1, 2, 3, 1, 2, 3, 4], [5])
    assert judges.assert_drafts_equal(reference, target, drafter, prompts=prompts) > 0


def test_published_layout_drafts_the_same(tmp_path: Path, saved: str):
    target = judges.target_of("llama")
    published = save_as_published(tmp_path / "published")
    for prompt in PROMPTS:
        ours, theirs = (
            write(target, DFlashConfig(speculative_model=name).build(build_context(target)), prompt)
            for name in (saved, published)
        )
        assert [step.tokens for step in ours.steps] == [step.tokens for step in theirs.steps]


@pytest.mark.parametrize("family", judges.FAMILIES)
@pytest.mark.parametrize("length", [None, *map(judges.slow, (1, 2, 3, 64))])
@pytest.mark.parametrize("tree", [False, True])
def test_greedy_output_equals_target_alone(saved: str, family: str, length: int | None, tree: bool):
    config = DFlashConfig(speculative_model=saved, max_draft_len=length, use_dynamic_tree=tree)
    judges.assert_greedy_lossless(config, family)


def test_a_tree_holds_the_chain_and_accepts_as_much_at_least(saved: str):
    target = judges.target_of("llama")
    accepted = []
    for tree in (False, True):
        config = DFlashConfig(
            speculative_model=saved, use_dynamic_tree=tree, dynamic_tree_max_topK=16
        )
        drafter = config.build(build_context(target))
        texts = [write(target, drafter, prompt, tokens=60) for prompt in PROMPTS]
        accepted.append(sum(text.num_accepted for text in texts))
        shapes = {step.parents for text in texts for step in text.steps}
        assert len(shapes) > 1 if tree else max(len(shape) for shape in shapes) == 5
    assert accepted[1] > accepted[0]


def test_context_end_is_reached_exactly(saved: str):
    judges.assert_lossless_to_the_context_end(DFlashConfig(speculative_model=saved), "llama")


@pytest.mark.parametrize("tree", [False, judges.slow(True)])
@pytest.mark.slow
def test_sampled_output_follows_the_target(tmp_path: Path, tree: bool):
    dflash_model(*FULL).save_pretrained(tmp_path)
    target = judges.few_tokens(0.35, layers=3)
    config = DFlashConfig(speculative_model=str(tmp_path), use_dynamic_tree=tree)
    assert judges.p_value(target, config.build(build_context(target))) > 1e-3


def test_it_keeps_up_while_another_method_drafts(saved: str):
    target = judges.target_of("llama")
    reference = functools.partial(whole_text_draft, target, dflash_model(*FULL))
    assert_keeps_up(reference, DFlashConfig(speculative_model=saved), build_context(target))


# ---- what cannot be


def refused(config: DFlashConfig, words: str, *, family: str = "llama", **target: Any) -> None:
    with pytest.raises(DrafterError, match=words):
        config.build(build_context(tiny_target(family, **target)))


def test_another_targets_model_is_refused(saved: str):
    config = DFlashConfig(speculative_model=saved)
    refused(config, "hidden_size in config.json must be 16, got 32", hidden_size=16)
    refused(config, r"reads target layers \[0, 1\].*offers 0 to 0", num_hidden_layers=2)
    refused(config, "mask token is 11.*embeds tokens 0 to 7", vocab_size=8)


def test_a_checkpoint_that_says_too_little_is_refused(tmp_path: Path):
    silent = save_as_published(tmp_path / "silent", dflash_config={})
    refused(DFlashConfig(speculative_model=silent), "has no mask token.*or set mask_token_id")
    medusa = save_as_published(tmp_path / "medusa", block_size=None)
    refused(DFlashConfig(speculative_model=medusa), "has no block_size.*not a DFlash checkpoint.$")
    told = DFlashConfig(speculative_model=silent, mask_token_id=11, target_layer_ids=(0, 1))
    assert told.build(build_context(judges.target_of("llama"))).needs.layers == (1, 2)


def test_a_wrong_tensor_is_named(tmp_path: Path):
    wrong = save_as_published(tmp_path / "wrong", intermediate_size=40)
    refused(
        DFlashConfig(speculative_model=wrong), r"layers.0.mlp.gate_proj.weight is 48×32, .* 40×32"
    )
    more = save_as_published(tmp_path / "more", num_hidden_layers=1, layer_types=FULL[:1])
    refused(
        DFlashConfig(speculative_model=more), "num_hidden_layers in config.json must be 2, got 1"
    )
