"""Types of a decoder's layers, by their names in transformers' `layer_types`."""

from __future__ import annotations

from typing import Any

from engine.errors import TargetError

FULL, SLIDING = ("full_attention", "hybrid"), ("sliding_attention", "hybrid_sliding")
CHUNKED = ("chunked_attention",)
ATTENTION = {FULL[0], SLIDING[0]}
"""Types that a drafter's own layers may have."""
RECURRENT = ("linear_attention", "conv", "mamba")
NO_KV_CACHE = (*RECURRENT, "mlp", "moe")
"""Layers without keys and values; they take no mask."""


def layer_types_of(config: Any) -> tuple[str, ...]:
    """A type per layer; full attention where the config names none."""
    return tuple(getattr(config, "layer_types", None) or FULL[:1] * config.num_hidden_layers)


def has_attention(config: Any) -> bool:
    """Whether any layer has attention."""
    return not set(layer_types_of(config)) <= set(NO_KV_CACHE)


def kv_layers(config: Any) -> list[int]:
    """Indices of layers with keys and values of their own."""
    types = layer_types_of(config)
    num_own = len(types) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    return [i for i, name in enumerate(types[:num_own]) if name not in NO_KV_CACHE]


def check_can_roll_back(config: Any, name: str) -> None:
    """TargetError for a model whose state cannot be rolled back to the accepted path."""
    model_type = str(getattr(config, "model_type", ""))
    unsupported = set(layer_types_of(config)) - {*FULL, *SLIDING, *CHUNKED, *NO_KV_CACHE}
    if model_type in ("rwkv", "xlstm"):
        unsupported.add(model_type)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        unsupported.add("local attention")
    if model_type == "doge" and config.keep_window_size < config.max_position_embeddings:
        unsupported.add("dynamically masked")  # by the rows beside a row, too
    if getattr(config, "loop_num_passes", 1) > 1:  # a cache for each pass
        unsupported.add("looped")
    if unsupported:
        raise TargetError(
            f"{name} has {', '.join(sorted(unsupported))} layers, whose state cannot be rolled "
            "back after a rejected draft. Choose a model with attention, state-space, "
            "linear-attention or convolution layers that transformers gives a common cache."
        )
