"""What a decoder's layers are, by the names that transformers has for them in `layer_types`."""

from __future__ import annotations

from typing import Any

from engine.errors import TargetError

FULL, SLIDING = ("full_attention", "hybrid"), ("sliding_attention", "hybrid_sliding")
CHUNKED = ("chunked_attention",)
ATTENTION = {FULL[0], SLIDING[0]}
"""What drafters' own layers may be."""
NO_KV_CACHE = ("linear_attention", "conv", "mamba", "mlp", "moe")
"""Layers without keys and values: no mask is theirs."""
RECURRENT = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
"""Layers with a state, which follows the rows and is rolled back."""


def kinds_of(config: Any) -> tuple[str, ...]:
    """One per layer; those of a config that does not say attend to everything."""
    return tuple(getattr(config, "layer_types", None) or FULL[:1] * config.num_hidden_layers)


def attends(config: Any) -> bool:
    """Whether any layer is one of attention."""
    return not set(kinds_of(config)) <= set(NO_KV_CACHE)


def attending_layers(config: Any) -> list[int]:
    """Layers with keys and values of their own."""
    kinds = kinds_of(config)
    own = len(kinds) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    return [i for i, kind in enumerate(kinds[:own]) if kind not in NO_KV_CACHE]


def is_recurrent(config: Any) -> bool:
    """Whether any layer has a state."""
    return not RECURRENT.isdisjoint(kinds_of(config))


def check_can_roll_back(config: Any, name: str) -> None:
    """TargetError for a model whose state cannot be rolled back to the accepted path."""
    model_type = str(getattr(config, "model_type", ""))
    bad = set(kinds_of(config)) - {*FULL, *SLIDING, *CHUNKED, *NO_KV_CACHE}
    if model_type in ("rwkv", "xlstm"):
        bad.add(model_type)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        bad.add("local attention")
    if getattr(config, "loop_num_passes", 1) > 1:  # a cache for each pass
        bad.add("looped")
    if bad:
        raise TargetError(
            f"{name} has {', '.join(sorted(bad))} layers, whose state cannot be rolled back after "
            "a rejected draft. Choose a model with attention, state-space, linear-attention or "
            "convolution layers that transformers gives a common cache."
        )
