"""P-EAGLE drafts what its layers, as transformers has them, say to the whole text and the masks."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from engine.drafters.blocks.p_eagle import ParallelEagleConfig
from engine.drafters.eagle.methods import Eagle3Config
from engine.errors import DrafterError
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import (
    HEADS,
    INTERMEDIATE,
    KV_HEADS,
    config_of,
    layer_tensors,
    save_eagle3,
    write,
)
from tests.engine.drafters.judges import PROMPTS
from tests.engine.drafters.turns import assert_keeps_up
from tests.models import build_context

MASK, TAPS, COUNT = 280, (0, 1, 2), 3
CONFIG: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(TAPS), "draft_vocab_size": 64}


def save_parallel(folder: Path, target: Target, *, prefix: str = "midlayer", **config: Any) -> Path:
    """AWS's layout (`midlayer`), or speculators' (`layers.0`), with three layers."""
    save_eagle3(folder, target, TAPS, draft_vocab=64)
    tensors = load_file(folder / "m.safetensors")
    tensors = {name.replace("midlayer", prefix): tensor for name, tensor in tensors.items()}
    size = target.hidden_size
    for i in range(1, COUNT):
        tensors |= layer_tensors(size, size, f"layers.{i}")
        tensors[f"layers.{i}.input_layernorm.weight"] = torch.ones(size)
    generator = torch.Generator().manual_seed(4)
    tensors["mask_hidden"] = torch.randn(1, 1, len(TAPS) * size, generator=generator)
    said = config or {"ptd_token_id": MASK}
    return write(folder, tensors, config_of(target, num_hidden_layers=COUNT, **CONFIG, **said))


@functools.cache
def saved(family: str = "llama") -> Path:
    folder = Path(tempfile.mkdtemp(prefix="p-eagle-"))
    return save_parallel(folder, judges.target_of(family))


def config(family: str = "llama", **settings: Any) -> ParallelEagleConfig:
    return ParallelEagleConfig.parse({"speculative_model": str(saved(family)), **settings})


@functools.cache
def reference_layers(size: int) -> tuple[list[LlamaDecoderLayer], LlamaRotaryEmbedding]:
    tensors = load_file(saved() / "m.safetensors")
    settings: dict[str, Any] = {"attn_implementation": "eager"}
    own = LlamaConfig(
        hidden_size=size,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        **settings,
    )
    layers = []
    for i, prefix in enumerate(("midlayer", "layers.1", "layers.2")):
        layer = LlamaDecoderLayer(own, i).eval()
        if i == 0:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(layer.self_attn, name).out_features
                setattr(layer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
        state = {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if prefix in k}
        state.pop("hidden_norm.weight", None)
        layer.load_state_dict(state)
        layers.append(layer)
    return layers, LlamaRotaryEmbedding(own)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


@torch.inference_mode()
def whole_text_draft(
    target: Target, text: list[int], length: int, windows: tuple[int, ...] = (1000,) * COUNT
) -> list[int]:
    """Drafts after `text` by transformers' decoder layers, without a cache."""
    tensors = load_file(saved() / "m.safetensors")
    layers, rotary = reference_layers(target.hidden_size)
    states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in TAPS], dim=-1)
    masked = tensors["mask_hidden"].view(1, -1).expand(length - 1, -1)
    fused = torch.cat([features, masked]) @ tensors["fc.weight"].T
    ids = torch.tensor([*text[1:], *[MASK] * (length - 1)])
    embedded = normed(
        target.embedding.get_parameter("weight")[ids], tensors["midlayer.input_layernorm.weight"]
    )
    joined = torch.cat([embedded, normed(fused, tensors["midlayer.hidden_norm.weight"])], dim=-1)
    n = len(ids)
    turned = rotary(fused[None], torch.arange(n)[None])
    masks = []
    for window in windows:
        mask = torch.full((n, n), float("-inf"))
        for row in range(n):
            mask[row, max(0, row - window + 1) : row + 1] = 0
        masks.append(mask[None, None])
    first, *others = layers
    attended, _ = first.self_attn(joined[None], turned, masks[0])
    out = fused + attended[0]
    out = out + first.mlp(first.post_attention_layernorm(out))
    for layer, mask in zip(others, masks[1:], strict=True):
        out = layer(out[None], attention_mask=mask, position_embeddings=turned)[0]
        out = out if out.ndim == 2 else out[0]
    logits = normed(out[-length:], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    best = logits.argmax(dim=-1)
    found: list[int] = (best + tensors["d2t"][best]).tolist()
    return found


@torch.inference_mode()
def test_sliding_layers_see_their_window_alone(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    says: dict[str, Any] = {"ptd_token_id": MASK, "layer_types": kinds, "sliding_window": 3}
    head = str(save_parallel(tmp_path, target, **says))
    drafts = []
    for settings, windows in (({}, (1000,) * 3), ({"speculative_model": head}, (3, 1000, 3))):
        drafter = config(max_draft_len=4, **settings).build(build_context(target))
        reference = functools.partial(whole_text_draft, target, length=4, windows=windows)
        judges.assert_drafts_equal(reference, target, drafter, prompts=PROMPTS[:1], tokens=10)
        drafts.append(judges.write(target, drafter, PROMPTS[0], tokens=2).steps[0].tokens)
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("length", [1, 5])
def test_every_draft_equals_transformers_layers_on_the_whole_text(length: int) -> None:
    target = judges.target_of("llama")
    drafter = config(max_draft_len=length).build(build_context(target))
    reference = functools.partial(whole_text_draft, target, length=length)
    assert judges.assert_drafts_equal(reference, target, drafter) > 0


@pytest.mark.parametrize("family", judges.FAMILIES)
@pytest.mark.parametrize("tree", [False, True])
def test_greedy_output_equals_target_alone(family: str, tree: bool) -> None:
    settings = config(family, max_draft_len=4, use_dynamic_tree=tree)
    assert judges.assert_greedy_lossless(settings, family) > 0
    judges.assert_lossless_to_the_context_end(settings, family)


@pytest.mark.parametrize("tree", [False, judges.slow(True)])
@pytest.mark.slow
def test_sampled_output_follows_the_target(tmp_path: Path, tree: bool) -> None:
    target = judges.sampled_target()
    save_eagle3(tmp_path, target, (0, 0, 1), draft_vocab=8)
    tensors = load_file(tmp_path / "m.safetensors")
    tensors["mask_hidden"] = torch.ones(1, 3 * target.hidden_size)
    said = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "draft_vocab_size": 8}
    write(tmp_path, tensors, config_of(target, pard_token=11, **said))
    settings = ParallelEagleConfig(
        speculative_model=str(tmp_path), max_draft_len=3, use_dynamic_tree=tree
    )
    assert judges.p_value(target, settings.build(build_context(target))) > 1e-3


def test_it_keeps_up_while_another_method_drafts() -> None:
    target = judges.target_of("llama")
    reference = functools.partial(whole_text_draft, target, length=4)
    assert_keeps_up(reference, config(max_draft_len=4), build_context(target))


def test_speculators_layout_drafts_the_same(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    nested = save_parallel(tmp_path, target, prefix="layers.0", mask_token_id=MASK)
    layers = config_of(target, num_hidden_layers=COUNT)
    outer = {
        **CONFIG,
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
        "norm_before_residual": False,
        "transformer_layer_config": layers,
    }
    (nested / "config.json").write_text(json.dumps(outer))
    ours, theirs = (
        judges.write(target, one.build(build_context(target)), PROMPTS[0])
        for one in (config(), config(speculative_model=str(nested)))
    )
    assert [step.tokens for step in ours.steps] == [step.tokens for step in theirs.steps]


# ---- what cannot be


def test_each_method_names_the_other_for_its_heads(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    with pytest.raises(DrafterError, match="checkpoint for Eagle3. Choose the method P_EAGLE"):
        Eagle3Config(speculative_model=str(saved())).build(build_context(target))
    save_eagle3(tmp_path, target, TAPS, draft_vocab=64)
    with pytest.raises(DrafterError, match="checkpoint for P_EAGLE. Choose the method Eagle3"):
        config(speculative_model=str(tmp_path)).build(build_context(target))


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    folder = save_parallel(tmp_path, target, _note="says no mask")
    with pytest.raises(DrafterError, match="has no mask token"):
        config(speculative_model=str(folder)).build(build_context(target))
    with pytest.raises(DrafterError, match="mask token is 999, but .* embeds tokens 0 to 287"):
        config(speculative_model=str(folder), mask_token_id=999).build(build_context(target))
    tensors = load_file(folder / "m.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"][..., 1:].contiguous()
    save_file(tensors, folder / "m.safetensors")
    with pytest.raises(DrafterError, match="mask_hidden has 95 numbers, but 96 are read"):
        config(speculative_model=str(folder), mask_token_id=5).build(build_context(target))
