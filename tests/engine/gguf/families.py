"""Tiny models of the families whose GGUF files are read, and their conversion by the peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.model.gguf.config import read_gguf_config
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.tensors import divide_frequencies, lazy_state_dict
from engine.model.reading import empty_model, read_weights
from engine.model.sources import TargetSpec, Weights
from tests.models import tiny_model, tiny_tokenizer

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED: dict[str, Any] = {
    **_SMALL_EXPERTS,
    "n_routed_experts": 4,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
}
_LATENT: dict[str, Any] = {
    **_GROUPED,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "num_key_value_heads": 4,
}
_HEADS = {"head_dim": 8}
_LAYERS: dict[str, Any] = {"sliding_window": 12, "layer_types": SLIDING}
_TIED = {"tie_word_embeddings": True}
_GEMMA3: dict[str, Any] = {
    **_TIED,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 8,
    "vocab_size": 260,
}
_FIXED_BASE = {"rope_theta": 10000.0}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": _EXPERTS,
    "qwen2": {},
    "qwen2_moe": {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _HEADS,
    "qwen3_moe": {**_SMALL_EXPERTS, **_HEADS, "norm_topk_prob": True},
    "gemma": {**_HEADS, **_TIED, **_FIXED_BASE},
    "gemma2": {**_TIED, **_FIXED_BASE, "query_pre_attn_scalar": 8},
    "gemma3_text": _GEMMA3,
    "gemma4_text": _TIED,
    "phi": {"intermediate_size": 128, "num_key_value_heads": 4, **_FIXED_BASE},
    "phi3": {"pad_token_id": 0},
    "smollm3": {},
    "granite": {},
    "granitemoe": _EXPERTS,
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": _LAYERS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    "starcoder2": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": False,
        **_FIXED_BASE,
    },
    "bloom": {},
    "stablelm": {},
    "gpt_oss": {**_EXPERTS, **_HEADS, **_LAYERS},
    "lfm2": {},
    "lfm2_moe": _TIED,
    "nemotron": {},
    "minimax_m2": {**_EXPERTS, **_HEADS},
    "ministral3": _HEADS,
    "glm": {**_HEADS, "rms_norm_eps": 1e-5, **_FIXED_BASE},
    "glm4": _HEADS,
    "glm4_moe": {**_GROUPED, **_HEADS, "use_qk_norm": True},
    "cohere": _TIED,
    "cohere2": {**_TIED, "sliding_window": 12},
    "ernie4_5": {},
    "ernie4_5_moe": {
        **_SMALL_EXPERTS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, **_HEADS},
    "seed_oss": _HEADS,
    "exaone4": _LAYERS,
    "exaone_moe": {**_SMALL_EXPERTS, **_HEADS, "sliding_window": 12},
    "arcee": {},
    "jais2": {},
    "afmoe": {**_SMALL_EXPERTS, **_HEADS, "sliding_window": 12},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {**_GROUPED, **_HEADS},
    "mamba": {"intermediate_size": 64, "expand": 2},
    "falcon_mamba": {"intermediate_size": 64, "expand": 2},
    "mamba2": {"intermediate_size": 64},
    "jamba": {},
    "falcon_h1": {},
    "granitemoehybrid": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
_BY_LAYER: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SCALED: dict[str, dict[str, Any]] = {
    "llama+yarn": {**_YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama+linear": _LINEAR,
    "llama+llama3": _LLAMA3,
    "qwen2+yarn": _YARN,
    "qwen2+linear": _LINEAR,
    "qwen3+yarn": _YARN,
    "seed_oss+yarn": _YARN,
    "phi3+longrope": _LONGROPE,
    "gemma3_text+linear": _BY_LAYER,
    "olmo3+yarn": {**_YARN, "attention_factor": 1.2},
    "deepseek_v3+yarn": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
}
MODELS: dict[str, dict[str, Any]] = _PUBLISHED | {
    name: {**_PUBLISHED[name.split("+")[0]], "rope_parameters": rope}
    for name, rope in _SCALED.items()
}
MODELS["phi3+longrope"]["original_max_position_embeddings"] = 32
"""transformers' `model_type`, and a scaling of positions, → settings of a tiny model."""
_UNUSUAL = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")


def save_folder(name: str, folder: Path) -> None:
    """A tiny model of a family with unusual settings and coarse weights, which pack well."""
    family, settings = name.split("+")[0], MODELS[name]
    defaults = transformers.CONFIG_MAPPING[family]()
    unusual: dict[str, Any] = {key: 1e-3 for key in _UNUSUAL if hasattr(defaults, key)}
    rope = getattr(defaults, "rope_parameters", None) or {}
    if "rope_theta" in rope and "rope_parameters" not in settings:
        unusual["rope_theta"] = 5000.0
    if "rope_parameters" in settings:
        settings = {key: value for key, value in settings.items() if key != "rope_theta"}
    model = tiny_model(family, **{**unusual, **settings})
    generator = torch.Generator().manual_seed(7)
    buffers = {k: v for k, v in model.named_buffers() if k.endswith("bias")}
    with torch.no_grad():
        for value in (*model.parameters(), *buffers.values()):
            signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            if value.ndim > 1 or value.abs().max() == 0:
                value.copy_(0.25 * signs)
            else:
                value.add_(0.125 * signs)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def convert(peer: Path, folder: Path, names: list[str]) -> None:
    """Convert `folder`/name to `folder`/name.gguf by the peer's own program."""
    program = Path(__file__).with_name("run_converter.py")
    paths = os.pathsep.join(str(peer / part) for part in ("gguf-py", "."))
    command = [sys.executable, str(program), str(folder), *names]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})


def load(path: Path) -> Any:
    """A file's model in float32, by transformers' modules."""
    spec = TargetSpec(name="tiny", path=str(path))
    file = GGUFFile(path)
    empty = empty_model(read_gguf_config(file), file.num_bytes, "tiny", dtype=torch.float32)
    weights = Weights(str(path.parent), path.name, None, True, "")
    tensors = (empty, lazy_state_dict(empty, file))
    model = read_weights(spec, weights, torch.float32, tensors=tensors)
    divide_frequencies(model, file)
    return model.eval()


def load_folder(folder: Path) -> Any:
    """A folder's model in float32, by transformers alone."""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def some_logits(model: Any) -> list[float]:
    """Every seventh logit of the last of 48 positions."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (1, 48), generator=generator)
    logits: torch.Tensor = model(ids).logits[0, -1, :256:7]
    return [round(float(logit), 5) for logit in logits]
