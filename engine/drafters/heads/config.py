"""The config.json of a draft network, whose every key counts.

A key that is ignored may change what the network computes, and its drafts would silently be wrong.
So a config records which of its keys were read, and the others are refused by name, except for
keys that never matter here (`HARMLESS`) and values that change nothing (`NEUTRAL`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr

from engine.config import Settings
from engine.errors import ConfigError, DrafterError
from engine.model.files import READ_ERRORS, name_list
from engine.safe_text import short, visible

SECTIONS = ("transformer_layer_config", "eagle_config", "dflash_config")
"""Sections in which speculators, NVIDIA and z-lab nest settings; later ones take precedence."""
HARMLESS = frozenset(
    # what transformers writes into any config
    "architectures auto_map bos_token_id cross_attention_hidden_size dtype eos_token_id "
    "finetuning_task id2label is_decoder is_encoder_decoder label2id model_type "
    "name_or_path pad_token_id prefix problem_type pruned_heads sep_token_id "
    "task_specific_params tie_encoder_decoder tie_word_embeddings tokenizer_class torch_dtype "
    "torchscript transformers_version use_bfloat16 use_cache base_model_ep_plan "
    "base_model_pp_plan base_model_tp_plan chunk_size_feed_forward decoder_start_token_id "
    "has_no_defaults_at_init add_cross_attention tf_legacy_loss return_dict output_attentions "
    "output_hidden_states output_scores return_dict_in_generate remove_invalid_values "
    # how whole models write
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences repetition_penalty suppress_tokens "
    "temperature top_k top_p typical_p "
    # training alone
    "attention_dropout ce_loss_alpha confidence_head_alpha confidence_head_with_markov "
    "down_sample_ratio down_sample_ratio_min embed_requires_grad enable_confidence_head "
    "initializer_range l1_loss_alpha loss_decay_gamma loss_type max_anchors max_seq_len "
    "num_anchors num_depths para_depths para_num pretraining_tp train_embed_tokens "
    # limits and names that change no number here
    "mask_token max_position_embeddings max_window_layers spd_type speculators_config "
    "speculators_model_type speculators_version unsloth_fixed unsloth_version "
    # what the tensors tell
    "has_embed_tokens has_lm_head num_aux_layers num_eagle_features".split()
)
"""Keys of published configs that do not affect the network."""
_OFF = (
    "add_full_attention_sink_bias add_swa_attention_sink_bias attention_sink_bias bias "
    "dspark_bonus_anchor mlp_bias mtp_use_dedicated_embeddings sample_from_anchor use_gemma_norm "
    "use_mtp_layernorm"
)
_ON = (
    "is_causal is_neox_style next_layer_regular use_input_layernorm_in_first_layer "
    "use_last_layernorm"
)
_ONE = "attention_value_scale input_embedding_scale logit_scale output_multiplier"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(_ON.split(), (True,)),
    **dict.fromkeys(_ONE.split(), (1,)),
    "attention_mode": ("gqa", "mha"),
    "dspark_fixup_head_type": ("markov",),
    "num_lookback_tokens": (-1,),
    "parallel_draft_heads_num_layers": (0,),
    "parallel_draft_step": (1,),
    "projector_type": ("dflash", "dspark"),
}
"""Values of other keys that do not affect the network."""
METHOD_KEYS = "architectures model_type speculators_model_type projector_type algorithm".split()
OTHER_METHODS = {
    "dflash2": "DFlash-2",
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
    "uno": "UNO",
    "xpress": "XPress",
}
"""Methods whose checkpoints resemble those of a supported one, by a part of their names."""
_Count = Annotated[int, Field(ge=1, le=1 << 24)]
_Layers = Annotated[tuple[Annotated[int, Field(ge=-1, le=4096)], ...], Field(strict=False)]
_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class HeadConfig(Settings):
    """The settings of published configs that are supported; accessing a field marks it as read.

    Null counts as absent.
    """

    model_config = ConfigDict(extra="ignore", title="config.json")
    _read: set[str] = PrivateAttr(default_factory=set)
    _values: dict[str, Any] = PrivateAttr(default_factory=dict)
    _location: str = PrivateAttr("")

    # the layers
    hidden_size: _Count | None = None
    vocab_size: _Count | None = None
    num_hidden_layers: int | None = Field(None, ge=1, le=1024)
    num_attention_heads: int | None = Field(None, ge=1, le=4096)
    num_key_value_heads: int | None = Field(None, ge=1, le=4096)
    head_dim: int | None = Field(None, ge=1, le=1 << 14)
    intermediate_size: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, ge=0.0, lt=1.0)
    rope_theta: _Positive = 10000.0
    rope_parameters: dict[str, Any] = {}
    rope_scaling: dict[str, Any] = {}
    partial_rotary_factor: float | None = Field(None, gt=0.0, le=1.0)
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None
    layer_types: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sliding_window: int | None = Field(None, ge=-1)
    use_sliding_window: bool = True
    quantization_config: Any = None

    # the head
    bias: bool = True
    draft_vocab_size: _Count | None = None
    target_hidden_size: _Count | None = None
    num_target_layers: _Count | None = None
    speculators_config: dict[str, Any] = {}
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: _Layers = ()
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool = False
    mask_token_id: int | None = Field(None, ge=0)
    ptd_token_id: int | None = Field(None, ge=0)
    pard_token: int | None = Field(None, ge=0)

    # blocks
    block_size: int | None = Field(None, ge=1, le=1024)
    target_layer_ids: _Layers | None = None
    aux_hidden_state_layer_ids: _Layers = ()
    is_causal: bool | None = None
    causal: bool | None = None
    dflash_query_causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    use_swa: bool = False
    swa_window_size: int | None = Field(None, ge=-1)
    sample_from_anchor: bool | None = None
    final_logit_softcapping: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: _Count | None = None
    dspark_markov_rank: _Count | None = None

    # Apple's recurrent drafter
    rnn: bool | None = None
    num_draft_layers: int | None = Field(None, ge=0, le=1024)
    exit_dim: _Count | None = None

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            if name in type(self).model_fields:
                self._read.add(name)
            return super().__getattribute__(name)

    @classmethod
    def of(cls, config: Mapping[str, Any], location: str) -> HeadConfig:
        """A config.json of any layout; `location` is the checkpoint's.

        Raises DrafterError: a setting is invalid; raises as `flat_config`.
        """
        values = flat_config(config, location)
        try:
            own = cls.parse(values, where=f"{location}/config.json")
        except ConfigError as error:
            raise DrafterError(str(error)) from error
        own._values, own._location = values, location
        return own

    def check_read(self, *also: str) -> None:
        """DrafterError for settings, other than `also` and defaults, that were never read."""
        values, fields = self._values, type(self).model_fields
        defaults = {key for key in values.keys() & fields if values[key] == fields[key].default}
        unread = {key: values[key] for key in values.keys() - self._read - defaults}
        check_unread(unread, self._location, *also)


def flat_config(config: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The settings of a config.json of any format without its sections.

    Raises DrafterError: two sections disagree over a setting that matters, or they name a method
    that is not supported.
    """
    layers, *others = (config.get(name) or {} for name in SECTIONS)
    top = {key: value for key, value in config.items() if key not in SECTIONS}
    values: dict[str, Any] = {}
    for section in (layers, top, *others):
        if not isinstance(section, Mapping):
            raise DrafterError(f"{location}: a section of config.json must be a mapping.")
        own = {key: value for key, value in section.items() if value not in (None, [], {})}
        for key in (values.keys() & own.keys()) - HARMLESS:
            if values[key] != own[key]:
                raise DrafterError(
                    f"{location}/config.json says {key} twice: {short(values[key])} and "
                    f"{short(own[key])}. Remove the wrong one."
                )
        values |= own
    _check_method([layers, top, *others, top.get("speculators_config")], location)
    return values


