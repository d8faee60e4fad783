"""What a row of the table of architectures says, and the fields that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import SourceError
from engine.model.gguf.file import GGUFFile
from engine.model.gguf.values import ValueRule

Settings = dict[str, Any]
ANY_NORM = "*norm"
"""Stands for the weights of all norms that a row does not name."""
FieldRule = str | tuple[str, ...] | Callable[[Any, GGUFFile], Settings] | None
"""What a field sets: the first of these settings that the class has; None = harmless."""


def equal_to(name: str) -> Callable[[Any, GGUFFile], Settings]:
    """A field that must repeat another."""

    def check(value: Any, file: GGUFFile) -> Settings:
        other = file.fields.get(name, value)
        if value != other:
            raise SourceError(
                f"{file.path} has {name} = {other} and a field beside it of {value}; only equal "
                "ones are read. Choose another file of this model."
            )
        return {}

    return check


def must_be(*allowed: Any) -> Callable[[Any, GGUFFile], Settings]:
    """A field with one meaning in this architecture."""

    def check(value: Any, file: GGUFFile) -> Settings:
        if value not in allowed:
            raise SourceError(
                f"{file.path} has a field of the value {value} where {file.architecture} is read "
                f"with {allowed[0]} only. Choose another file of this model."
            )
        return {}

    return check


def _sliding_layers(value: Any, file: GGUFFile) -> Settings:
    """A flag per layer, or the number of layers of which the last has full attention."""
    if not isinstance(value, list):
        value = [(i + 1) % value > 0 for i in range(num_layers(file))]
    kinds = ["sliding_attention" if flag else "full_attention" for flag in value]
    return {"layer_types": kinds[: num_layers(file)]}


def num_layers(file: GGUFFile) -> int:
    """A model's layers, without those for multi-token prediction behind them."""
    count = int(file.fields.get("block_count", 0))
    return count - int(file.fields.get("nextn_predict_layers", 0))


def _num_layers(value: Any, file: GGUFFile) -> Settings:
    return {"num_hidden_layers": num_layers(file)}


def _kv_heads(value: Any, file: GGUFFile) -> Settings:
    """A number, or one per layer; layers without attention have 0."""
    if not isinstance(value, list):
        return {"num_key_value_heads": value}
    counts = set(value) - {0}
    if len(counts) > 1:
        raise SourceError(f"{file.path} has layers of several numbers of key heads; not read.")
    return {"num_key_value_heads": max(counts, default=1)}


def _window(value: Any, file: GGUFFile) -> Settings:
    """0 stands for none."""
    return {"sliding_window": value or None}


_NORMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
COMMON_FIELDS: dict[str, FieldRule] = {
    "block_count": _num_layers,
    "nextn_predict_layers": None,  # a drafter's layers
    "vocab_size": None,  # the embedding's rows count
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": "head_dim",
    "attention.value_length": equal_to("attention.key_length"),
    "attention.layer_norm_rms_epsilon": _NORMS,
    "attention.layer_norm_epsilon": (*_NORMS[2:], *_NORMS[:2]),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _sliding_layers,
    "attention.causal": must_be(True),
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": ("logits_scaling", "logit_scale"),
    "use_parallel_residual": "use_parallel_residual",
    "tensor_data_layout": None,  # written by the first converters of Llama
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("expert_shared_count", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("expert_weights_scale", "attention.scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("embedding_scale", "logit_scale"), (0, 1)),
    "expert_weights_norm": (False,),
    "expert_gating_func": (0,),
}
"""Values of fields that mean the same as no field."""


def sets(name: str) -> Callable[[Any, GGUFFile], Settings]:
    """A setting of this name, whether the class declares it or not."""
    return lambda value, file: {name: value}


def _always(file: GGUFFile) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """How files of an architecture are read.

    Attributes:
        model_type: transformers' name of the config's class.
        fields: where they differ from `COMMON_FIELDS`.
        settings: of the config, which no field tells.
        derive: further settings, of the file and of those that its fields set.
        values: a parameter's tensor in the file, without its layer, → the parameter's values.
        parameters: a pattern of a parameter's name → its tensors in the file, where the `gguf`
            package does not know it; `{}` stands for the layer.
        rope: settings of the positions' scaling that no field tells.
        sliding_rope_base: of sliding layers where a file does not name it.
        no_rope_fields: fields of positions that a model without them may have.
        when: whether a file is of this row; the first row that is.
    """

    model_type: str
    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    derive: Callable[[GGUFFile, Settings], Settings] | None = None
    values: Mapping[str, ValueRule | None] = field(default_factory=dict)
    parameters: Mapping[str, tuple[tuple[str, ...], ValueRule | None]] = field(default_factory=dict)
    rope: Settings = field(default_factory=dict)
    sliding_rope_base: float | None = None
    no_rope_fields: tuple[str, ...] = ()
    when: Callable[[GGUFFile], bool] = _always


def has(*names: str) -> Callable[[GGUFFile], bool]:
    """Files with one of these tensors in any layer."""
    return lambda file: any(name.split(".", 2)[-1] in names for name in file.entries)


def field_is(name: str, *values: Any) -> Callable[[GGUFFile], bool]:
    return lambda file: file.fields.get(name) in values


def has_experts(file: GGUFFile) -> bool:
    return bool(file.fields.get("expert_count"))


def no_experts(file: GGUFFile) -> bool:
    return not has_experts(file)


def is_set(name: str) -> Callable[[GGUFFile], bool]:
    return lambda file: bool(file.fields.get(name))


def per(name: str, whole: str, parts: str) -> Callable[[GGUFFile], Settings]:
    """A setting that is a quotient of two fields."""
    return lambda file: {name: int(file.fields[whole]) // int(file.fields[parts])}


def derived(
    *rules: Callable[[GGUFFile], Settings],
) -> Callable[[GGUFFile, Settings], Settings]:
    """Settings of several rules."""

    def derive(file: GGUFFile, settings: Settings) -> Settings:
        return {name: value for rule in rules for name, value in rule(file).items()}

    return derive


def biases(**tensors: str) -> Callable[[GGUFFile, Settings], Settings]:
    """Settings that say whether the first layer has a tensor."""
    return lambda file, settings: {
        name: f"blk.0.{tensor}" in file.entries for name, tensor in tensors.items()
    }


_REASONS = {
    "it is an encoder, which cannot continue a text": """
        bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert
        gemma-embedding llama-embed""",
    "it has an encoder beside its decoder": "t5 t5encoder",
    "it describes pictures or sound, not a language model": "clip wavtokenizer-dec cogvlm",
    "it fills in a text's gaps in any order (diffusion)": "dream llada llada-moe rnd1",
    "its recurrent state has no common cache in transformers": "rwkv6 rwkv6qwen2 rwkv7 arwkv7",
    "transformers has no class for it": """
        arctic baichuan bailingmoe bailingmoe2 codeshell deepseek deepseek2-ocr exaone grok
        grovemoe jais maincoder mimo2 minicpm mistral4 openelm orion pangu-embedded plamo plamo2
        plamo3 plm qwen refact smallthinker step35 xverse""",
    "positions in pictures are part of it": """
        qwen2vl qwen3vl qwen3vlmoe hunyuan_vl paddleocr chameleon""",
    "its tensors are not in the table yet": """
        apertus bitnet dbrx gemma3n glm-dsa gptj gptneox kimi-linear llama4 minicpm3 mpt nemotron_h
        nemotron_h_moe phimoe""",
}
NOT_READ = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Architectures of the format that are not read, and why."""
