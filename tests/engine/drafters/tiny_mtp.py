"""A tiny random DeepSeek-V3 with MTP layers, saved as DeepSeek publishes its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from engine.model.forward import prepare_attention
from engine.model.target import Target

VOCAB = 12
NUM_LAYERS = 2


def save_deepseek(folder: Path, *, num_mtp_layers: int, with_mtp: bool = True) -> Path:
    """Main model and MTP layers in one file, experts apart, MTP behind the last layer."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=320,
        num_mtp_layers=num_mtp_layers,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    layers = MtpModel(model, num_mtp_layers)
    with torch.no_grad():
        for parameter in [*model.parameters(), *layers.layers.parameters()]:
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    if with_mtp:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **published(layers)}, file, metadata={"format": "pt"})
    return folder


def published(layers: MtpModel) -> dict[str, Tensor]:
    """MTP weights under the names of DeepSeek's checkpoints."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in layers.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        prefix = f"model.layers.{NUM_LAYERS + int(number)}."
        if rest == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    tensors[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] = half.clone()
        elif rest == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[prefix + rest] = tensor.clone()
    return tensors


def load_deepseek(folder: Path, *, attention: str | None = None) -> Target:
    """The saved model as a target; with transformers' own attention for reference runs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if attention is None:
        prepare_attention(model)
    else:
        model.set_attn_implementation(attention)
    return Target(model, None, name="tiny-deepseek")
