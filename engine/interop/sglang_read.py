"""SGLang's flags as a method: a `launch_server` command, or the flags alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.drafters.dflash import DFlashConfig
from engine.drafters.draft_target import DraftTargetConfig
from engine.drafters.eagle import EagleConfig
from engine.drafters.eagle3 import Eagle3Config
from engine.drafters.method import MethodConfig
from engine.drafters.mtp import MTPConfig
from engine.drafters.ngram import NGramConfig
from engine.errors import ConfigError
from engine.interop.flags import Flags, read_flags
from engine.interop.handoff import NO_MODEL, Imported, ReadYaml
from engine.interop.plain import number, sort_keys, whole
from engine.tree import ChoiceTree

PREFIX = "--speculative-"
KNOWN = frozenset(
    PREFIX + name
    for name in (
        "algorithm draft-model-path draft-model draft-model-revision draft-load-format num-steps "
        "eagle-topk num-draft-tokens dflash-block-size dspark-block-size accept-threshold-single "
        "accept-threshold-acc use-rejection-sampling use-block-verification token-map "
        "attention-mode draft-attention-backend moe-runner-backend moe-a2a-backend "
        "draft-model-quantization draft-kv-cache-dtype draft-window-size draft-sink-size "
        "dsa-topk-backend adaptive adaptive-config ngram-min-match-window-size "
        "ngram-max-match-window-size ngram-min-bfs-breadth ngram-max-bfs-breadth ngram-match-type "
        "ngram-branch-length ngram-max-trie-depth ngram-capacity ngram-external-corpus-path "
        "ngram-external-sam-budget ngram-external-corpus-max-tokens"
    ).split()
)
"""Flags of any release from 0.4.10 to 0.5.23, but for some of DSPARK's."""
SWITCHES = frozenset(
    PREFIX + name for name in ("use-rejection-sampling", "use-block-verification", "adaptive")
)
MODEL = (PREFIX + "draft-model-path", PREFIX + "draft-model")
SIZE = (PREFIX + "num-steps", PREFIX + "eagle-topk", PREFIX + "num-draft-tokens")
NO_TREE: tuple[int, int, int] = (3, 1, 4)
Values = Mapping[str, str]
Read = tuple[MethodConfig, set[str]]


def read_sglang(text: str, read_yaml: ReadYaml) -> Imported:
    """The method that the flags name.

    Raises:
        ConfigError: no --speculative-algorithm, or one that has no counterpart here.
    """
    flags = read_flags(text, switches=SWITCHES)
    values = {k: v for k, v in flags.options.items() if k.startswith(PREFIX)}
    algorithm = values.get(PREFIX + "algorithm", "").upper()
    reader = _READERS.get(algorithm)
    if reader is None:
        raise ConfigError(
            f"--speculative-algorithm must be one of {', '.join(_READERS)}, got "
            f"{algorithm or 'none'}. Others have no counterpart here."
        )
    notes: list[str] = []
    config, used = reader(values, notes)
    _tell_thresholds(values, notes)
    used |= {PREFIX + "algorithm"}
    ignored, unknown = sort_keys(values, used=used, known=KNOWN)
    return Imported(config, _target(flags), tuple(notes), ignored, unknown)


def _target(flags: Flags) -> str | None:
    return flags.first("--model-path", "--model")


def _tell_thresholds(values: Values, notes: list[str]) -> None:
    for name in ("accept-threshold-single", "accept-threshold-acc"):
        if PREFIX + name in values and number(values, PREFIX + name) != 1.0:
            notes.append(f"{PREFIX}{name} below 1 is lossy there; the method here is lossless.")


def _model(values: Values) -> str | None:
    model = next((values[name] for name in MODEL if name in values), None)
    return None if model == NO_MODEL else model


