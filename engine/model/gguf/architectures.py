"""The architectures of GGUF files that are read, a row for each of transformers' classes.

A row says what a file's fields, tensors and rows are in transformers' terms, where they differ from
`COMMON_FIELDS` and from the names that the `gguf` package knows.
"""

from __future__ import annotations

from engine.model.gguf.families import (
    ANY_NORM,
    Family,
    FieldRule,
    Settings,
    biases,
    derived,
    equal_to,
    has,
    has_experts,
    is_set,
    must_be,
    no_experts,
    num_layers,
    per,
    sets,
)
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.values import (
    BY_HEAD,
    BY_KEY_GROUP,
    BY_KEY_HEAD,
    FLAT,
    GROUPED,
    GROUPED_BEHIND_KEYS,
    GROUPED_COLUMNS,
    GROUPED_SINGLE,
    INTERLEAVED,
    INTERLEAVED_EXPERTS,
    JOINED_ROWS,
    LATENT,
    LOG_OF_NEGATIVE,
    MINUS_ONE,
    SWAPPED,
    ValueRule,
    then,
)

QK = {"attn_q": INTERLEAVED, "attn_k": INTERLEAVED}
NORMS_PLUS_ONE: dict[str, ValueRule | None] = {ANY_NORM: MINUS_ONE}
MAMBA = {"ssm_a": LOG_OF_NEGATIVE}
_BIASES = biases(attention_bias="attn_q.bias", mlp_bias="ffn_up.bias")
_QKV_BIAS = biases(attention_bias="attn_q.bias")
_LATENT = {
    r".*\.kv_b_proj\.weight": (("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"), LATENT),
}


def _latent_sizes(file: GGUFFile, settings: Settings) -> Settings:
    """Sizes of heads of multi-head latent attention."""
    fields = file.fields
    rotated = int(fields.get("rope.dimension_count", 0))
    key = fields.get("attention.key_length_mla", fields.get("attention.key_length", 0))
    value = fields.get("attention.value_length_mla", fields.get("attention.value_length", 0))
    return {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": int(key) - rotated,
        "v_head_dim": int(value),
        "head_dim": rotated,
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "n_routed_experts": settings.get("n_routed_experts", 1),
        "attention_bias": "blk.0.attn_q_a.bias" in file.entries,
    }


_LATENT_FIELDS: dict[str, FieldRule] = {
    "attention.kv_lora_rank": "kv_lora_rank",
    **dict.fromkeys(("attention.q_lora_rank", "attention.head_count_kv")),
    **dict.fromkeys(("attention.key_length", "attention.value_length")),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla")),
    "rope.dimension_count": None,
}
"""`_latent_sizes` reads most of them."""


def _conv_layers(file: GGUFFile, settings: Settings) -> Settings:
    """Layers without key heads are convolutions."""
    heads = file.fields["attention.head_count_kv"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
    }


def _gemma_queries(file: GGUFFile, settings: Settings) -> Settings:
    """Gemma's largest models scale queries by the width of a head's share of the model."""
    is_27b = num_layers(file) == {"gemma2": 46, "gemma3": 62}[file.architecture]
    share = settings["hidden_size"] // settings["num_attention_heads"]
    return {"query_pre_attn_scalar": share if is_27b else settings["head_dim"]}


def _residual(file: GGUFFile, settings: Settings) -> Settings:
    has_norm = "blk.0.ffn_norm.weight" in file.entries
    return {
        "use_parallel_residual": not has_norm,
        "use_qkv_bias": "blk.0.attn_q.bias" in file.entries,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.entries,
    }


def _falcon_blocks(file: GGUFFile, settings: Settings) -> Settings:
    """Falcon 7B has one norm in a block and one key head; larger ones have two norms."""
    has_two = "blk.0.attn_norm_2.weight" in file.entries
    return {
        "new_decoder_architecture": has_two,
        "multi_query": settings.get("num_kv_heads", 1) == 1,
        "bias": "blk.0.attn_qkv.bias" in file.entries,
        "parallel_attn": True,
        "alibi": False,
    }


