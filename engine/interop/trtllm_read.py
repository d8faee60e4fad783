"""TensorRT-LLM's `speculative_config` as a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.combined import CombinedConfig
from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.lookahead import LookaheadConfig
from engine.drafters.medusa import MedusaConfig
from engine.drafters.method import MethodConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.interop.handoff import NO_MODEL, Imported, ReadYaml
from engine.interop.plain import sort_keys, whole
from engine.interop.trees import parse_tree
from engine.tree import ChoiceTree

COMMON = frozenset(
    "decoding_type max_draft_len max_total_draft_tokens speculative_model speculative_model_dir "
    "max_concurrency draft_len_schedule load_format acceptance_rate_window_size "
    "acceptance_rate_threshold use_rejection_sampling advanced_sampling_mode enable_penalty "
    "allow_advanced_sampling acceptance_window acceptance_length_threshold".split()
)
OWN = {
    "Eagle": "eagle_choices greedy_sampling posterior_threshold use_dynamic_tree "
    "dynamic_tree_max_topK num_eagle_layers max_non_leaves_per_layer eagle3_one_model "
    "eagle3_layers_to_capture eagle3_model_arch sa_config",
    "NGram": "max_matching_ngram_size is_keep_all is_use_oldest is_public_pool",
    "SA": "max_matching_ngram_size enable_global_pool global_pool_size",
    "MTP": "num_nextn_predict_layers use_relaxed_acceptance_for_thinking relaxed_topk "
    "relaxed_delta use_mtp_vanilla mtp_eagle_one_model use_dynamic_tree dynamic_tree_max_topK "
    "sa_config begin_thinking_phase_token end_thinking_phase_token",
    "Medusa": "medusa_choices num_medusa_heads",
    "Lookahead": "max_window_size max_ngram_size max_verification_set_size",
    "DFlash": "mask_token_id target_layer_ids attention_backend",
}
"""Keys of one decoding type, besides the common ones."""
SAME = {"DraftTarget": "Draft_Target", "UserProvided": "User_Provided", "Eagle3": "Eagle"}
MODEL = {"speculative_model", "speculative_model_dir"}
Values = Mapping[str, Any]
Read = tuple[MethodConfig, set[str]]


def read_trtllm(text: str, read_yaml: ReadYaml) -> Imported:
    """A YAML file with `speculative_config`, or the block alone.

    Raises:
        ConfigError: no such block, or a decoding type that has no counterpart here.
    """
    values = read_yaml(text)
    target = None
    if isinstance(values, Mapping) and isinstance(values.get("speculative_config"), Mapping):
        target = values.get("model") if isinstance(values.get("model"), str) else None
        values = values["speculative_config"]
    if not isinstance(values, Mapping) or not isinstance(values.get("decoding_type"), str):
        raise ConfigError(
            "A TensorRT-LLM file must have speculative_config with decoding_type, got "
            f"{text.strip()[:60]!r}."
        )
    return imported(values, target)


def imported(values: Values, target: str | None) -> Imported:
    """The method of a `speculative_config`.

    Raises:
        ConfigError: its decoding type has no counterpart here, or a value is out of range.
    """
    named = str(values["decoding_type"])
    kind = SAME.get(named, named)
    reader = _READERS.get(kind)
    if reader is None:
        raise ConfigError(
            f"decoding_type must be one of {', '.join(_READERS)}, got "
            f"{named!r:.40}. Others have no counterpart here."
        )
    notes: list[str] = []
    config, used = reader(values, notes)
    config = _with_look_up(config, values, notes)
    known = COMMON | set(OWN.get(kind, "").split())
    used |= {"decoding_type", "sa_config"} if "sa_config" in known else {"decoding_type"}
    ignored, unknown = sort_keys(map(str, values), used=used, known=known)
    return Imported(config, target, tuple(notes), ignored, unknown)


def _with_look_up(config: MethodConfig, values: Values, notes: list[str]) -> MethodConfig:
    """The method behind suffix look-up, where `sa_config` asks for it."""
    extra = values.get("sa_config")
    if not isinstance(extra, Mapping):
        return config
    notes.append("sa_config is suffix look-up before the method: Combined here.")
    pool = extra.get("enable_global_pool", False)
    return CombinedConfig.parse(
        {
            "retrieval": SuffixConfig.parse({"use_global_pool": pool}),
            "model": config,
            "min_match_len": extra.get("threshold", 4),
        }
    )


def _model(values: Values) -> str | None:
    model = values.get("speculative_model", values.get("speculative_model_dir"))
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"speculative_model must be a name or path, got {model!r:.80}.")
    return None if model == NO_MODEL else model


def _given(values: Values, *names: str) -> dict[str, Any]:
    """These settings as they are, where they are."""
    return {name: values[name] for name in names if values.get(name) is not None}


def _read_draft(values: Values, notes: list[str]) -> Read:
    settings = {
        "speculative_model": _model(values),
        "use_draft_probs": values.get("use_rejection_sampling", False),
        **_given(values, "max_draft_len"),
    }
    return DraftTargetConfig.parse(settings), {*MODEL, "max_draft_len", "use_rejection_sampling"}


def _plain(
    cls: type[MethodConfig], *names: str
) -> Callable[[Values, list[str]], tuple[MethodConfig, set[str]]]:
    """A reader for methods whose settings have the same names there and here."""

    def read(values: Values, notes: list[str]) -> Read:
        settings = _given(values, *names)
        if "speculative_model" in cls.model_fields:
            settings["speculative_model"] = _model(values)
            return cls.parse(settings), {*names, *MODEL}
        return cls.parse(settings), set(names)

    return read


def _read_suffix(values: Values, notes: list[str]) -> Read:
    settings = _given(values, "max_draft_len")
    settings["use_global_pool"] = values.get("enable_global_pool", False)
    if values.get("max_matching_ngram_size", -1) != -1:
        notes.append("max_matching_ngram_size is ignored: Suffix takes the longest match.")
    notes.append("SA copies max_draft_len tokens always; Suffix here as long as it is confident.")
    used = {"max_draft_len", "enable_global_pool", "max_matching_ngram_size"}
    return SuffixConfig.parse(settings), used


def _read_medusa(values: Values, notes: list[str]) -> Read:
    settings = {"speculative_model": _model(values), **_given(values, "num_medusa_heads")}
    tree = _tree(values.get("medusa_choices"))
    if tree is not None:
        settings["medusa_choices"] = tree.paths
    used = {*MODEL, "num_medusa_heads", "medusa_choices", "max_draft_len", "max_total_draft_tokens"}
    return MedusaConfig.parse(settings), used


def _tree(value: object) -> ChoiceTree | None:
    if value is None:
        return None
    return parse_tree(value) if isinstance(value, str) else ChoiceTree.parse(value)


def _read_eagle(values: Values, notes: list[str]) -> Read:
    """EAGLE-1/2 if the file has what only the TensorRT backend had, else EAGLE-3."""
    model = _model(values)
    low = (model or "").lower().replace("-", "").replace("_", "")
    old = any(values.get(k) is not None for k in ("eagle_choices", "num_eagle_layers"))
    if values["decoding_type"] == "Eagle3" or "eagle3" in low or not old:
        return _read_eagle3(values, notes)
    notes.append("num_eagle_layers or eagle_choices: read as EAGLE-1/2 of the TensorRT backend.")
    used = {*MODEL, "max_draft_len", "num_eagle_layers", "max_non_leaves_per_layer"}
    used |= {"use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens", "eagle_choices"}
    if not values.get("use_dynamic_tree"):
        tree = _tree(values.get("eagle_choices"))
        drawn = {} if tree is None else {"eagle_choices": tree.paths}
        return EagleConfig.parse({"speculative_model": model, **drawn}), used
    settings = _given(values, "dynamic_tree_max_topK", "max_non_leaves_per_layer")
    if settings.get("max_non_leaves_per_layer") == settings.get("dynamic_tree_max_topK"):
        settings.pop("max_non_leaves_per_layer", None)
    total = "max_total_draft_tokens"
    if values.get(total) is None:
        settings |= {total: whole(values, "max_draft_len")}
        settings |= {"max_draft_len": whole(values, "num_eagle_layers")}
    else:
        settings |= _given(values, total, "max_draft_len")
    return EagleConfig.parse(
        {"speculative_model": model, "use_dynamic_tree": True, **settings}
    ), used


def _read_eagle3(values: Values, notes: list[str]) -> Read:
    settings = {"speculative_model": _model(values), **_given(values, "max_draft_len")}
    used = {*MODEL, "max_draft_len", "use_dynamic_tree"}
    if values["decoding_type"] == "Eagle":
        notes.append("Eagle on the PyTorch backend is EAGLE-3.")
    layers = values.get("eagle3_layers_to_capture")
    if layers is not None:
        settings["eagle3_layers_to_capture"] = layers
    used.add("eagle3_layers_to_capture")
    if values.get("eagle_choices") is not None:
        notes.append("eagle_choices is ignored: EAGLE-3 here drafts a chain or a dynamic tree.")
    if not values.get("use_dynamic_tree"):
        return Eagle3Config.parse(settings), used
    names = ("dynamic_tree_max_topK", "max_total_draft_tokens", "max_non_leaves_per_layer")
    settings |= {"use_dynamic_tree": True, **_given(values, *names)}
    if values.get("max_total_draft_tokens") is None:
        topk = whole(values, "dynamic_tree_max_topK") if names[0] in values else 10
        settings["max_total_draft_tokens"] = topk * int(settings.get("max_draft_len", 5))
    return Eagle3Config.parse(settings), used | set(names)


def _read_mtp(values: Values, notes: list[str]) -> Read:
    names = (
        "use_relaxed_acceptance_for_thinking",
        "relaxed_topk",
        "relaxed_delta",
        "begin_thinking_phase_token",
        "end_thinking_phase_token",
    )
    settings = _given(values, *names)
    if isinstance(settings.get("relaxed_delta"), int):
        settings["relaxed_delta"] = float(settings["relaxed_delta"])
    for key in ("num_nextn_predict_layers", "max_draft_len"):
        if values.get(key) is not None:
            settings["max_draft_len"] = values[key]
    used = {*names, "max_draft_len", "num_nextn_predict_layers"}
    return MTPConfig.parse(settings), used


_POOL = ("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool")
_WINDOW = ("max_window_size", "max_ngram_size", "max_verification_set_size")
_READERS: Mapping[str, Callable[[Values, list[str]], Read]] = {
    "Draft_Target": _read_draft,
    "NGram": _plain(NGramConfig, "max_draft_len", *_POOL),
    "SA": _read_suffix,
    "Medusa": _read_medusa,
    "Eagle": _read_eagle,
    "Lookahead": _plain(LookaheadConfig, *_WINDOW),
    "MTP": _read_mtp,
    "DFlash": _plain(DFlashConfig, "max_draft_len", "mask_token_id", "target_layer_ids"),
}
