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
from tests.engine.drafters.judges import SAMPLED_VOCAB
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


def as_speculators(location: str, **outer: Any) -> None:
    """Nest a saved config as speculators does, which names inputs of layers, not outputs."""
    file = Path(location, "config.json")
    layer = json.loads(file.read_text())
    for key in ("dflash_config", "block_size", "architectures"):
        del layer[key]
    outer |= {k: SETTINGS[k] for k in ("mask_token_id", "block_size")}
    outer["aux_hidden_state_layer_ids"] = [i + 1 for i in SETTINGS["target_layer_ids"]]
    file.write_text(json.dumps({**outer, "transformer_layer_config": layer}))


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


# ---- what cannot be


def refused(config: DFlashConfig, words: str, *, family: str = "llama", **target: Any) -> None:
    with pytest.raises(DrafterError, match=words):
        config.build(build_context(tiny_target(family, **target)))


def test_another_targets_model_is_refused(saved: str):
    config = DFlashConfig(speculative_model=saved)
    refused(config, "hidden_size in config.json must be 16, got 32", hidden_size=16)
    refused(config, r"reads target layers \[0, 1\].*offers 0 to 0", num_hidden_layers=2)
    refused(config, "mask token is 11.*embeds tokens 0 to 7", vocab_size=8)


def test_what_a_checkpoint_leaves_out_may_be_set(tmp_path: Path):
    silent = save_as_published(tmp_path / "silent", dflash_config={})
    told = DFlashConfig(speculative_model=silent, mask_token_id=11, target_layer_ids=(0, 1))
    assert told.build(build_context(judges.target_of("llama"))).needs.layers == (1, 2)