def _glm_norms(file: GGUFFile, settings: Settings) -> Settings:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.entries,
        "attention_bias": "blk.0.attn_q.bias" in file.entries,
    }


def _jamba_layers(file: GGUFFile, settings: Settings) -> Settings:
    """The period and the offset of layers with attention, and of those with experts."""
    attention = [i for i, count in enumerate(file.fields["attention.head_count_kv"]) if count]
    experts = [i for i in range(num_layers(file)) if f"blk.{i}.ffn_gate_inp.weight" in file.entries]
    result = per("mamba_expand", "ssm.inner_size", "embedding_length")(file)
    for name, layers in (("attn", attention), ("expert", experts)):
        result[f"{name}_layer_offset"] = layers[0]
        result[f"{name}_layer_period"] = (
            layers[1] - layers[0] if len(layers) > 1 else num_layers(file)
        )
    return result


def _granite_layers(file: GGUFFile, settings: Settings) -> Settings:
    """Mamba layers have no keys; some models have no rotary positions."""
    keys = [file.entries.get(f"blk.{i}.attn_k.weight") for i in range(num_layers(file))]
    size = settings["hidden_size"] // settings["num_attention_heads"]
    is_rotary = bool(file.fields.get("rope.scaling.finetuned", True))
    return {
        "layer_types": ["full_attention" if entry else "linear_attention" for entry in keys],
        "num_key_value_heads": max((entry.shape[1] // size for entry in keys if entry), default=1),
        "position_embedding_type": "rope" if is_rotary else None,
        "num_local_experts": settings.get("num_local_experts", 0),
        "shared_intermediate_size": settings.get(
            "shared_intermediate_size", settings["intermediate_size"]
        ),
        **per("mamba_expand", "ssm.inner_size", "embedding_length")(file),
        **per("mamba_d_head", "ssm.inner_size", "ssm.time_step_rank")(file),
    }


def _delta_layers(file: GGUFFile, settings: Settings) -> Settings:
    """Layers of Gated DeltaNet: flags, or all but every n-th."""
    flags = file.fields.get("attention.recurrent_layers")
    every = int(file.fields.get("full_attention_interval", 4))
    flags = flags or [(i + 1) % every > 0 for i in range(num_layers(file))]
    kinds = ["linear_attention" if flag else "full_attention" for flag in flags]
    size = per("linear_value_head_dim", "ssm.inner_size", "ssm.time_step_rank")(file)
    return {"layer_types": kinds[: num_layers(file)]} | size


_CONV1D = {name: SWAPPED for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}
_GPT_OSS_EXPERTS = {
    r".*\.experts\.gate_up_proj": (
        ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
        INTERLEAVED_EXPERTS,
    ),
    r".*\.experts\.gate_up_proj_bias": (
        ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
        INTERLEAVED_EXPERTS,
    ),
    r".*\.experts\.down_proj": (("blk.{}.ffn_down_exps.weight",), SWAPPED),
    r".*\.experts\.down_proj_bias": (("blk.{}.ffn_down_exps.bias",), None),
}
_GRANITE: dict[str, FieldRule] = {"rope.scaling.finetuned": None}
_SIGMOID: dict[str, FieldRule] = {"expert_gating_func": must_be(2, 0)}
_SOFTMAX: dict[str, FieldRule] = {"expert_gating_func": must_be(1, 0)}
_SHARED_SIZE: dict[str, FieldRule] = {"expert_shared_feed_forward_length": None}
_HEAD_DIM: dict[str, FieldRule] = {"attention.key_length": sets("head_dim")}
"""Of classes whose modules read it, though their configs do not declare it."""
_NO_LENGTH: dict[str, FieldRule] = {"context_length": None}
_MAMBA1: dict[str, FieldRule] = {
    **dict.fromkeys(("feed_forward_length", "attention.head_count", "context_length")),
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
    "ssm.dt_b_c_rms": None,  # chooses the row
}
_MAMBA2: dict[str, FieldRule] = _MAMBA1 | {
    "ssm.inner_size": None,  # the quotients tell it
    "ssm.time_step_rank": "num_heads",
    "ssm.group_count": "n_groups",
}
_MIXED_MAMBA: dict[str, FieldRule] = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.inner_size": None,
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
}
_DELTA: dict[str, FieldRule] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    **dict.fromkeys(("ssm.inner_size", "full_attention_interval", "feed_forward_length")),
    "attention.recurrent_layers": None,
    "rope.dimension_sections": None,  # of pictures; a text has one position
}
_DELTA_VALUES = NORMS_PLUS_ONE | MAMBA | {"ssm_norm": None}
_TILED_VALUES: dict[str, ValueRule | None] = _DELTA_VALUES | {
    "attn_qkv": GROUPED_BEHIND_KEYS,
    "attn_gate": GROUPED,
    "ssm_conv1d": GROUPED_BEHIND_KEYS,
    "ssm_alpha": GROUPED_SINGLE,
    "ssm_beta": GROUPED_SINGLE,
    "ssm_out": GROUPED_COLUMNS,
    "ssm_a": then(LOG_OF_NEGATIVE, GROUPED_SINGLE),
    "ssm_dt": GROUPED_SINGLE,
}
_DELTA_JOINED = {
    r".*\.in_proj_qkvz\.weight": (
        ("blk.{}.attn_qkv.weight", "blk.{}.attn_gate.weight"),
        BY_KEY_HEAD,
    ),
}
_GRANITE_DENSE = {
    r".*\.shared_mlp\.input_linear\.weight": (
        ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
        JOINED_ROWS,
    ),
    r".*\.shared_mlp\.output_linear\.weight": (("blk.{}.ffn_down.weight",), None),
}
"""A model without experts has a plain feed-forward network in its file."""
_NO_TEMPERATURE: dict[str, FieldRule] = {"attention.temperature_scale": None}  # `_rope` reads it
_HUNYUAN_MOE: dict[str, FieldRule] = {
    "expert_feed_forward_length": "intermediate_size",
    "expert_shared_feed_forward_length": equal_to("expert_feed_forward_length"),
    "expert_shared_count": must_be(1),
}
_GEMMA4: dict[str, FieldRule] = {
    "attention.key_length": sets("global_head_dim"),
    "attention.value_length": equal_to("attention.key_length"),
    "attention.key_length_swa": sets("head_dim"),
    "attention.value_length_swa": equal_to("attention.key_length_swa"),
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "feed_forward_length": None,  # `_gemma4_layers` reads it
    "attention.head_count_kv": None,
    **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa")),
}


