"""vLLM's speculative config as a method: JSON, a YAML file, or a whole command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.medusa import MedusaConfig
from engine.drafters.method import MethodConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.drafters.suffix import SuffixConfig
from engine.errors import ConfigError
from engine.interop.flags import read_flags
from engine.interop.handoff import NO_MODEL, Imported, ReadYaml
from engine.interop.plain import number, sort_keys, whole
from engine.interop.trees import parse_tree
from engine.tree import ChoiceTree

KNOWN = frozenset(
    "method model num_speculative_tokens draft_tensor_parallel_size quantization kv_cache_dtype "
    "moe_backend attention_backend revision code_revision max_model_len enforce_eager "
    "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_min_token_prob parallel_drafting use_heterogeneous_vocab draft_load_config "
    "num_speculative_tokens_per_batch_size rejection_sample_method synthetic_acceptance_rates "
    "synthetic_acceptance_length draft_sample_method disable_padded_drafter_batch "
    "disable_eagle_block_drop use_local_argmax_reduction enable_adaptive_verification "
    "index_share_for_mtp_iteration dspark_draft_topk disable_lookahead_block_hashes "
    "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold "
    "fly_entropy_top_k speculative_token_tree disable_by_batch_size disable_logprobs".split()
)
"""Keys of any release from 0.10 to 0.33."""
NO_COUNTERPART = {
    "mlp_speculator": "an MLP speculator",
    "custom_class": "a proposer class of your own; register a drafter here instead",
    "extract_hidden_states": "no drafting at all, it writes training data",
    "dspark": "DSpark",
}
Read = tuple[MethodConfig, set[str]]
"""A config, and the keys that went into it."""


def read_vllm(text: str, read_yaml: ReadYaml) -> Imported:
    """The JSON object, a YAML file that has it, or a whole `vllm serve` command.

    Raises:
        ConfigError: no speculative config in it, or one that has no counterpart here.
    """
    values, target = _given(text, read_yaml)
    method = _method(values)
    reader = _READERS.get(method)
    if reader is None:
        what = NO_COUNTERPART.get(method)
        raise ConfigError(
            f"vLLM's method {method!r:.40} has no counterpart here"
            + (f": {what}." if what else ".")
        )
    notes: list[str] = []
    config, used = reader(values, notes)
    if values.get("method") is None:
        notes.append(f"No method is named; vLLM's own rules make it {method}.")
    ignored, unknown = sort_keys(values, used={*used, "method"}, known=KNOWN)
    return Imported(config, target, tuple(notes), ignored, unknown)


def _given(text: str, read_yaml: ReadYaml) -> tuple[dict[str, Any], str | None]:
    """The speculative config as plain data, and the target if the text names it."""
    if not text.lstrip().startswith("{") and "--spec" in text:
        return _of_command(text, read_yaml)
    values = read_yaml(text)
    target = None
    for key in ("speculative_config", "speculative-config"):
        if isinstance(values, Mapping) and values.get(key) is not None:
            target = values.get("model") if isinstance(values.get("model"), str) else None
            inner = values[key]
            values = read_yaml(inner) if isinstance(inner, str) else inner
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(
            'A vLLM config must be an object such as {"method": "ngram", …}, or a command with '
            f"--speculative-config, got {text.strip()[:60]!r}."
        )
    return {str(key): value for key, value in values.items()}, target


def _of_command(text: str, read_yaml: ReadYaml) -> tuple[dict[str, Any], str | None]:
    flags = read_flags(text)
    given = flags.first("--speculative-config", "--spec-config")
    values = read_yaml(given) if given else {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"--speculative-config must be a JSON object, got {given!r:.80}.")
    dotted = "--speculative-config."
    more = {
        name.removeprefix(dotted).replace("-", "_"): read_yaml(value)
        for name, value in flags.options.items()
        if name.startswith(dotted)
    }
    merged = {str(key): value for key, value in {**values, **more}.items()}
    if not merged:
        raise ConfigError("The command has no --speculative-config with a JSON object.")
    served = flags.words[flags.words.index("serve") + 1 :] if "serve" in flags.words else ()
    return merged, flags.first("--model") or (served[0] if served else None)


def _method(values: Mapping[str, Any]) -> str:
    """The method, inferred as vLLM does where it is not named."""
    method, model = values.get("method"), values.get("model")
    if isinstance(method, str):
        method = method.strip("[]")
        return "mtp" if method.endswith("_mtp") else "ngram" if method == "ngram_gpu" else method
    if not isinstance(model, str):
        raise ConfigError("The config names neither method nor model. Add one of them.")
    low = model.lower()
    if low.strip("[]") == "ngram":
        return "ngram"
    guesses = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "medusa": "medusa"}
    return next((name for sign, name in guesses.items() if sign in low), "draft_model")


def _length(values: Mapping[str, Any]) -> int:
    if values.get("num_speculative_tokens") is None:
        raise ConfigError("num_speculative_tokens is missing. Add it: how many tokens to draft.")
    return whole(values, "num_speculative_tokens")


def _model(values: Mapping[str, Any]) -> str | None:
    model = values.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model must be a name, got {model!r:.80}.")
    return None if model == NO_MODEL else model


def _read_draft(values: Mapping[str, Any], notes: list[str]) -> Read:
    sampled = values.get("draft_sample_method") in ("probabilistic", "gumbel")
    sampled = sampled or values.get("rejection_sample_method") == "probabilistic"
    config = DraftTargetConfig.parse(
        {
            "speculative_model": _model(values),
            "max_draft_len": _length(values),
            "use_draft_probs": sampled,
        }
    )
    used = {"model", "num_speculative_tokens", "draft_sample_method"}
    if values.get("rejection_sample_method") in ("probabilistic", "strict"):
        used.add("rejection_sample_method")
    return config, used


def _read_ngram(values: Mapping[str, Any], notes: list[str]) -> Read:
    given = [key for key in ("prompt_lookup_max", "prompt_lookup_min") if values.get(key)]
    most = whole(values, given[0]) if given else 5
    least = whole(values, given[-1]) if given else 5
    if least > 1:
        notes.append(f"Here matches go down to 1 token, there they end at {least}.")
    config = NGramConfig.parse({"max_draft_len": _length(values), "max_matching_ngram_size": most})
    return config, {"model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


def _read_suffix(values: Mapping[str, Any], notes: list[str]) -> Read:
    names = {
        "max_tree_depth": ("suffix_decoding_max_tree_depth", whole),
        "max_spec_factor": ("suffix_decoding_max_spec_factor", number),
        "min_token_prob": ("suffix_decoding_min_token_prob", number),
    }
    settings: dict[str, Any] = {
        ours: cast(values, theirs) for ours, (theirs, cast) in names.items() if theirs in values
    }
    depth = settings.get("max_tree_depth", 24)
    length = _length(values) if values.get("num_speculative_tokens") is not None else depth
    requests = "suffix_decoding_max_cached_requests"
    settings["use_global_pool"] = requests not in values or whole(values, requests) > 0
    if settings["use_global_pool"]:
        notes.append("Here the pool of earlier runs is limited in tokens, there in requests.")
    config = SuffixConfig.parse({**settings, "max_draft_len": length})
    return config, {"num_speculative_tokens", requests, *(theirs for theirs, _ in names.values())}


def _read_medusa(values: Mapping[str, Any], notes: list[str]) -> Read:
    chain = ChoiceTree.chain(_length(values))
    settings = {"speculative_model": _model(values), "medusa_choices": chain.paths}
    return MedusaConfig.parse(settings), {"model", "num_speculative_tokens"}


def _read_eagle(values: Mapping[str, Any], notes: list[str]) -> Read:
    given = values.get("speculative_token_tree")
    tree = parse_tree(str(given)) if given else ChoiceTree.chain(_length(values))
    settings = {"speculative_model": _model(values), "eagle_choices": tree.paths}
    used = {"model", "num_speculative_tokens", "speculative_token_tree"}
    return EagleConfig.parse(settings), used


def _read_eagle3(values: Mapping[str, Any], notes: list[str]) -> Read:
    settings = {"speculative_model": _model(values), "max_draft_len": _length(values)}
    return Eagle3Config.parse(settings), {"model", "num_speculative_tokens"}


def _read_mtp(values: Mapping[str, Any], notes: list[str]) -> Read:
    return MTPConfig.parse({"max_draft_len": _length(values)}), {"num_speculative_tokens"}


def _read_dflash(values: Mapping[str, Any], notes: list[str]) -> Read:
    settings = {"speculative_model": _model(values), "max_draft_len": _length(values)}
    return DFlashConfig.parse(settings), {"model", "num_speculative_tokens"}


_READERS: Mapping[str, Callable[[Mapping[str, Any], list[str]], Read]] = {
    "draft_model": _read_draft,
    "ngram": _read_ngram,
    "suffix": _read_suffix,
    "medusa": _read_medusa,
    "eagle": _read_eagle,
    "eagle3": _read_eagle3,
    "mtp": _read_mtp,
    "dflash": _read_dflash,
}
