"""Random drafter checkpoints in the public layouts, for measuring time where training is beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.target import Target


def make_all(target: Target, folder: Path) -> dict[str, Path]:
    """Checkpoints for Medusa, ReDrafter, EAGLE and EAGLE-3 that fit the target, by method."""
    torch.manual_seed(0)
    makers = {"Medusa": medusa, "ReDrafter": redrafter, "Eagle": eagle, "Eagle3": eagle3}
    return {name: make(target, folder / name.lower()) for name, make in makers.items()}


def _save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _weight(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.02


def medusa(target: Target, folder: Path, heads: int = 4) -> Path:
    """Heads that share the target's projection: residual blocks only."""
    h = target.hidden_size
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = _weight(h, h)
        tensors[f"{head}.0.linear.bias"] = _weight(h)
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "version": "2"}
    return _save(folder, tensors, config)


def redrafter(target: Target, folder: Path) -> Path:
    """Apple's layout with two residual layers and a recurrent state."""
    h, v = target.hidden_size, target.vocab_size
    tensors = {
        "lm_head.0.linear.weight": _weight(2 * h, 2 * h),
        "lm_head.0.linear.bias": _weight(2 * h),
        "lm_head.1.linear.weight": _weight(2 * h, 2 * h),
        "lm_head.1.linear.bias": _weight(2 * h),
        "lm_head.2.weight": _weight(v, 2 * h),
        "rnn_u.weight": _weight(h, h),
        "rnn_u.bias": _weight(h),
        "rnn_w.weight": _weight(h, h),
    }
    config = {
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["Drafter"],
        "vocab_size": v,
        "hidden_size": h,
        "exit_dim": 2 * h,
        "num_draft_layers": 2,
        "rnn": True,
    }
    return _save(folder, tensors, config)


def _layer(prefix: str, target: Target, attention_in: int) -> dict[str, Tensor]:
    config = target.config
    h, i = target.hidden_size, int(config.intermediate_size)
    width = int(getattr(config, "head_dim", None) or h // config.num_attention_heads)
    q, kv = width * config.num_attention_heads, width * config.num_key_value_heads
    return {
        f"{prefix}.self_attn.q_proj.weight": _weight(q, attention_in),
        f"{prefix}.self_attn.k_proj.weight": _weight(kv, attention_in),
        f"{prefix}.self_attn.v_proj.weight": _weight(kv, attention_in),
        f"{prefix}.self_attn.o_proj.weight": _weight(h, q),
        f"{prefix}.mlp.gate_proj.weight": _weight(i, h),
        f"{prefix}.mlp.up_proj.weight": _weight(i, h),
        f"{prefix}.mlp.down_proj.weight": _weight(h, i),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(h),
    }


def _head_config(target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "hidden_act": "silu",
    }


def eagle(target: Target, folder: Path) -> Path:
    """EAGLE-1/2: one layer, `fc` of embedding and feature; the target's embedding is shared."""
    h = target.hidden_size
    tensors = {"fc.weight": _weight(h, 2 * h), **_layer("layers.0", target, h)}
    return _save(folder, tensors, {**_head_config(target), "bias": False})


def eagle3(target: Target, folder: Path, draft_vocab: int = 8192) -> Path:
    """EAGLE-3: three features, own draft vocabulary."""
    h, v = target.hidden_size, target.vocab_size
    draft_vocab = min(draft_vocab, v)
    chosen = torch.arange(draft_vocab)
    t2d = torch.zeros(v, dtype=torch.bool)
    t2d[chosen] = True
    tensors = {
        "fc.weight": _weight(h, 3 * h),
        "d2t": torch.zeros(draft_vocab, dtype=torch.int64),
        "t2d": t2d,
        **_layer("midlayer", target, 2 * h),
        "midlayer.hidden_norm.weight": torch.ones(h),
        "midlayer.input_layernorm.weight": torch.ones(h),
        "norm.weight": torch.ones(h),
        "lm_head.weight": _weight(draft_vocab, h),
    }
    return _save(folder, tensors, {**_head_config(target), "draft_vocab_size": draft_vocab})