def _size(values: Values, notes: list[str]) -> tuple[int, int, int]:
    """Steps, topk and draft tokens, root counted; filled in as SGLang does for most models."""
    if not any(name in values for name in SIZE):
        notes.append(
            "SGLang sets steps, topk and draft tokens itself: 5, 4, 8 for Llama and Grok, "
            "3, 1, 4 for others; 3, 1, 4 is taken here."
        )
        return NO_TREE
    missing = [name for name in SIZE if name not in values]
    if missing:
        raise ConfigError(f"SGLang wants all of {', '.join(SIZE)}; {missing[0]} is missing.")
    steps, topk, tokens = (whole(values, name) for name in SIZE)
    if topk == 1 and tokens != steps + 1:
        notes.append(f"With topk 1, SGLang drafts {steps} tokens whatever num-draft-tokens says.")
    return steps, topk, tokens


def _read_eagle(values: Values, notes: list[str]) -> Read:
    if _model(values) is None and not any(name in values for name in MODEL):
        notes.append("EAGLE without a draft model is the target's own MTP layer.")
        return _read_mtp(values, notes)
    steps, topk, tokens = _size(values, notes)
    settings: dict[str, Any] = {"speculative_model": _model(values)}
    if topk == 1:
        settings["eagle_choices"] = ChoiceTree.chain(steps).paths
    else:
        settings |= _dynamic(steps, topk, tokens)
    return EagleConfig.parse(settings), {*MODEL, *SIZE}


def _dynamic(steps: int, topk: int, tokens: int) -> dict[str, Any]:
    return {
        "use_dynamic_tree": True,
        "max_draft_len": steps,
        "dynamic_tree_max_topK": topk,
        "max_total_draft_tokens": tokens - 1,
    }


def _read_eagle3(values: Values, notes: list[str]) -> Read:
    steps, topk, tokens = _size(values, notes)
    tree = {"max_draft_len": steps} if topk == 1 else _dynamic(steps, topk, tokens)
    config = Eagle3Config.parse({"speculative_model": _model(values), **tree})
    return config, {*MODEL, *SIZE}


def _read_mtp(values: Values, notes: list[str]) -> Read:
    steps, topk, _ = _size(values, notes)
    if topk > 1:
        notes.append("Here MTP drafts a chain: topk is ignored.")
    return MTPConfig.parse({"max_draft_len": steps}), set(SIZE)


def _read_draft(values: Values, notes: list[str]) -> Read:
    steps, topk, _ = _size(values, notes)
    if topk > 1:
        notes.append("Here a draft model drafts a chain: topk is ignored.")
    settings = {
        "speculative_model": _model(values),
        "max_draft_len": steps,
        "use_draft_probs": False,
    }
    return DraftTargetConfig.parse(settings), {*MODEL, *SIZE}


def _read_ngram(values: Values, notes: list[str]) -> Read:
    tokens, window = PREFIX + "num-draft-tokens", PREFIX + "ngram-max-match-window-size"
    length = whole(values, tokens) - 1 if tokens in values else 11
    settings: dict[str, Any] = {"max_draft_len": length}
    if window in values:
        settings["max_matching_ngram_size"] = whole(values, window)
    notes.append("SGLang's trie and the pool here choose continuations by different rules.")
    return NGramConfig.parse(settings), {tokens, window}


def _read_dflash(values: Values, notes: list[str]) -> Read:
    names = (PREFIX + "num-draft-tokens", PREFIX + "dflash-block-size")
    given = next((name for name in names if name in values), None)
    length = None if given is None else whole(values, given) - 1
    config = DFlashConfig.parse({"speculative_model": _model(values), "max_draft_len": length})
    return config, {*MODEL, *names}


_READERS: Mapping[str, Callable[[Values, list[str]], Read]] = {
    "EAGLE": _read_eagle,
    "EAGLE3": _read_eagle3,
    "NEXTN": _read_mtp,
    "STANDALONE": _read_draft,
    "NGRAM": _read_ngram,
    "DFLASH": _read_dflash,
}
