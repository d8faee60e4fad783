"""Fresh EAGLE heads for a target, and their files in the layout that yuhuili's heads have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.drafters.eagle_head import (
    DraftHead,
    Eagle1Head,
    Eagle3Head,
    Eagle3Spec,
    HeadLayer,
    HeadSpec,
)
from engine.model.target import Target

_Head = TypeVar("_Head", bound=DraftHead)
_ROPE_THETA = 10000.0
_MLP_RATIO = 4


def head_spec(target: Target, intermediate: int | None) -> HeadSpec:
    """A layer as wide as the target's, with its attention heads."""
    config = target.config
    heads = int(config.num_attention_heads)
    own = getattr(config, "intermediate_size", None) or _MLP_RATIO * target.hidden_size
    return HeadSpec(
        hidden=target.hidden_size,
        intermediate=int(intermediate or own),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope={"rope_type": "default", "rope_theta": _ROPE_THETA},
    )


def fresh_eagle1(target: Target, intermediate: int | None) -> Eagle1Head:
    """An EAGLE-1 head that begins by handing the target's feature on."""
    spec = head_spec(target, intermediate)
    head = Eagle1Head(spec, target.lm_head, vocab=target.vocab_size, bias=True)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, spec.hidden :] += torch.eye(spec.hidden)
        head.fc.bias.zero_()
    _quiet(head.layer)
    return _placed(head, target)


def fresh_eagle3(target: Target, ids: Tensor | None, intermediate: int | None) -> Eagle3Head:
    """An EAGLE-3 head that begins by reading its deepest layer with the target's output matrix.

    Args:
        ids: the tokens it drafts, with an output matrix of its own; None = all, by the target's.
    """
    spec = head_spec(target, intermediate)
    head = Eagle3Head(
        Eagle3Spec(
            layer=spec,
            num_features=3,
            feature_width=target.hidden_size,
            draft_vocab_size=target.vocab_size if ids is None else len(ids),
        ),
        target.lm_head if ids is None else None,
    )
    output = target.lm_head.weight
    assert isinstance(output, Tensor)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, 2 * spec.hidden :] += torch.eye(spec.hidden)
        if ids is not None:
            head.lm_head.weight.copy_(output.detach()[ids].float().cpu())
        norm = getattr(target.model.get_decoder(), "norm", None)
        weight = getattr(norm, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(weight.detach().float().cpu())
    _quiet(head.layer)
    return _placed(head, target)


def _quiet(layer: HeadLayer) -> None:
    """Attention and MLP add nothing at first."""
    with torch.no_grad():
        layer.o_proj.weight.zero_()
        layer.down_proj.weight.zero_()


def _placed(head: _Head, target: Target) -> _Head:
    head = head.to(target.device)
    weight = target.embedding.weight
    assert isinstance(weight, Tensor)
    head.embedding_weight = weight.detach().float()
    return head


def save_eagle1(head: Eagle1Head, target: Target, folder: Path, dtype: torch.dtype) -> None:
    """Config and weights; no embedding, which is the target's."""
    tensors = {"fc.weight": head.fc.weight, "fc.bias": head.fc.bias}
    tensors |= _layer_tensors(head.layer, "layers.0")
    _save(tensors, {}, _config(head.layer.spec, target) | {"bias": True}, folder, dtype)


def save_eagle3(
    head: Eagle3Head, target: Target, ids: Tensor | None, folder: Path, dtype: torch.dtype
) -> None:
    """Config and weights; with an output matrix of its own, also the maps of its vocabulary."""
    tensors: dict[str, Tensor] = {
        "fc.weight": head.fc.weight,
        "norm.weight": head.norm.weight,
        "midlayer.hidden_norm.weight": head.hidden_norm.weight,
        "midlayer.input_layernorm.weight": head.input_layernorm.weight,
        **_layer_tensors(head.layer, "midlayer"),
    }
    maps: dict[str, Tensor] = {}
    if ids is not None:
        tensors["lm_head.weight"] = head.lm_head.weight
        known = torch.zeros(target.vocab_size, dtype=torch.bool)
        known[ids.cpu()] = True
        maps = {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": known}
    config = _config(head.layer.spec, target) | {"draft_vocab_size": head.draft_vocab_size}
    _save(tensors, maps, config, folder, dtype)


def _layer_tensors(layer: HeadLayer, prefix: str) -> dict[str, Tensor]:
    spec = layer.spec
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    query, key, value = layer.qkv.weight.split([q, kv, kv])
    gate, up = layer.gate_up.weight.chunk(2)
    return {
        f"{prefix}.self_attn.q_proj.weight": query,
        f"{prefix}.self_attn.k_proj.weight": key,
        f"{prefix}.self_attn.v_proj.weight": value,
        f"{prefix}.self_attn.o_proj.weight": layer.o_proj.weight,
        f"{prefix}.mlp.gate_proj.weight": gate,
        f"{prefix}.mlp.up_proj.weight": up,
        f"{prefix}.mlp.down_proj.weight": layer.down_proj.weight,
        f"{prefix}.post_attention_layernorm.weight": layer.post_attention_norm.weight,
    }


def _config(spec: HeadSpec, target: Target) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": spec.activation,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": spec.eps,
        "rope_theta": _ROPE_THETA,
        "max_position_embeddings": target.context_len,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
    }


def _save(
    tensors: Mapping[str, Tensor],
    maps: Mapping[str, Tensor],
    config: dict[str, Any],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    stored = {k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in tensors.items()}
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    save_file({**stored, **maps}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
