"""Tiny targets of the families that the kernels know, with packed weights and without."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.forward import ModulesForward, prepare_attention
from engine.model.packed import pack
from engine.model.target import Target
from tests.models import tiny_model, tiny_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-groups-biased": (
        "llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama3-rotary": ("llama", {"rope_parameters": LLAMA3}),
    "yarn-rotary": ("llama", {"rope_parameters": YARN}),
    "mistral-sliding": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2-half-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 24}),
    "gemma2-sliding": ("gemma2", {"sliding_window": 12, "attn_logit_softcapping": 2.0}),
    "gemma3-sliding": ("gemma3_text", {"sliding_window": 12, "final_logit_softcapping": 3.0}),
    "phi3-sliding": ("phi3", {"sliding_window": 12}),
    "phi3-partly-turned": (
        "phi3",
        {"rope_parameters": {**DEFAULT_ROTARY, "partial_rotary_factor": 0.5}},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
}


_HEADS: dict[str, dict[str, Any]] = {
    "llama-tied": {"num_key_value_heads": 2},
    "llama-no-groups-biased": {"num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96},
    "qwen3-wide-heads": {"num_attention_heads": 4, "head_dim": 128},
    "gemma2-sliding": {"head_dim": 32},
    "gemma3-sliding": {"head_dim": 32},
    "phi3-partly-turned": {"num_attention_heads": 1},
}
WIDE: dict[str, dict[str, Any]] = {
    name: {"num_attention_heads": 2, "num_key_value_heads": 1, **_HEADS.get(name, {})}
    for name in VARIANTS
    if name not in ("llama-one-key-head", "yarn-rotary")
}
"""Heads as wide as the kernels want them."""


def variant_model(name: str, **overrides: Any) -> Any:
    """A random model whose biases and norms are not the ones they are initialised with."""
    family, settings = VARIANTS[name]
    model = tiny_model(family, **{**settings, **overrides})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    prepare_attention(model)
    return model


def packed(model: Any) -> Target:
    """A target under transformers' modules with packed weights; takes the model's over."""
    pack(model)
    forward = ModulesForward(model, weights="packed")
    return Target(model, tiny_tokenizer(), name="packed", forward=forward)


def plain(model: Any) -> Target:
    """A target under transformers' modules as they are."""
    return Target(model, tiny_tokenizer(), name="plain")