def _check_method(sections: Iterable[Any], location: str) -> None:
    sections = [section for section in sections if isinstance(section, Mapping)]
    names = str([section.get(key) for section in sections for key in METHOD_KEYS]).lower()
    for word, method in OTHER_METHODS.items():
        if word in re.sub(r"[^a-z0-9,]", "", names):
            raise DrafterError(
                f"{location} is a {method} checkpoint by its config.json, which no method "
                "supports. Choose another drafter."
            )


def check_unread(values: Mapping[str, Any], location: str, *also: str) -> None:
    """DrafterError for settings that were never read, unless they do not matter."""
    unread = [
        f"{visible(key[:80])}: {short(value)}"
        for key, value in values.items()
        if value is not None
        and key not in HARMLESS
        and key not in also
        and not key.startswith("_")
        and value not in NEUTRAL.get(key, ())
    ]
    if unread:
        raise DrafterError(
            f"{location}/config.json says {name_list(unread)}, which this method does not support, "
            "so its drafts would be computed wrongly. Use the method that the drafter was made "
            "for, or remove the setting if it has no effect."
        )


def beyond_transformers(config: Any) -> dict[str, Any]:
    """Settings of a transformers config that its class lacks, so its model ignores them."""
    fields = type(config).__dataclass_fields__.keys() | type(config).attribute_map.keys()
    fields |= {"per_layer_config"}
    with contextlib.suppress(*READ_ERRORS):  # of what some classes compute, an example knows
        fields |= type(config)().to_dict().keys()
    return {key: value for key, value in config.to_dict().items() if key not in fields}