def _gemma4_layers(file: GGUFFile, settings: Settings) -> Settings:
    """Sizes that differ by layer; full layers rotate the first part of a head."""
    fields, width = file.fields, file.fields["feed_forward_length"]
    widths = width if isinstance(width, list) else [width] * num_layers(file)
    kinds, heads = settings["layer_types"], fields["attention.head_count_kv"]
    by_kind = dict(zip(kinds, heads, strict=True)) if isinstance(heads, list) else {}
    divisors = file.floats("rope_freqs.weight")
    theta, local = fields["rope.freq_base"], fields["rope.freq_base_swa"]
    return {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "num_key_value_heads": by_kind.get("sliding_attention", heads),
        "num_global_key_value_heads": by_kind.get("full_attention"),
        "attention_k_eq_v": f"blk.{kinds.index('full_attention')}.attn_v.weight"
        not in file.entries,
        "vocab_size_per_layer_input": file.entries["per_layer_token_embd.weight"].shape[1],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": float((divisors == 1).mean()),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


_FALCON: dict[str, FieldRule] = {
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count_kv": sets("num_kv_heads"),
    "context_length": None,
}
_FALCON_H1 = dict.fromkeys(
    (
        *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier"),
        *("key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    ),
    1.0,
)
"""A file's weights have its multipliers in them."""


FAMILIES: dict[str, tuple[Family, ...]] = {
    # ---- as transformers' own importer
    "llama": (
        Family("mixtral", values=QK, when=has_experts),
        Family("llama", derive=_BIASES, values=QK),
    ),
    "deci": (Family("llama", derive=_BIASES, values=QK),),
    "qwen2": (Family("qwen2"),),
    "qwen2moe": (Family("qwen2_moe"),),
    "qwen3": (Family("qwen3", derive=_QKV_BIAS),),
    "qwen3moe": (
        Family(
            "qwen3_moe",
            fields=_HEAD_DIM,
            settings={"norm_topk_prob": True},
            derive=_QKV_BIAS,
        ),
    ),
    "gemma": (Family("gemma", values=NORMS_PLUS_ONE),),
    "gemma2": (Family("gemma2", derive=_gemma_queries, values=NORMS_PLUS_ONE),),
    "gemma3": (
        Family(
            "gemma3_text",
            derive=_gemma_queries,
            values=NORMS_PLUS_ONE,
            sliding_rope_base=10000.0,
        ),
    ),
    "phi3": (Family("phi3"),),
    "smollm3": (Family("smollm3", values=QK),),
    "granite": (Family("granite", fields=_GRANITE, derive=_BIASES, values=QK),),
    "olmo2": (
        Family("olmo3", when=is_set("attention.sliding_window")),
        Family("olmo2"),
    ),
    "starcoder2": (Family("starcoder2"),),
    "gpt2": (Family("gpt2", fields={"feed_forward_length": "n_inner"}, values=_CONV1D),),
    "falcon": (
        Family("falcon", fields=_FALCON, derive=_falcon_blocks, values={"attn_qkv": BY_KEY_GROUP}),
    ),
    "bloom": (
        Family(
            "bloom",
            fields=_NO_LENGTH | {"feed_forward_length": None},
            values={"attn_qkv": BY_HEAD},
            parameters={
                r".*\.word_embeddings_layernorm\.(\w+)": ((r"token_embd_norm.\1",), None),
                r".*\.post_attention_layernorm\.(\w+)": ((r"blk.{}.ffn_norm.\1",), None),
            },
        ),
    ),
    "stablelm": (Family("stablelm", derive=_residual),),
    "gpt-oss": (
        Family(
            "gpt_oss",
            fields={"expert_feed_forward_length": "intermediate_size"},
            parameters=_GPT_OSS_EXPERTS,
            rope={"truncate": False},
        ),
    ),
    "lfm2": (Family("lfm2", fields={"shortconv.l_cache": "conv_L_cache"}, derive=_conv_layers),),
    "mamba": (
        Family("falcon_mamba", fields=_MAMBA1, values=MAMBA, when=is_set("ssm.dt_b_c_rms")),
        Family("mamba", fields=_MAMBA1, values=MAMBA),
    ),
    "nemotron": (Family("nemotron", values=NORMS_PLUS_ONE),),
    "minimax-m2": (Family("minimax_m2", fields=_SIGMOID),),
    # ---- dense
    "mistral3": (Family("ministral3", fields=_NO_TEMPERATURE, values=QK),),
    "glm4": (Family("glm4"),),
    "chatglm": (Family("glm"),),
    "command-r": (Family("cohere"),),
    "cohere2": (Family("cohere2"),),
    "phi2": (Family("phi"),),
    "ernie4_5": (Family("ernie4_5"),),
    "hunyuan-dense": (Family("hunyuan_v1_dense"),),
    "seed_oss": (Family("seed_oss"),),
    "exaone4": (Family("exaone4"),),
    "arcee": (Family("arcee", values=QK),),
    "internlm2": (Family("llama", values=QK),),
    "gemma4": (Family("gemma4_text", fields=_GEMMA4, derive=_gemma4_layers, when=no_experts),),
    "olmo": (
        Family(
            "olmo",
            fields={
                "attention.layer_norm_epsilon": must_be(1e-5),
                "attention.clamp_kqv": "clip_qkv",
            },
            values=QK,
        ),
    ),
    "jais2": (Family("jais2"),),
    "starcoder": (Family("gpt_bigcode", fields={"feed_forward_length": "n_inner"}),),
    # ---- mixtures of experts
    "granitemoe": (
        Family(
            "granitemoeshared",
            fields=_GRANITE,
            values=QK,
            when=is_set("expert_shared_feed_forward_length"),
        ),
        Family("granitemoe", fields=_GRANITE, values=QK),
    ),
    "olmoe": (Family("olmoe"),),
    "glm4moe": (Family("glm4_moe", fields=_SIGMOID | _HEAD_DIM, derive=_glm_norms),),
    "deepseek2": (
        Family(
            "deepseek_v3",
            fields=_LATENT_FIELDS | _SIGMOID,
            derive=_latent_sizes,
            parameters=_LATENT,
            when=has("exp_probs_b.bias"),
        ),
        Family(
            "deepseek_v2",
            fields=_LATENT_FIELDS | _SOFTMAX,
            derive=_latent_sizes,
            parameters=_LATENT,
        ),
    ),
    "ernie4_5-moe": (
        Family(
            "ernie4_5_moe",
            fields=_SHARED_SIZE | {"interleave_moe_layer_step": "moe_layer_interval"},
        ),
    ),
    "dots1": (Family("dots1", fields=_SIGMOID | _HEAD_DIM),),
    "hunyuan-moe": (Family("hunyuan_v1_moe", fields=_HUNYUAN_MOE),),
    "exaone-moe": (Family("exaone_moe", fields=_SIGMOID | _SHARED_SIZE | _HEAD_DIM),),
    "afmoe": (Family("afmoe", fields=_SIGMOID),),
    # ---- recurrent
    "mamba2": (
        Family(
            "mamba2",
            fields=_MAMBA2,
            derive=derived(
                per("head_dim", "ssm.inner_size", "ssm.time_step_rank"),
                per("expand", "ssm.inner_size", "embedding_length"),
            ),
            values=MAMBA | {"ssm_norm": FLAT},
        ),
    ),
    "jamba": (
        Family(
            "jamba",
            fields=_MIXED_MAMBA | {"ssm.time_step_rank": "mamba_dt_rank"},
            derive=_jamba_layers,
            values=MAMBA,
        ),
    ),
    "falcon-h1": (
        Family(
            "falcon_h1",
            fields=_MIXED_MAMBA | {"ssm.inner_size": "mamba_d_ssm"},
            settings=_FALCON_H1 | {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2},
            derive=derived(per("mamba_d_head", "ssm.inner_size", "ssm.time_step_rank")),
            values=MAMBA | {"ssm_norm": FLAT},
        ),
    ),
    "granitehybrid": (
        Family(
            "granitemoehybrid",
            fields=_GRANITE | _MIXED_MAMBA,
            derive=_granite_layers,
            values=QK | MAMBA | {"ssm_norm": FLAT},
            parameters=_GRANITE_DENSE,
        ),
    ),
    "lfm2moe": (
        Family(
            "lfm2_moe",
            fields={"shortconv.l_cache": "conv_L_cache"} | _SIGMOID,
            derive=_conv_layers,
        ),
    ),
    "qwen3next": (
        Family(
            "qwen3_next",
            fields=_DELTA,
            derive=_delta_layers,
            values=_DELTA_VALUES,
            parameters=_DELTA_JOINED,
        ),
    ),
    "qwen35": (
        Family(
            "qwen3_5_text",
            fields=_DELTA | {"feed_forward_length": "intermediate_size"},
            derive=_delta_layers,
            values=_TILED_VALUES,
        ),
    ),
    "qwen35moe": (
        Family("qwen3_5_moe_text", fields=_DELTA, derive=_delta_layers, values=_TILED_VALUES),
    ),
}
