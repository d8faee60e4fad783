"""Tiny targets of the families that the kernels know, with packed weights and without."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.cpu.compile import NoKernels, full_library
from engine.kernels.cpu.native import NativeForward, unsupported_reason
from engine.kernels.cpu.operators import BLOCK, pack_native
from engine.model.forward import ModulesForward, prepare_attention
from engine.model.packed import pack
from engine.model.target import Target
from engine.proposal import Needs
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


def kernels_or_skip(folder: Path, instructions: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """As `full_library`."""
    try:
        return full_library(folder, instructions)
    except NoKernels as error:
        pytest.skip(f"no compiled kernels here: {error}")


def prompt_logits(target: Target) -> torch.Tensor:
    """Logits after thirty tokens, `(1, vocab)`."""
    return target.prefill(list(range(40, 70)), target.new_cache(32), Needs()).logits


def deviation(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Spread of the differences, as a share of the exact values' own."""
    return float((found.double() - exact.double()).std() / exact.double().std())


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels see them: each block of 32 in 255 steps."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(dim=-1, keepdim=True)
    codes = (blocks * torch.where(most > 0, torch.tensor(127.0) / most, 0.0)).round()
    return (codes.double() * (most / 127).double()).flatten(1)


def wide_model(name: str) -> Any:
    return variant_model(name, **SIZES, **WIDE[name]).to(torch.bfloat16)


def native(model: Any, kernels: ctypes.CDLL, bits: int = 16) -> Target:
    """A target run by the compiled kernels; takes the model over."""
    assert unsupported_reason(model) is None
    pack_native(model, kernels, bits)
    forward = NativeForward(model, weights="" if bits == 16 else f"q{bits}")
    assert forward.backend.name == ("native" if bits == 16 else f"native, q{bits}")
    return Target(model, tiny_tokenizer(), name="native", forward=forward)


def packed(model: Any) -> Target:
    """A target under transformers' modules with packed weights; takes the model's over."""
    pack(model)
    forward = ModulesForward(model, weights="packed")
    return Target(model, tiny_tokenizer(), name="packed", forward=forward)


def plain(model: Any) -> Target:
    """A target under transformers' modules as they are."""
    return Target(model, tiny_tokenizer(), name="plain")
