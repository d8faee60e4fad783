"""Random drafter checkpoints in the public layouts, for measuring time where training is beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.random_weights import expand_names
from engine.model.target import Target

Shapes = dict[str, tuple[int, ...]]


def make_all(target: Target, folder: Path) -> dict[str, Path]:
    """Checkpoints for Medusa, ReDrafter, EAGLE and EAGLE-3 that fit the target, by method."""
    makers = {"Medusa": medusa, "ReDrafter": redrafter, "Eagle": eagle, "Eagle3": eagle3}
    return {name: make(folder / name.lower(), target) for name, make in makers.items()}


def _save(folder: Path, config: dict[str, Any], shapes: Shapes, **tensors: Tensor) -> Path:
    """Small random weights, and norms of one; {a,b} in a name stands for several names."""
    torch.manual_seed(0)
    for pattern, shape in shapes.items():
        for name in expand_names(pattern):
            tensors[name] = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa(folder: Path, target: Target) -> Path:
    """Four heads that share the target's projection: residual blocks only."""
    h, heads = target.hidden_size, "{0,1,2,3}"
    config = {"medusa_num_heads": 4, "medusa_num_layers": 1, "version": "2"}
    shapes: Shapes = {f"{heads}.0.linear.weight": (h, h), f"{heads}.0.linear.bias": (h,)}
    return _save(folder, config, shapes)


def redrafter(folder: Path, target: Target) -> Path:
    """Apple's layout with two residual layers and a recurrent state."""
    h, v = target.hidden_size, target.vocab_size
    shapes: Shapes = {
        "lm_head.{0,1}.linear.weight": (2 * h, 2 * h),
        "lm_head.{0,1}.linear.bias": (2 * h,),
        "lm_head.2.weight": (v, 2 * h),
        "{rnn_u,rnn_w}.weight": (h, h),
        "rnn_u.bias": (h,),
    }
    config = {"vocab_size": v, "hidden_size": h, "exit_dim": 2 * h, "num_draft_layers": 2}
    return _save(folder, {**config, "rnn": True}, shapes)


def _layer(prefix: str, target: Target, attention_in: int) -> Shapes:
    config = target.config
    h, i = target.hidden_size, int(config.intermediate_size)
    width = int(getattr(config, "head_dim", None) or h // config.num_attention_heads)
    q, kv = width * config.num_attention_heads, width * config.num_key_value_heads
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, attention_in),
        f"{prefix}.self_attn.{{k,v}}_proj.weight": (kv, attention_in),
        f"{prefix}.self_attn.o_proj.weight": (h, q),
        f"{prefix}.mlp.{{gate,up}}_proj.weight": (i, h),
        f"{prefix}.mlp.down_proj.weight": (h, i),
        f"{prefix}.post_attention_layernorm.weight": (h,),
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


def eagle(folder: Path, target: Target) -> Path:
    """EAGLE-1/2: one layer, `fc` of embedding and feature; the target's embedding is shared."""
    h = target.hidden_size
    shapes = {"fc.weight": (h, 2 * h), **_layer("layers.0", target, h)}
    return _save(folder, {**_head_config(target), "bias": False}, shapes)


def eagle3(folder: Path, target: Target) -> Path:
    """EAGLE-3: three features, own draft vocabulary."""
    h, v = target.hidden_size, target.vocab_size
    draft_vocab = min(8192, v)
    shapes = {
        "fc.weight": (h, 3 * h),
        **_layer("midlayer", target, 2 * h),
        "{midlayer.hidden_norm,midlayer.input_layernorm,norm}.weight": (h,),
        "lm_head.weight": (draft_vocab, h),
    }
    config = {**_head_config(target), "draft_vocab_size": draft_vocab}
    d2t, t2d = torch.zeros(draft_vocab, dtype=torch.int64), torch.arange(v) < draft_vocab
    return _save(folder, config, shapes, d2t=d2t, t2d=t2d)
