"""Tiny random models of several families, and a tiny tokenizer, made in memory for tests."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine.drafters.base import BuildContext
from engine.model.forward import prepare_attention
from engine.model.loading import load_target
from engine.model.random_weights import byte_tokenizer, random_model
from engine.model.sources import TargetSpec
from engine.model.target import Target

VOCAB = 288
"""256 bytes, then special tokens and a few merges, padded."""
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "pad_token_id": 0,
    },
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "mistral": {"sliding_window": 12},
    "gemma2": {"head_dim": 8, "sliding_window": 12},
    "opt": {
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "intermediate_size": None,
        "num_key_value_heads": None,
    },
    "phi": {},
}


def _all(value: int, names: str) -> dict[str, int]:
    """Settings that have one value."""
    return dict.fromkeys(names.split(), value)


_STATE_FIRST = ["linear_attention", "full_attention", "linear_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    **_all(8, "head_dim linear_key_head_dim linear_value_head_dim"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _STATE_FIRST,
}
_SHARED_DELTA: dict[str, Any] = {**_DELTA, **_MOE, "shared_expert_intermediate_size": 16}
_KIMI: dict[str, Any] = {
    **_MOE,
    **_all(1, "n_group topk_group n_shared_experts"),
    **_all(4, "num_key_value_heads num_local_experts"),
    **_all(8, "qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    "kv_lora_rank": 16,
    "layer_types": _STATE_FIRST,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_MAMBA2: dict[str, Any] = {
    **_all(2, "mamba_n_groups mamba_expand"),
    **_all(8, "mamba_n_heads mamba_d_head mamba_d_state mamba_chunk_size"),
}
_INKLING: dict[str, Any] = {
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    **_all(2, "swa_num_key_value_heads num_experts_per_tok"),
    **_all(4, "swa_num_attention_heads d_rel n_routed_experts"),
    **_all(8, "head_dim swa_head_dim log_scaling_n_floor"),
    "sliding_window_size": 12,
    "rel_extent": 32,
    "moe_intermediate_size": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _SHARED_DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _SHARED_DELTA,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {**_KIMI, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**_KIMI, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 12},
    "granitemoehybrid": {
        **_MAMBA2,
        **_EXPERTS,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 16,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "time_step_min": 1e-9,
        **_all(8, "mamba_num_heads mamba_head_dim ssm_state_size head_dim chunk_size"),
        "n_groups": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "time_step_min": 1e-9,
        **_all(8, "n_mamba_heads mamba_headdim mamba_d_state chunk_size"),
        "mamba_ngroups": 2,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "mamba2": {**_all(8, "num_heads head_dim state_size chunk_size"), "n_groups": 2, "expand": 2},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "attention_head_dim": 16,
    },
    **dict.fromkeys(("mamba", "falcon_mamba"), {"state_size": 8, "time_step_rank": 4}),
    "minimax": {**_EXPERTS, "layer_types": _STATE_FIRST, "block_size": 8, "head_dim": 8},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 12,
        "lru_width": 32,
        "head_dim": 8,
    },
    "zaya": {},
    "inkling_text": {**_INKLING, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "inkling2_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": VOCAB - 4,
    },
    "llama4_text": {
        "no_rope_layers": [1, 0, 1],
        **_all(8, "attention_chunk_size head_dim"),
        **_all(2, "num_local_experts interleave_moe_layer_step"),
        "intermediate_size_mlp": 48,
        "floor_scale": 4,
        "attn_scale": 0.3,
    },
}
"""Recurrent layers, alone or beside attention, and Llama 4's chunked attention."""


def lasting_folder(name: str) -> Path:
    """A new folder, removed when the tests' process ends."""
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random fp32 model of a family, sharp enough that greedy decoding has no near-ties."""
    settings = {**_SMALL, **FAMILIES.get(family, HYBRIDS.get(family, {})), **overrides}
    return random_model({"model_type": family, **settings}, seed=seed)


tiny_tokenizer = functools.cache(byte_tokenizer)


def tiny_target(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Target:
    """A tiny random target with its tokenizer."""
    model = tiny_model(family, seed=seed, **overrides)
    prepare_attention(model)
    return Target(model, tiny_tokenizer(), name=f"tiny-{family}")


@functools.cache
def alike(family: str = "llama", noise: float = 0.02, **overrides: Any) -> Target:
    """A tiny target with noise added to its weights: some of its greedy drafts are right."""
    model = tiny_model(family, **overrides)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    prepare_attention(model)
    return Target(model, tiny_tokenizer(), name="alike")


def build_context(target: Target, **named: Target) -> BuildContext:
    """A build_context that resolves the given names to the given (already loaded) models."""

    def resolve(name: str) -> TargetSpec:
        if name in named:
            return TargetSpec(name=name, hub="test/" + name)
        return TargetSpec.of_path_or_hub(name)

    return BuildContext(target, resolve, lambda spec, **where: named[spec.name])


def save_tiny(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """A tiny model with its tokenizer in a local folder."""
    tiny_model(family, seed=seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load_tiny(
    path: Path, dtype: str = "float32", *, device: str = "cpu", **settings: Any
) -> Target:
    """A folder's or GGUF file's model, with a cache beside it; `settings` are its spec's."""
    spec = TargetSpec(name="tiny", path=str(path), **settings)
    return load_target(spec, dtype=dtype, device=device, cache_dir=path.parent / "cache")


def plain_greedy(target: Target, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The reference: `transformers.generate(do_sample=False)` with transformers' own attention."""
    ends = repr((target.config.eos_token_id, target.model.generation_config.eos_token_id))
    return list(_plain_greedy(target, tuple(prompt_ids), max_new_tokens, ends))


@functools.lru_cache(maxsize=64)
def _plain_greedy(
    target: Target, prompt_ids: tuple[int, ...], max_new_tokens: int, ends: str
) -> list[int]:
    """Once in a process: many tests ask for one text, and change only what `ends` it."""
    model = target.model
    ours = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([list(prompt_ids)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(ours)
    return [int(i) for i in out[0, len(prompt_ids) :]]
