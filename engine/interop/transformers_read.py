"""transformers' keyword arguments as a method: a script, a call, or a mapping.

A script is parsed and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.method import MethodConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.errors import ConfigError
from engine.interop.handoff import NO_MODEL, Imported, ReadYaml
from engine.interop.plain import number, sort_keys, whole

DRAFTING = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
KNOWN = frozenset(
    "assistant_model prompt_lookup_num_tokens max_matching_ngram_size use_mtp speculation_type "
    "assistant_early_exit assistant_lookbehind target_lookbehind tokenizer assistant_tokenizer "
    "max_new_tokens max_length min_new_tokens do_sample temperature top_k top_p num_beams "
    "use_cache streamer eos_token_id pad_token_id return_dict_in_generate repetition_penalty "
    "generation_config stop_strings output_scores attention_mask input_ids custom_generate".split()
)
MAX_CHARS = 200_000


@dataclass
class _Found:
    """What a script says."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    """Variable → what it was loaded from."""
    set_on: dict[str, Any] = field(default_factory=dict)
    """Fields of a generation config."""
    target: str | None = None


def read_transformers(text: str, read_yaml: ReadYaml) -> Imported:
    """The method that `generate` would use.

    Raises:
        ConfigError: no call of generate and no keyword arguments, or a method without counterpart.
    """
    found = _found(text, read_yaml)
    values = {**found.set_on, **found.kwargs}
    notes: list[str] = []
    config, used = _method(values, found, notes)
    known = KNOWN | set(DRAFTING)
    ignored, unknown = sort_keys(values, used=used, known=known)
    return Imported(config, found.target, tuple(notes), ignored, unknown)


def _method(
    values: Mapping[str, Any], found: _Found, notes: list[str]
) -> tuple[MethodConfig, set[str]]:
    if values.get("assistant_early_exit") is not None:
        raise ConfigError("assistant_early_exit (LayerSkip) has no counterpart here.")
    if values.get("prompt_lookup_num_tokens") is not None:
        return _ngram(values)
    if values.get("use_mtp"):
        notes.append("transformers drafts one token per MTP layer; 1 is taken here.")
        return MTPConfig(), {"use_mtp"}
    assistant = values.get("assistant_model")
    if assistant is None:
        raise ConfigError(
            "The call drafts nothing: it has neither assistant_model, prompt_lookup_num_tokens nor "
            "use_mtp."
        )
    model = found.loaded.get(str(assistant), str(assistant))
    named = None if model == NO_MODEL else model
    if values.get("speculation_type") == "dflash":
        config = DFlashConfig.parse({"speculative_model": named})
        return config, {"assistant_model", "speculation_type"}
    return _draft(values, named, notes)


def _ngram(values: Mapping[str, Any]) -> tuple[MethodConfig, set[str]]:
    settings: dict[str, Any] = {
        "lookup": "transformers",
        "max_draft_len": whole(values, "prompt_lookup_num_tokens"),
    }
    if values.get("max_matching_ngram_size") is not None:
        settings["max_matching_ngram_size"] = whole(values, "max_matching_ngram_size")
    return NGramConfig.parse(settings), {"prompt_lookup_num_tokens", "max_matching_ngram_size"}


def _draft(
    values: Mapping[str, Any], model: str | None, notes: list[str]
) -> tuple[MethodConfig, set[str]]:
    settings: dict[str, Any] = {"speculative_model": model, "max_draft_len": 20}
    settings["confidence_threshold"] = 0.4
    if values.get("num_assistant_tokens") is not None:
        settings["max_draft_len"] = whole(values, "num_assistant_tokens")
    else:
        notes.append("num_assistant_tokens is not set: 20, transformers' default, is taken.")
    if values.get("assistant_confidence_threshold") is not None:
        settings["confidence_threshold"] = number(values, "assistant_confidence_threshold")
    else:
        notes.append("assistant_confidence_threshold is not set: 0.4, its default, is taken.")
    if values.get("num_assistant_tokens_schedule", "constant") != "constant":
        notes.append("Here the draft length stays constant; its schedule is ignored.")
    return DraftTargetConfig.parse(settings), {"assistant_model", *DRAFTING}


def _found(text: str, read_yaml: ReadYaml) -> _Found:
    if len(text) > MAX_CHARS:
        raise ConfigError(f"The script has {len(text)} characters; {MAX_CHARS} are allowed.")
    if "(" not in text:
        values = read_yaml(text)
        if not isinstance(values, Mapping):
            raise ConfigError("Paste a script that calls generate(…), or its keyword arguments.")
        return _Found(kwargs={str(key): value for key, value in values.items()})
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"The script is not valid Python{place}.") from error
    found = _Found()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            _assigned(node.targets[0], node.value, found)
        if isinstance(node, ast.Call):
            _called(node, found)
    return found


def _assigned(target: ast.expr, value: ast.expr, found: _Found) -> None:
    if isinstance(target, ast.Name) and isinstance(value, ast.Call):
        name = _attribute(value.func)
        if name == "from_pretrained" and value.args:
            loaded = _constant(value.args[0])
            if isinstance(loaded, str):
                found.loaded[target.id] = loaded
    if isinstance(target, ast.Attribute) and _attribute(target.value) == "generation_config":
        found.set_on[target.attr] = _constant(value)


def _called(node: ast.Call, found: _Found) -> None:
    name = _attribute(node.func)
    if name not in ("generate", "GenerationConfig"):
        return
    for keyword in node.keywords:
        if keyword.arg is not None:
            found.kwargs[keyword.arg] = _constant(keyword.value)
    if name == "generate" and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name):
            found.target = found.loaded.get(owner.id)


def _attribute(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.expr) -> Any:
    """A literal's value, or the name of a variable."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
