"""A tiny random DeepSeek-V3 with MTP layers, saved as DeepSeek publishes its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import presets
from engine.model.forward import prepare_attention
from engine.model.random_weights import add_tensors, random_model
from engine.model.target import Target

VOCAB = 12
NUM_LAYERS = 2


def save_deepseek(folder: Path, *, num_mtp_layers: int, with_mtp: bool = True) -> Path:
    """The shipped tiny target with few tokens and any number of MTP layers."""
    made = presets.targets()["tiny-random-deepseek-v3"].random
    assert made is not None
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 320, "eos_token_id": None}
    config = {**made.config, **sizes, "num_mtp_layers": num_mtp_layers}
    random_model(config, seed=0).save_pretrained(folder)
    for layer in range(num_mtp_layers if with_mtp else 0):
        prefix = f"layers.{NUM_LAYERS + layer}."
        shapes = {n.replace(f"layers.{NUM_LAYERS}.", prefix): s for n, s in made.tensors.items()}
        add_tensors(folder, shapes, seed=layer)
    return folder


def published(layers: MtpModel) -> dict[str, Tensor]:
    """MTP weights under the names of DeepSeek's checkpoints."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in layers.state_dict().items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors[f"model.layers.{NUM_LAYERS + int(number)}.{rest}"] = tensor
    return per_expert(tensors)


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a matrix for each expert, which transformers holds in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, fused = name.partition("mlp.experts.")
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(fused)
        if parts is None:
            found[name] = tensor
            continue
        for expert, rows in enumerate(tensor):
            for part, own in zip(parts, rows.chunk(len(parts)), strict=True):
                found[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] = own
    return found


def load_deepseek(folder: Path, *, attention: str | None = None) -> Target:
    """The saved model as a target; with transformers' own attention for reference runs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if attention is None:
        prepare_attention(model)
    else:
        model.set_attn_implementation(attention)
    return Target(model, None, name="tiny-deepseek")
