"""P-EAGLE drafts what its layers' formula says to the whole text and the masks, at every step."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafters.blocks.p_eagle import ParallelEagleConfig
from engine.errors import DrafterError
from engine.model.target import Target
from tests.engine.drafters import judges
from tests.engine.drafters.eagle_heads import (
    LayerFormula,
    config_of,
    layer_tensors,
    save_eagle3,
    write,
)
from tests.engine.drafters.judges import PROMPTS
from tests.models import build_context, lasting_folder

MASK, TAPS, COUNT = 280, (0, 1, 2), 3
CONFIG: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(TAPS), "draft_vocab_size": 64}


def save_parallel(folder: Path, target: Target, *, prefix: str = "midlayer", **config: Any) -> Path:
    """AWS's layout (`midlayer`), or speculators' (`layers.0`), with three layers."""
    draft_vocab = min(64, target.vocab_size // 2)
    save_eagle3(folder, target, TAPS, draft_vocab=draft_vocab)
    tensors = load_file(folder / "m.safetensors")
    tensors = {name.replace("midlayer", prefix): tensor for name, tensor in tensors.items()}
    size = target.hidden_size
    for i in range(1, COUNT):
        tensors |= layer_tensors(size, size, f"layers.{i}")
        tensors[f"layers.{i}.input_layernorm.weight"] = torch.ones(size)
    generator = torch.Generator().manual_seed(4)
    tensors["mask_hidden"] = torch.randn(1, 1, len(TAPS) * size, generator=generator)
    said = {**CONFIG, "draft_vocab_size": draft_vocab}
    said |= config or {"ptd_token_id": min(MASK, target.vocab_size - 1)}
    return write(folder, tensors, config_of(target, num_hidden_layers=COUNT, **said))


@functools.cache
def saved() -> Path:
    return save_parallel(lasting_folder("p-eagle"), judges.target_of("llama"))


def config(**settings: Any) -> ParallelEagleConfig:
    return ParallelEagleConfig.parse({"speculative_model": str(saved()), **settings})


@torch.inference_mode()
def whole_text_draft(
    target: Target, text: list[int], length: int, windows: tuple[int, ...] = (1000,) * COUNT
) -> list[int]:
    """Drafts after `text` by the layers' formula, without a cache."""
    w, formula = load_file(saved() / "m.safetensors"), LayerFormula()
    states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in TAPS], dim=-1)
    masked = w["mask_hidden"].view(1, -1).expand(length - 1, -1)
    out = torch.cat([features, masked]) @ w["fc.weight"].T
    ids = torch.tensor([*text[1:], *[MASK] * (length - 1)])
    embedded = target.embedding.get_parameter("weight")[ids]
    hidden = formula.norm(out, w["midlayer.hidden_norm.weight"])
    for prefix, window in zip(("midlayer", "layers.1", "layers.2"), windows, strict=True):
        if prefix == "midlayer":
            inputs = formula.norm(embedded, w["midlayer.input_layernorm.weight"])
            inputs = torch.cat([inputs, hidden], dim=-1)
        else:
            inputs = formula.norm(out, w[f"{prefix}.input_layernorm.weight"])
        sees = functools.partial(within, window)
        out = torch.stack(formula.layer(w, prefix, list(inputs), list(out), sees))
    logits = formula.norm(out[-length:], w["norm.weight"]) @ w["lm_head.weight"].T
    best = logits.argmax(dim=-1)
    found: list[int] = (best + w["d2t"][best]).tolist()
    return found


def within(window: int, at: int, j: int) -> bool:
    return 0 <= at - j < window


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
def test_every_draft_is_the_formula_s_on_the_whole_text(length: int) -> None:
    target = judges.target_of("llama")
    drafter = config(max_draft_len=length).build(build_context(target))
    reference = functools.partial(whole_text_draft, target, length=length)
    assert judges.assert_drafts_equal(reference, target, drafter) > 0


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


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    target = judges.target_of("llama")
    folder = save_parallel(tmp_path, target)
    tensors = load_file(folder / "m.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"][..., 1:].contiguous()
    save_file(tensors, folder / "m.safetensors")
    with pytest.raises(DrafterError, match="mask_hidden has 95 numbers, but 96 are read"):
        config(speculative_model=str(folder)).build(build_context(target))
